"""Overload and oversize: refused early, clearly and cheaply, on every route; what has room is served."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import requests
from exchanges import error_of
from harness import Harness

from dovetail_server.openapi.examples import BODIES, fill

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
JSON = {"content-type": "application/json"}
GENERATE = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/generate"]


@contextmanager
def held(harness: Harness, count: int, body: dict[str, Any] = BODY) -> Iterator[None]:
    """Keep requests in the engine."""
    harness.engine.hold.clear()
    threads = [threading.Thread(target=harness.post, args=(CHAT, body)) for _ in range(count)]
    for thread in threads:
        thread.start()
    harness.eventually(lambda: harness.state.num_live == count)
    try:
        yield
    finally:
        harness.engine.hold.set()
        for thread in threads:
            thread.join(60)
        harness.eventually(lambda: harness.state.num_live == 0)


def refused(reply: requests.Response) -> str:
    """Return the message of a refusal for overload, checking what a client needs to come back."""
    assert reply.status_code == 429, reply.text
    assert int(reply.headers["retry-after"]) >= 1
    error = error_of(reply)
    assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
    return str(error["message"])


def test_the_limit_on_requests(make_harness: Callable[..., Harness]) -> None:
    """Beyond running and queued requests each generation route refuses; afterwards all is served again."""
    harness = make_harness(max_running_requests=1, max_queued_requests=1)
    with held(harness, 2):
        for path in GENERATE:
            reply = harness.post(path, fill(next(iter(BODIES[path].values())), "tiny"))
            if path == "/v1/messages":
                assert (reply.status_code, reply.json()["error"]["type"]) == (529, "overloaded_error")
                assert reply.headers["retry-after"]
            else:
                assert "2 requests" in refused(reply)
        assert harness.get("/readyz").status_code == 200
        assert harness.get("/v1/models").status_code == 200
        assert harness.post("/tokenize", {"model": "tiny", "prompt": "a"}).status_code == 200
    assert harness.post(CHAT, BODY).status_code == 200


def test_a_full_queue_reads_no_body(make_harness: Callable[..., Harness]) -> None:
    """The refusal comes before the body, so that it costs the same for any."""
    harness = make_harness(max_running_requests=1, max_queued_requests=1)
    with held(harness, 2), socket.create_connection(("127.0.0.1", harness.port), timeout=60) as client:
        client.sendall(
            b"POST /generate HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 999\r\n\r\n{"
        )
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 429 ")


def test_the_limit_on_choices(make_harness: Callable[..., Harness]) -> None:
    """A request counts once per choice; one that would not fit if it were alone is no matter of load."""
    harness = make_harness(max_running_requests=2, max_queued_requests=2)
    assert harness.post(CHAT, {**BODY, "n": 4}).status_code == 200
    reply = harness.post(CHAT, {**BODY, "n": 5})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")
    with held(harness, 1):
        refused(harness.post(CHAT, {**BODY, "n": 4}))


def test_the_limit_on_prompt_tokens(make_harness: Callable[..., Harness]) -> None:
    """Prompts that run and wait are bounded together; one that is alone is served, however long."""
    harness = make_harness(max_queued_tokens=60)
    long = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 80}]}
    assert harness.post(CHAT, long).status_code == 200
    with held(harness, 1):
        assert harness.state.num_live_tokens > 20
        assert "--max-queued-tokens" in refused(harness.post(CHAT, long))
    assert harness.state.num_live_tokens == 0
    assert harness.post(CHAT, long).status_code == 200


def test_the_default_limit_on_prompt_tokens(harness: Harness) -> None:
    """It is on by default: some times the KV cache."""
    assert harness.state.max_live_tokens == 8 * harness.engine.info.max_total_tokens


@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_limit_on_bytes(make_harness: Callable[..., Harness], is_chunked: bool) -> None:
    """Bodies in memory are bounded together, whether they say their length or not; uploads to disk do not count."""
    harness = make_harness(max_queued_bytes=5000, max_body_bytes=4000)
    filler = {**BODY, "metadata": {f"k{i}": "x" * 200 for i in range(14)}}
    raw = json.dumps(filler).encode()
    with held(harness, 1, filler):
        assert harness.state.num_held_bytes > 2800
        data = iter([raw[:1000], raw[1000:]]) if is_chunked else raw
        assert "--max-queued-bytes" in refused(harness.post(CHAT, data=data, headers=JSON))
        assert harness.post(CHAT, data=b"{}", headers=JSON).status_code == 400
        files = {"file": ("a.txt", b"y" * 9000)}
        assert harness.post("/v1/files", files=files, data={"purpose": "user_data"}).status_code == 200
    harness.eventually(lambda: harness.state.num_held_bytes == 0)
    assert harness.post(CHAT, filler).status_code == 200


def test_bytes_are_given_back_however_a_request_ends(make_harness: Callable[..., Harness]) -> None:
    """A client that leaves in its body, or before the reply, leaves nothing behind."""
    harness = make_harness()
    head = (
        b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n"
    )
    client = socket.create_connection(("127.0.0.1", harness.port))
    client.sendall(head + b"x" * 3000)
    harness.eventually(lambda: harness.state.num_held_bytes == 3000)
    client.close()
    harness.eventually(lambda: harness.state.num_held_bytes == 0)


def test_refusals_before_the_engine_is_up(make_harness: Callable[..., Harness]) -> None:
    """503 means starting, and says when to come back."""
    harness = make_harness(is_ready=False)
    reply = harness.post(CHAT, BODY)
    assert (reply.status_code, error_of(reply)["code"]) == (503, "starting")
    assert reply.headers["retry-after"]


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("req-1", True),
        ("x" * 128, True),
        ("3f2504e0-4f89-41d3-9a0c-0305e82c3301", True),
        ("x" * 129, False),
        ("has space", False),
        ("tab\tbed", False),
        ("é", False),
        ("", False),
    ],
)
def test_request_ids(harness: Harness, given: str, is_kept: bool) -> None:
    """A sane one of the client is echoed, on success and on error; anything else is replaced."""
    for path, body, status in ((CHAT, BODY, 200), (CHAT, {}, 400), ("/nothing", {}, 404)):
        reply = harness.post(path, body, headers={"x-request-id": given.encode("latin-1")})
        assert reply.status_code == status
        found = reply.headers["x-request-id"]
        assert (found == given) is is_kept
        assert is_kept or found.startswith("req_")


DEEP = [b"[" * 1000 + b"]" * 1000, b'{"a":' * 1000 + b"1" + b"}" * 1000, b'{"messages":' + b"[" * 100_000]
BAD_BODIES = [
    *DEEP,
    b"",
    b"\xff\xfe",
    b'{"a": "\\ud800"}',
    b'{"a": "\\u0000"}',
    b'{"\\u0000": 1}',
    b'{"\\ud800": 1}',
    b'{"a": "\xed\xa0\x80"}',
    b'{"a": NaN}',
    b'{"a": 1e999}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b"\x00",
    b"null",
    b'{"a": 1',
]


OFF = {"/start_profile"}
"""Not served without a folder for profiles; `test_profile.py` sends it bodies."""


@pytest.mark.parametrize("path", sorted(BODIES))
def test_every_json_route_refuses_what_is_no_proper_body(harness: Harness, path: str) -> None:
    """Deep nesting, NUL, lone surrogates, bad UTF-8 and huge numbers are a 400 on every route that takes JSON."""
    good = fill(next(iter(BODIES[path].values())), "tiny")
    name = next(iter(good))
    for raw in [*BAD_BODIES, json.dumps({**good, name: "\ud800"}).encode(), json.dumps({**good, name: "a\0"}).encode()]:
        reply = harness.post(path, data=raw, headers=JSON)
        assert reply.status_code in ({400, 404} if path in OFF else {400}), (raw[:80], reply.text)
        assert reply.json()["error"]["type"] == "invalid_request_error"
    assert not harness.engine.submits


@pytest.mark.parametrize("path", sorted(BODIES))
def test_every_json_route_refuses_other_content_types(harness: Harness, path: str) -> None:
    """What a page of another site may send without asking is not taken."""
    body = json.dumps(fill(next(iter(BODIES[path].values())), "tiny")).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "é", "x" * 999):
        reply = harness.post(path, data=body, headers={"content-type": kind.encode("latin-1")})
        assert reply.status_code == 415, (kind, reply.text)
    assert not harness.engine.submits


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/%00", "/v1/models/%ff%fe", "/v1/models/%ed%a0%80", "/v1/models/..%2f..%2fetc%2fpasswd",
        "/v1/files/%00", "/v1/files/..%2f..%2fetc%2fpasswd", "/v1/files/" + "x" * 5000, "/v1/files/%ff/content",
        "/v1/files?after=%00", "/v1/files?limit=1e9", "/v1/files?limit=" + "9" * 5000, "/v1/files?order=%ff",
        "/v1/batches/%ed%a0%80", "/v1/batches?after=%ff", "/v1/batches?limit=-1", "/v1/responses/%00",
        "/v1/files?limit=1&limit=2", "/%", "/%zz", "/v1/files/%2e%2e/content", "/x/%00", "/docs/%00",
    ],
)  # fmt: skip
def test_paths_and_queries_are_data(harness: Harness, path: str) -> None:
    """Whatever stands in a path or a query, the answer is one of the client's errors, in OpenAI's form."""
    with socket.create_connection(("127.0.0.1", harness.port), timeout=60) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert status in (200, 400, 404), received
    if status != 200 and b"json" in head:
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", [CHAT, "/v1/files", "/abort_request"])
def test_chunked_bodies_over_the_limit(make_harness: Callable[..., Harness], path: str) -> None:
    """A body without a length is cut off where it exceeds the limit, however long it goes on."""
    harness = make_harness(max_body_bytes=4000, max_file_bytes=4000)
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'
        while sent < 1 << 28:
            sent += 1 << 16
            yield b"x" * (1 << 16)

    kind = "multipart/form-data; boundary=b" if path == "/v1/files" else "application/json"
    try:
        reply = harness.post(path, data=endless(), headers={"content-type": kind})
    except requests.ConnectionError:
        pass  # the server has closed the connection on what was still coming
    else:
        codes = {"body_too_large", "file_too_large"} if path == "/v1/files" else {"body_too_large"}
        assert (reply.status_code, error_of(reply)["code"] in codes) == (413, True)
    assert sent < 1 << 28
    assert harness.get("/livez").status_code == 200
    harness.eventually(lambda: harness.state.num_held_bytes == 0)


def test_endless_headers_are_cut_off(make_harness: Callable[..., Harness]) -> None:
    """Nobody fills the memory with headers, with a key or without; large ones within reason are read."""
    harness = make_harness(api_key=["secret"])
    big = {f"x-header-{i}": "y" * 4000 for i in range(12)}
    assert harness.get("/livez", headers=big).status_code == 200
    for piece in (b"x-h: " + b"a" * 60_000 + b"\r\n", b"a" * 60_000):
        sent = 0
        with socket.create_connection(("127.0.0.1", harness.port), timeout=60) as client:
            client.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx-first: ")
            try:
                while sent < 50 << 20:
                    client.sendall(piece)
                    sent += len(piece)
                received = client.recv(1 << 16)
            except ConnectionError:
                received = b""
        assert sent < 50 << 20 or b" 431 " in received
        assert not received or b" 431 " in received
    assert harness.get("/livez").status_code == 200


def test_a_large_body_before_the_next_request_is_no_head(harness: Harness) -> None:
    """Pieces of a body do not count as headers, nor does what follows them on a kept connection."""
    body = json.dumps({**BODY, "metadata": {f"k{i}": "x" * 500 for i in range(16)}, "user": "u" * 500})
    raw = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        + f"content-length: {len(body)}\r\n\r\n{body}"
    ).encode()
    with socket.create_connection(("127.0.0.1", harness.port), timeout=60) as client:
        received = b""
        client.sendall(raw * 20 + b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert received.count(b"HTTP/1.1 200") == 21


def test_slow_headers_are_cut_off(make_harness: Callable[..., Harness]) -> None:
    """A connection that says nothing, or does not finish its headers, ends; one with a reply under way does not."""
    harness = make_harness(header_timeout=0.5)
    with held(harness, 1):
        for begin in (b"", b"GET /livez HTTP/1.1\r\nhost: localhost\r\n"):
            with socket.create_connection(("127.0.0.1", harness.port), timeout=60) as client:
                client.sendall(begin)
                assert client.recv(1) == b""
        assert harness.state.num_live == 1


@pytest.mark.parametrize("path", [CHAT, "/v1/files"])
def test_a_body_that_stops_coming_is_given_up(make_harness: Callable[..., Harness], path: str) -> None:
    """It is a 408, and what had come of it is not held any longer."""
    harness = make_harness(body_timeout=0.2)
    kind = "multipart/form-data; boundary=b" if path == "/v1/files" else "application/json"
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: 999\r\n\r\n"
    with socket.create_connection(("127.0.0.1", harness.port), timeout=60) as client:
        client.sendall(head.encode() + b"--b\r\n")
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"body_timeout"' in received
    assert b"connection: close" in received
    harness.eventually(lambda: harness.state.num_held_bytes == 0)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nx\0: 1\r\n\r\n",
        b"\0" * 99,
    ],
)
def test_what_is_no_http_is_answered_like_any_error(harness: Harness, sent: bytes) -> None:
    """TLS on a plain port, bad methods and headers get a 400 in OpenAI's form, and the connection ends."""
    with socket.create_connection(("127.0.0.1", harness.port), timeout=60) as client:
        client.sendall(sent)
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"x-request-id: req_" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert harness.get("/livez").status_code == 200
