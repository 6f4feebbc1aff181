"""Limits of keys whose requests come through a gateway: who counts, who tells, and streams that move."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Harness
from pydantic import SecretStr

from dovetail_server.gateway.state import GatewayState
from dovetail_server.http.auth import Auth
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.tenants.keys_file import key_hash
from dovetail_server.tenants.tenant import RATE_HEADERS

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ALICE, RESUME = "sk-alice", "resume-key"


def keys_file(folder: Path, **limits: int) -> Path:
    """Write a file with one key."""
    path = folder / "keys.yaml"
    alice = {"name": "alice", "hash": f"sha256:{key_hash(ALICE)}", "limits": limits}
    path.write_text(json.dumps({"keys": [alice]}), encoding="utf-8")
    return path


def test_a_gateway_leaves_it_to_its_workers_to_tell_what_is_left(tmp_path: Path) -> None:
    """It counts nothing: what it sent beside a worker's headers was always the whole limit."""
    file = keys_file(tmp_path, requests=2, output_tokens_per_minute=600)
    workers = [(name.encode(), b"1") for name in RATE_HEADERS]
    sent: list[Any] = []

    async def relay(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": workers})

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        state = GatewayState(ServeSettings(keys_file=file), None, None)  # type: ignore[arg-type]
        scope = {"type": "http", "path": CHAT, "method": "POST", "headers": [(b"x-api-key", ALICE.encode())]}
        await Auth(relay, state.keys)(scope, None, send)  # type: ignore[arg-type]
        await state.session.close()

    asyncio.run(main())
    assert Counter(sent[0]["headers"]) == Counter(workers)


def usage(harness: Harness) -> dict[str, Any]:
    """Return what the key has used."""
    found: dict[str, Any] = harness.get("/v1/usage", headers={"x-api-key": ALICE}).json()["data"][0]
    return found


def resume(harness: Harness) -> Any:
    """Have a server go on with a stream of another server's of which nothing has come yet."""
    envelope = {"path": CHAT, "journal": f"{'ab' * 16}.1", "skip": 0, "deltas": []}
    data = json.dumps(envelope).encode() + b"\n" + json.dumps({**BODY, "stream": True}).encode()
    headers = {"x-api-key": ALICE, "x-dovetail-resume-key": RESUME, "content-type": "application/json"}
    return harness.post("/v1/resume", None, data=data, headers=headers)


@pytest.mark.parametrize("limits", [{"requests": 1}, {"input_tokens_per_minute": 1}, {"output_tokens_per_minute": 1}])
def test_a_stream_that_moves_is_within_its_keys_limits(
    make_harness: Callable[..., Harness], tmp_path: Path, limits: dict[str, int]
) -> None:
    """The worker that it came from had let it in. Others of the key are refused as before; all of it is counted."""
    harness = make_harness(keys_file=keys_file(tmp_path, **limits), resume_key=SecretStr(RESUME))
    as_alice = {"x-api-key": ALICE}
    harness.engine.hold.clear()
    running = threading.Thread(target=harness.post, args=(CHAT, BODY), kwargs={"headers": as_alice})
    running.start()
    harness.eventually(lambda: usage(harness)["running_requests"] == 1)
    if "output_tokens_per_minute" in limits:
        harness.engine.hold.set()
        running.join()
    assert harness.post(CHAT, BODY, headers=as_alice).status_code == 429
    harness.engine.hold.set()
    moved = resume(harness)
    running.join()
    assert moved.status_code == 200
    assert moved.text.endswith("data: [DONE]\n\n")
    assert usage(harness)["requests"] == 2


def test_a_stream_that_moves_finds_room_in_a_full_queue(make_harness: Callable[..., Harness]) -> None:
    """It ended with the 429 of a queue that its client had passed already."""
    harness = make_harness(
        api_key=(SecretStr(ALICE),), resume_key=SecretStr(RESUME), max_running_requests=1, max_queued_requests=1
    )
    harness.engine.hold.clear()
    as_alice = {"headers": {"x-api-key": ALICE}}
    running = [threading.Thread(target=harness.post, args=(CHAT, BODY), kwargs=as_alice) for _ in range(2)]
    for thread in running:
        thread.start()
    harness.eventually(lambda: usage(harness)["running_requests"] == 2)
    assert harness.post(CHAT, BODY, **as_alice).status_code == 429
    threading.Timer(0.2, harness.engine.hold.set).start()
    moved = resume(harness)
    for thread in running:
        thread.join()
    assert (moved.status_code, moved.text.endswith("data: [DONE]\n\n")) == (200, True)
