"""Streams over time: silence, readers that are slow or many, tokens that gather."""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from exchanges import events, fold_chat
from harness import Harness

from dovetail.engine.streams import StreamClient
from dovetail.messages import Abort, Finish, Ready, SamplerParams, StepDeltas, Submit, ToEngine, TokenDelta

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": USER, "stream": True}
COMMENT = ": keep-alive"


class Ticking(StreamClient):
    """An engine on the event loop: a token for every request per tick, as many ticks at once as `burst` says."""

    def __init__(self, harness: Harness, ids: list[int], burst: int) -> None:
        super().__init__()
        self.receive(Ready(harness.engine.info))
        self.ids, self.burst = ids, burst
        self.live: dict[int, int] = {}
        self.aborted: list[int] = []

    async def run(self) -> None:
        """Tick for ever."""
        while True:
            for _ in range(self.burst):
                self.tick()
            await asyncio.sleep(0)

    async def close(self, *, wait: bool = True) -> None:
        self.engine_died("closed by the test")

    def tick(self) -> None:
        deltas = []
        for handle, at in list(self.live.items()):
            self.live[handle] = at + 1
            finish = Finish("length") if at + 1 == len(self.ids) else None
            deltas.append(TokenDelta(handle=handle, ids=[self.ids[at]], prompt_tokens=1, finish=finish))
            if finish is not None:
                del self.live[handle]
        self.receive(StepDeltas(step=self.step + 1, deltas=deltas))

    def send_to_engine(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self.live[message.handle] = 0
        elif isinstance(message, Abort) and self.live.pop(message.handle, None) is not None:
            self.aborted.append(message.handle)


@pytest.fixture
def ticking(harness: Harness) -> Iterator[Callable[[str, int], Ticking]]:
    """Put a `Ticking` in the place of the harness's engine; it ticks until the test ends."""
    running: list[Future[None]] = []

    def start(text: str, burst: int) -> Ticking:
        engine = Ticking(harness, harness.tokenizer.encode(text, add_special_tokens=False), burst)
        harness.state.engine = engine  # type: ignore[assignment]  # what the routes need of it
        running.append(asyncio.run_coroutine_threadsafe(engine.run(), harness.loop))
        return engine

    yield start
    for ticks in running:
        ticks.cancel()


def open_stream(harness: Harness, body: dict[str, Any], path: str = CHAT, receive_bytes: int = 0) -> socket.socket:
    """Send a request and return the connection, unread."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.connect(("127.0.0.1", harness.port))
    client.sendall(head.encode() + data)
    return client


def test_many_streams_at_once_lose_nothing(harness: Harness, ticking: Callable[[str, int], Ticking]) -> None:
    """A hundred streams that are read at once bring all of the text, once and in order, though tokens gather."""
    text = "".join(f"{i} élève, " for i in range(40))
    ticking(text, 3)
    selector = selectors.DefaultSelector()
    received: dict[int, bytes] = {}
    for i in range(100):
        client = open_stream(harness, BODY | {"max_tokens": 400})
        received[client.fileno()] = b""
        selector.register(client, selectors.EVENT_READ, i)
    deadline = time.monotonic() + 60
    while selector.get_map() and time.monotonic() < deadline:
        for key, _ in selector.select(1):
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            received[key.fd] += data
            if received[key.fd].endswith(b"0\r\n\r\n"):
                selector.unregister(key.fileobj).fileobj.close()  # type: ignore[union-attr]
    assert not selector.get_map()
    num_events = 0
    for data in received.values():
        lines = [line for line in data.decode().splitlines() if line.startswith("data: {")]
        num_events += len(lines)
        assert fold_chat([json.loads(line[6:]) for line in lines])[0]["content"] == text
    assert num_events < 100 * 400, "tokens that waited together were not sent together"
    assert harness.state.num_live == 0


def test_choices_of_one_request_gather_too(harness: Harness, ticking: Callable[[str, int], Ticking]) -> None:
    """With several choices, each brings its whole text in order."""
    text = "".join(f"{i}, " for i in range(60))
    ticking(text, 5)
    reply = requests.post(harness.base + CHAT, json=BODY | {"n": 5, "max_tokens": 400}, timeout=60)
    choices = fold_chat(events(reply))
    assert [choices[i]["content"] for i in range(5)] == [text] * 5


@pytest.mark.parametrize(("interval", "most"), [(1, 13), (4, 5)])
def test_stream_interval(make_harness: Callable[..., Harness], interval: int, most: int) -> None:
    """`--stream-interval` sends so many tokens in an event; the first comes alone, and nothing is missing."""
    harness = make_harness(stream_interval=interval)
    chunks = events(harness.post(CHAT, BODY))
    deltas = [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1]]
    assert "".join(deltas) == "Hello, world"
    assert len(deltas[0]) == 1
    assert len(deltas) <= most
    assert (len(deltas) == 12) == (interval == 1)


def test_silence_is_broken(make_harness: Callable[..., Harness]) -> None:
    """While a request waits, its stream gets its headers and comments; then it goes on as usual."""
    harness = make_harness(stream_keep_alive=0.15)
    harness.engine.hold.clear()
    with requests.post(harness.base + CHAT, json=BODY, stream=True, timeout=60) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines(decode_unicode=True)
        assert [next(lines), next(lines), next(lines)] == [COMMENT, "", COMMENT]
        harness.engine.hold.set()
        rest = [line for line in lines if line and not line.startswith(":")]
    chunks = [json.loads(line[6:]) for line in rest[:-1]]
    assert fold_chat(chunks)[0]["content"] == "Hello, world"
    assert rest[-1] == "data: [DONE]"


def test_an_error_after_a_long_wait_is_an_event(make_harness: Callable[..., Harness]) -> None:
    """Once the headers had to go, an error is told in the stream."""
    harness = make_harness(stream_keep_alive=0.1)
    harness.engine.hold.clear()
    with requests.post(harness.base + CHAT, json=BODY | {"rid": "x"}, stream=True, timeout=60) as reply:
        lines = reply.iter_lines(decode_unicode=True)
        assert next(lines) == COMMENT
        assert harness.post("/abort_request", {"rid": "x"}).json() == {"aborted": 1}
        rest = [line for line in lines if line and line != COMMENT]
    assert rest[0] == "event: error"
    assert json.loads(rest[1][6:])["error"]["code"] == "request_aborted"
    assert rest[2:] == ["data: [DONE]"]


@pytest.mark.parametrize("n", [1, 3])
def test_who_leaves_after_the_headers_and_before_a_token_holds_nothing(
    make_harness: Callable[..., Harness], n: int
) -> None:
    """A disconnect in the silence aborts the request as at any other stage."""
    harness = make_harness(stream_keep_alive=0.05)
    harness.engine.hold.clear()
    with open_stream(harness, BODY | {"n": n}) as client:
        client.settimeout(60)
        data = b""
        while data.count(COMMENT.encode()) < 2:
            data += client.recv(1 << 16)
        assert len(harness.engine.live) == n
    harness.eventually(lambda: not harness.engine.live)
    harness.eventually(lambda: harness.state.num_live == 0)
    assert len(harness.engine.aborted) == n


def test_a_busy_stream_gets_no_comments(make_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only silence is broken. The clock goes by the engine's steps: a machine that stalls is not a silent engine."""
    harness = make_harness(stream_keep_alive=0.5)
    harness.engine.delay_s = 0.06
    clock = SimpleNamespace(monotonic=lambda: harness.engine.delay_s * harness.engine.step)
    monkeypatch.setattr("dovetail_server.serving.sse.time", clock)
    assert COMMENT not in harness.post(CHAT, BODY).text


def test_a_stuck_reader_is_cut_off(make_harness: Callable[..., Harness]) -> None:
    """Who takes nothing for too long loses the connection and the engine's request; others are served meanwhile."""
    harness = make_harness(stream_write_timeout=0.6)
    harness.engine.context_len = 6000
    harness.make_ready()
    harness.text = "x" * 5000
    body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 5000}}
    client = open_stream(harness, body, "/generate", receive_bytes=4096)
    harness.eventually(lambda: len(harness.engine.submits) == 1)  # it may have been cut off by now
    harness.text = "Hello, world"
    assert harness.post(CHAT, {**BODY, "stream": False}).status_code == 200
    harness.eventually(lambda: len(harness.engine.aborted) == 1)
    harness.eventually(lambda: harness.state.num_live == 0)
    client.settimeout(60)
    with client, pytest.raises(ConnectionResetError):
        list(iter(lambda: client.recv(1 << 20), b""))


