"""A request's life: disconnects, aborts, overload, a dying engine; and the server's: starting, draining."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import requests
from exchanges import error_of, send_raw
from harness import Harness

from dovetail.messages import Finish

USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": USER},
    "/v1/completions": {"model": "tiny", "prompt": "abc"},
    "/generate": {"text": "abc", "sampling_params": {}},
}


def with_n(path: str, n: int, stream: bool) -> dict[str, Any]:
    body = {**BODIES[path], "stream": stream}
    if path == "/generate":
        return {**body, "sampling_params": {"n": n}}
    return {**body, "n": n}


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stage", ["queued", "running"])
def test_a_disconnect_aborts_the_engine(harness: Harness, path: str, stream: bool, n: int, stage: str) -> None:
    """Whoever leaves, at any stage, streaming or not, any `n`, frees the engine."""
    harness.engine.delay_s = 0.01
    harness.text = "x" * 10000
    harness.engine.context_len = 512
    if stage == "queued":
        harness.engine.hold.clear()
    client = send_raw(harness, path, with_n(path, n, stream))
    harness.eventually(lambda: len(harness.engine.live) == n)
    if stage == "running":
        harness.eventually(lambda: harness.engine.step >= 3 * n)
    client.close()
    harness.eventually(lambda: not harness.engine.live)
    assert len(harness.engine.aborted) == n
    harness.eventually(lambda: harness.state.num_live == 0)
    assert not harness.state.live
    assert harness.get("/health").status_code == 200


def test_a_disconnect_while_the_body_arrives_is_harmless(harness: Harness) -> None:
    """A body that never ends leaves nothing behind."""
    client = socket.create_connection(("127.0.0.1", harness.port))
    client.sendall(
        b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
    )
    client.close()
    assert harness.get("/health").status_code == 200
    assert not harness.engine.submits


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("stream", [False, True])
def test_engine_death_before_the_first_token_is_a_503(harness: Harness, path: str, stream: bool) -> None:
    """An error before any output is a real status, also for streams."""
    harness.engine.die_after = 0
    reply = harness.post(path, {**BODIES[path], "stream": stream})
    assert (reply.status_code, error_of(reply)["code"]) == (503, "engine_dead")
    assert harness.get("/health").status_code == 503
    assert harness.post(path, BODIES[path]).status_code == 503
    assert harness.get("/livez").status_code == 200


@pytest.mark.parametrize("path", list(BODIES))
def test_engine_death_in_a_stream_is_an_error_event(harness: Harness, path: str) -> None:
    """After the headers an error is an `error` event, then `[DONE]`."""
    harness.engine.die_after = 3
    reply = harness.post(path, {**BODIES[path], "stream": True})
    assert reply.status_code == 200
    blocks = reply.text.split("\n\n")
    assert blocks[-2] == "data: [DONE]"
    name, data = blocks[-3].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "engine_dead"


def test_queue_full_is_a_429_with_retry_after(make_harness: Callable[..., Harness]) -> None:
    """Beyond the limits a request is turned away at once, and served again when there is room."""
    harness = make_harness(max_running_requests=1, max_queued_requests=1)
    harness.engine.hold.clear()
    clients = [send_raw(harness, "/generate", BODIES["/generate"]) for _ in range(2)]
    harness.eventually(lambda: harness.state.num_live == 2)
    for stream in (False, True):
        reply = harness.post("/generate", {**BODIES["/generate"], "stream": stream})
        assert (reply.status_code, error_of(reply)["code"]) == (429, "queue_full")
        assert int(reply.headers["retry-after"]) > 0
    for client in clients:
        client.close()
    harness.engine.hold.set()
    harness.eventually(lambda: harness.state.num_live == 0)
    assert harness.post("/generate", BODIES["/generate"]).status_code == 200


def test_abort_request(harness: Harness) -> None:
    """A request is aborted by its `rid`, with all its choices; the native API says so in its reply."""
    harness.engine.hold.clear()
    replies: dict[str, requests.Response] = {}

    def ask(name: str, path: str, body: dict[str, Any]) -> None:
        replies[name] = requests.post(harness.base + path, json=body, timeout=60)

    calls = [
        ("chat", "/v1/chat/completions", {**BODIES["/v1/chat/completions"], "rid": "a", "n": 2}),
        ("generate", "/generate", {"text": ["x", "y"], "rid": "b"}),
    ]
    threads = [threading.Thread(target=ask, args=call) for call in calls]
    for thread in threads:
        thread.start()
    harness.eventually(lambda: harness.state.num_live == 4)
    duplicate = harness.post("/generate", {"text": "x", "rid": "b#0"})
    assert (duplicate.status_code, error_of(duplicate)["code"]) == (409, "duplicate_rid")
    assert harness.post("/abort_request", {"rid": "a"}).json() == {"aborted": 2}
    assert harness.post("/abort_request", {"rid": "b"}).json() == {"aborted": 2}
    assert harness.post("/abort_request", {"rid": "zzz"}).json() == {"aborted": 0}
    assert harness.post("/abort_request", {}).status_code == 400
    for thread in threads:
        thread.join(60)
    assert (replies["chat"].status_code, error_of(replies["chat"])["code"]) == (400, "request_aborted")
    assert [item["meta_info"]["finish_reason"]["type"] for item in replies["generate"].json()] == ["abort", "abort"]
    assert harness.state.num_live == 0


@pytest.mark.parametrize(
    ("finish", "status", "code"),
    [
        (Finish("abort", None, "no such grammar", "invalid_grammar"), 400, "invalid_grammar"),
        (Finish("abort", None, "the output is not finite"), 500, "request_failed"),
        (Finish("abort", None, "aborted"), 400, "request_aborted"),
        (Finish("abort", None, "the engine died 3 times of it", "engine_crashed"), 500, "engine_crashed"),
    ],
)
@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_gives_up_is_told(
    harness: Harness, finish: Finish, status: int, code: str, path: str, stream: bool
) -> None:
    """Before the first token the reply's status says whether the request or the engine is at fault."""
    harness.engine.give_up = finish
    reply = harness.post(path, {**BODIES[path], "stream": stream})
    assert (reply.status_code, error_of(reply)["code"]) == (status, code)


