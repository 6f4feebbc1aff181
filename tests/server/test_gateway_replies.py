"""Replies that are no stream and whose worker ends before they are whole: asked for again, or cut off visibly."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, cast

import pytest
import requests
from gateway_process import Served

import dovetail
from dovetail.contracts.errors import EngineError
from dovetail_server.ray.call import ResponseHead
from dovetail_server.ray.proxy import CutError, send_whole
from dovetail_server.relay import replies
from dovetail_server.relay.replies import ResponseBuffer

pytest.importorskip("smg", reason="needs dovetail-llm[gateway]")
MB = 1 << 20


class Failing(BaseHTTPRequestHandler):
    """A worker that breaks off as many replies as `breaks` says, behind `cut` bytes; all workers give the same."""

    protocol_version = "HTTP/1.1"
    breaks, cut, size, is_chunked = 0, 0, 0, False
    asked: list[tuple[str, str | None]] = []
    changed = False

    def do_GET(self) -> None:
        known = {"/version": {"version": dovetail.__version__}, "/v1/models": {"data": [{"id": "m"}]}}
        if self.path.startswith("/v1/files"):
            self.give("application/octet-stream")
        else:
            self.reply(json.dumps(known.get(self.path, {"status": "ok"})).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", "0")))
        self.give("application/json")

    def give(self, media: str) -> None:
        kind, wanted = type(self), self.headers.get("range")
        kind.asked.append((self.path, wanted))
        begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and not kind.changed else 0
        data = body_of(kind.size)[begin:]
        headers = {"content-type": media}
        if media != "application/json":
            headers |= {"etag": '"one"', "accept-ranges": "bytes"}
        if kind.breaks:
            kind.breaks -= 1
            self.reply(data, 206 if begin else 200, headers, cut=kind.cut)
            self.close_connection = True
            return
        self.reply(data, 206 if begin else 200, headers)

    def reply(
        self, data: bytes, status: int = 200, headers: dict[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if type(self).is_chunked and headers:
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for at in range(0, len(data) if cut is None else cut, 1 << 16):
                piece = data[at : at + (1 << 16)]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n" if cut is None else b"")
            return
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data if cut is None else data[:cut])

    def log_message(self, *args: object) -> None:
        pass


class Quiet(ThreadingHTTPServer):
    """Says nothing of gateways that leave."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def body_of(size: int) -> bytes:
    """Bytes of which no part is like another."""
    return b"".join(b"%015d\n" % number for number in range(size // 16))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    servers = [Quiet(("127.0.0.1", 0), Failing) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    named = [flag for server in servers for flag in ("--worker", f"http://127.0.0.1:{server.server_port}")]
    running = Served(tmp_path_factory.mktemp("replies"), "gateway", *named, key=None)
    try:
        running.wait()
        running.until(lambda: all(worker["ready"] for worker in running.workers()))
        yield running
    finally:
        assert running.close() == 0
        for server in servers:
            server.shutdown()
            server.server_close()


@pytest.fixture(autouse=True)
def like_new(served: Served) -> Iterator[None]:
    yield
    Failing.breaks, Failing.is_chunked, Failing.changed, Failing.asked = 0, False, False, []
    served.until(lambda: all(worker["ready"] for worker in served.workers()))


def ask(served: Served, size: int, cut: int, breaks: int = 1, path: str = "/v1/chat/completions") -> Any:
    Failing.size, Failing.cut, Failing.breaks = size, cut, breaks
    if path.startswith("/v1/files") and path.endswith("content"):
        return served.get(path)
    return served.post(path, {"messages": [{"role": "user", "content": "hi"}]})


FULL_31 = pytest.param(31 * MB, 30 * MB, marks=pytest.mark.full)


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(("size", "cut"), [(256, 0), (256, 64), (MB, MB // 2), FULL_31])
def test_a_reply_that_breaks_off_is_asked_for_again(served: Served, size: int, cut: int, is_chunked: bool) -> None:
    """Whatever had come of it: the client gets the whole of another one, once."""
    Failing.is_chunked = is_chunked
    reply = ask(served, size, cut)
    assert reply.status_code == 200
    assert reply.content == body_of(size)
    assert len(Failing.asked) == 2


def test_a_reply_that_breaks_off_of_every_worker_is_an_error(served: Served) -> None:
    """Told as one: nothing has been sent."""
    reply = ask(served, MB, MB // 2, breaks=9)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "request_lost")
    assert len(Failing.asked) == 3


@pytest.mark.first(1)
@pytest.mark.parametrize("is_chunked", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_reply_that_is_too_large_to_be_held_ends_with_its_worker(served: Served, is_chunked: bool) -> None:
    """Its connection breaks off, so that nobody takes a part for the whole; whole ones get through."""
    Failing.is_chunked = is_chunked
    with pytest.raises(requests.RequestException):
        ask(served, 50 * MB, 40 * MB)
    assert len(Failing.asked) == 1
    served.until(lambda: "bytes of a reply and gets no more of it: a reply broke off" in served.text())
    assert "Traceback" not in served.text()
    assert ask(served, 50 * MB, 0, breaks=0).content == body_of(50 * MB)


@pytest.mark.parametrize("size", [MB, pytest.param(50 * MB, marks=pytest.mark.full)])
def test_a_file_goes_on_where_it_broke_off(served: Served, size: int) -> None:
    """Twice, too: another worker is asked for what is left."""
    reply = ask(served, size, size // 4, breaks=2, path="/v1/files/a/content")
    assert reply.status_code == 200
    assert reply.content == body_of(size)
    assert [wanted is None for _, wanted in Failing.asked] == [True, False, False]


def test_a_file_that_is_another_one_is_no_end_of_the_first(served: Served) -> None:
    """Then the connection breaks off."""
    Failing.changed = True
    with pytest.raises(requests.RequestException):
        ask(served, MB, MB // 2, path="/v1/files/a/content")
    served.until(lambda: "has another file there (200)" in served.text())


def test_what_changes_something_is_not_asked_twice(served: Served) -> None:
    """An upload, or a batch: it may have been done."""
    reply = ask(served, 256, 0, path="/v1/batches")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_worker")
    assert len(Failing.asked) == 1


def test_what_is_held_of_all_replies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By --max-queued-bytes and by the size of each; what was sent or forgotten is given back."""
    monkeypatch.setattr(replies, "MAX_REPLY_BYTES", 100)
    state = SimpleNamespace(num_kept_bytes=0, settings=SimpleNamespace(max_queued_bytes=150))
    one, two = ResponseBuffer(cast("Any", state)), ResponseBuffer(cast("Any", state))
    assert [one.add(b"x" * 40) for _ in range(3)] == [True, True, False]
    assert two.add(b"y" * 10)
    assert not two.add(b"y" * 40)
    assert state.num_kept_bytes == 170
    taken = one.pieces()
    assert next(taken) == b"x" * 40
    assert state.num_kept_bytes == 130
    one.forget()
    assert state.num_kept_bytes == 50
    assert b"".join(two.pieces()) == b"y" * 50
    two.forget()
    assert state.num_kept_bytes == 0


class Scripted:
    """A replica's reply under Ray: so many pieces, and its end."""

    def __init__(self, num: int, breaks: bool) -> None:
        self.num, self.breaks = num, breaks

    async def body(self) -> AsyncIterator[bytes]:
        for _ in range(self.num):
            yield b"x" * 40
        if self.breaks:
            raise CutError("it ended")


@pytest.mark.full
def test_replies_under_ray_are_held_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent of one that can be asked for again and breaks off, unless it is too large."""
    monkeypatch.setattr(replies, "MAX_REPLY_BYTES", 100)
    state = SimpleNamespace(num_kept_bytes=0, settings=SimpleNamespace(max_queued_bytes=1000))

    def sent_of(num: int, breaks: bool, is_asked_again: bool = True) -> tuple[int, type[Exception] | None]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        pieces = cast("Any", Scripted(num, breaks))
        found: type[Exception] | None = None
        try:
            asyncio.run(
                send_whole(cast("Any", state), ResponseHead(200, []), pieces, send, is_asked_again=is_asked_again)
            )
        except (CutError, EngineError) as error:
            found = type(error)
        assert state.num_kept_bytes == 0
        assert not sent or sent[-1]["more_body"] == (found is not None)
        return sum(len(message.get("body", b"")) for message in sent), found

    assert sent_of(2, breaks=False) == (80, None)
    assert sent_of(2, breaks=True) == (0, CutError)
    assert sent_of(9, breaks=False) == (360, None)
    assert sent_of(9, breaks=True) == (360, EngineError)
    assert sent_of(2, breaks=True, is_asked_again=False) == (80, EngineError)
