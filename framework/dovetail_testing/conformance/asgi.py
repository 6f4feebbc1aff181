"""One request to an ASGI application, without a server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import MutableMapping
from typing import Any

TIMEOUT_S = 10.0


def response_of(app: Any, path: str) -> int | None:
    """Send `GET path`, with `x` for every `{parameter}`, and return the status, None if no response begins."""
    filled = re.sub(r"{[^}]*}", "x", path)
    names = [name.partition(":")[0] for name in re.findall(r"{([^}]*)}", path)]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": filled,
        "raw_path": filled.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "path_params": dict.fromkeys(names, "x"),
    }
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def main() -> None:
        await asyncio.wait_for(app(scope, receive, send), TIMEOUT_S)

    asyncio.run(main())
    started = [message for message in sent if message["type"] == "http.response.start"]
    return started[0].get("status") if len(started) == 1 else None