def test_starting_server_says_so(make_harness: Callable[..., Harness]) -> None:
    """While the engine starts the process is alive, not ready, and refuses requests with a 503."""
    harness = make_harness(is_ready=False)
    assert harness.get("/livez").status_code == 200
    for path in ("/readyz", "/health", "/health_generate"):
        assert harness.get(path).status_code == 503
    reply = harness.get("/v1/models")
    assert (reply.status_code, error_of(reply)["code"]) == (503, "starting")
    assert "retry-after" in reply.headers
    harness.make_ready()
    assert harness.get("/v1/models").status_code == 200
    assert harness.get("/readyz").status_code == 200


def test_a_server_whose_engine_is_started_again_is_not_ready(harness: Harness) -> None:
    """Probes say so, with the reason; requests are taken and wait, and the metrics count it."""
    harness.engine.restarting = "the engine hung: no step and no layer for 31 s"
    for path in ("/readyz", "/health", "/health_generate"):
        reply = harness.get(path)
        assert (reply.status_code, reply.json()["reason"]) == (503, "engine restarting: " + harness.engine.restarting)
    assert harness.get("/livez").status_code == 200
    assert harness.post("/generate", BODIES["/generate"]).status_code == 200
    harness.engine.restarting, harness.engine.num_restarts = None, 1
    assert harness.get("/readyz").status_code == 200
    assert "dovetail_engine_restarts_total 1.0" in harness.get("/metrics").text


def drain(harness: Harness) -> None:
    """Do what the first SIGTERM does."""
    harness.state.is_draining = True
    harness.loop.call_soon_threadsafe(harness.server._begin_drain)


def test_draining_lets_running_requests_finish(make_harness: Callable[..., Harness]) -> None:
    """From the signal on nothing new is taken, what runs completes, and then the server ends."""
    harness = make_harness(drain_timeout=60)
    harness.engine.hold.clear()
    with send_raw(harness, "/generate", BODIES["/generate"]) as client:
        harness.eventually(lambda: harness.state.num_live == 1)
        drain(harness)
        assert harness.get("/readyz").status_code == 503
        reply = harness.post("/generate", BODIES["/generate"])
        assert (reply.status_code, error_of(reply)["code"]) == (503, "draining")
        harness.engine.hold.set()
        client.settimeout(60)
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert b"Hello, world" in received
    harness.thread.join(60)
    assert not harness.thread.is_alive()


def test_draining_cuts_off_after_the_timeout(make_harness: Callable[..., Harness]) -> None:
    """What does not finish in time ends with an error event."""
    harness = make_harness(drain_timeout=0.2)
    harness.engine.delay_s = 0.05
    harness.text = "x" * 400
    path = "/v1/chat/completions"
    reply = requests.post(harness.base + path, json={**BODIES[path], "stream": True}, stream=True, timeout=60)
    lines = reply.iter_lines(decode_unicode=True)
    next(lines)
    drain(harness)
    rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert rest[-3] == "event: error"
    harness.thread.join(60)
    assert not harness.thread.is_alive()


def test_connections_that_are_open_hear_of_the_end(make_harness: Any) -> None:
    """A router that holds a connection gets a 503 on it, which it retries elsewhere, and is told to close it."""
    harness = make_harness()
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert harness.post("/v1/chat/completions", body).status_code == 200
    done = asyncio.run_coroutine_threadsafe(harness.server.drain(), harness.loop)
    time.sleep(0.5)
    reply = harness.post("/v1/chat/completions", body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")
    assert reply.headers["connection"] == "close"
    done.result(30)
