"""Addresses as they are written, for servers, gateways and Ray's front."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Send a path as it is written: libraries tidy it up."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = None if body is None else json.dumps(body)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, data, {"content-type": "application/json"} | given)
    reply = connection.getresponse()
    found = reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
    connection.close()
    return found


def spellings(path: str) -> list[str]:
    """Ways to write a path that somebody might hope to pass by."""
    name = path.removeprefix("/")
    encoded = "".join(f"%{ord(letter):02x}" for letter in name)
    return [
        path, f"/{path}", f"//{path}", f"{path}/", f"{path}//", f"/v1{path}", f"/v1/v1{path}", f"/v1/{path}",
        f"//v1{path}", f"/openai{path}", f"/openai/v1{path}", f"/openai/deployments/tiny{path}", f"/v1/..{path}",
        f"/livez/..{path}", f"/livez/../{path}", f"/./{name}", f"/v1/%2e%2e{path}", f"/livez%2f..{path}",
        f"/livez%2f%2e%2e%2f{name}", f"/%2f{name}", f"%2f{name}", f"/{encoded}", f"/%2e{path}", f"/{name}%2f",
        f"/{name}%00", f"/{name};/livez", f"/{name}?/livez", f"/{name}%3f/livez", f"/livez/%2e%2e%2f{name}",
        f"/\\{name}", f"/%5c{name}", f"/{name.upper()}", f"/docs/..{path}", f"/docs//..{path}", f"/x/../{name}",
        f"/%252f{name}", f"http://localhost{path}", f"http://localhost/{path}", f"/playground/..{path}", f"/{name}%20",
    ]  # fmt: skip


def websocket(port: int, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
    """Ask for a WebSocket; the refusal."""
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{port}{path}", additional_headers=headers)
    reply = refused.value.response
    return reply.status_code, json.loads(reply.body)["error"]