def test_a_slow_reader_that_reads_is_served(make_harness: Callable[..., Harness]) -> None:
    """A pause below the limit costs nothing: all of the text arrives."""
    harness = make_harness(stream_write_timeout=60)
    harness.engine.context_len = 4000
    harness.make_ready()
    harness.text = "x" * 3000
    body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 3001}}
    client = open_stream(harness, body, "/generate", receive_bytes=4096)
    time.sleep(0.5)
    client.settimeout(60)
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data = data[-(1 << 16) :] + client.recv(1 << 20)
    client.close()
    assert b"x" * 3000 in data


def test_thousands_of_waiting_tokens_hold_little_memory(
    harness: Harness, ticking: Callable[[str, int], Ticking], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that is stuck makes its request end once too much waits for it, and the others go on."""
    monkeypatch.setattr("dovetail.engine.streams.MAX_WAITING", 3000)
    engine = ticking("y" * 400, 1)
    blocked = threading.Event()
    stuck = engine.submit(Submit(rid="stuck", prompt_ids=[1], params=SamplerParams(max_tokens=1)))
    engine.ids = [1] * 50_000
    harness.eventually(lambda: engine.aborted == [1])
    blocked.set()
    asyncio.run_coroutine_threadsafe(stuck.aclose(), harness.loop).result(60)
    engine.ids = engine.ids[:400]
    assert harness.post(CHAT, {**BODY, "stream": False, "max_tokens": 400}).status_code == 200


def test_an_engine_that_hangs_does_not_keep_the_server_from_ending(
    make_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the engine does not answer the abort either, it is ended, and its streams with it."""
    monkeypatch.setattr("dovetail_server.start.lifecycle.LAST_WORDS_S", 0.3)
    harness = make_harness(drain_timeout=0.1, stream_keep_alive=0.1)
    harness.state.engine = Ticking(harness, [1], 1)  # type: ignore[assignment]  # it never ticks
    with requests.post(harness.base + CHAT, json=BODY, stream=True, timeout=60) as reply:
        lines = (line for line in reply.iter_lines(decode_unicode=True) if line and line != COMMENT)
        harness.state.is_draining = True
        harness.loop.call_soon_threadsafe(harness.server._begin_drain)
        name, data, last = lines
    assert (name, last) == ("event: error", "data: [DONE]")
    assert json.loads(data[6:])["error"]["code"] == "engine_dead"
    harness.thread.join(60)
    assert not harness.thread.is_alive()
