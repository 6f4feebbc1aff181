"""Streams that outlive their server: `/v1/resume`, and a gateway whose workers are killed, ended and started anew."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import requests
from gateway_process import ADMIN, KEY, OTHER, RESUME, Served

import dovetail
from dovetail_server.relay.replies import StreamBuffer
from dovetail_server.serving.sse import error_event

pytest.importorskip("smg", reason="needs dovetail-llm[gateway]")
PREFIX = b": dovetail "
QUESTION = [{"role": "user", "content": "Count from one to twenty, then say what the capital of France is."}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
LOOSE = {"temperature": 0.9, "max_tokens": 16, "ignore_eos": True, "stream": True}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": QUESTION, **LOOSE, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat choices": ("/v1/chat/completions", {"messages": QUESTION, **LOOSE, "n": 3}),
    "chat logprobs": (
        "/v1/chat/completions",
        {"messages": QUESTION, **LOOSE, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    ),
    "chat tool": (
        "/v1/chat/completions",
        {"messages": QUESTION, "tools": [TOOL], "tool_choice": "required", "max_tokens": 48, "stream": True},
    ),
    "chat schema": (
        "/v1/chat/completions",
        {
            "messages": QUESTION,
            "max_tokens": 40,
            "stream": True,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 4}},
            },
        },
    ),
    "chat draws": (
        "/v1/chat/completions",
        {"messages": QUESTION, **LOOSE, "frequency_penalty": 1.5, "seed": 5, "stop": ["zz"]},
    ),
    "completions": ("/v1/completions", {"prompt": ["One, two,", "The capital"], **LOOSE, "echo": True}),
    "responses": (
        "/v1/responses",
        {"input": "Count to ten.", "stream": True, "max_output_tokens": 16, "temperature": 0.9},
    ),
    "messages": ("/v1/messages", {"messages": QUESTION, "model": "m", "stream": True, "max_tokens": 16}),
    "generate": (
        "/generate",
        {
            "text": "One, two,",
            "stream": True,
            "sampling_params": {"max_new_tokens": 16, "temperature": 0.9, "ignore_eos": True},
        },
    ),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("resume")
    # What another worker goes on with is computed in other company: near ties must not tell.
    flags = ["--data-parallel-size", "2", "--device", "cpu", "--file-storage-path", str(folder / "files")]
    flags += ["--batch-invariant"]
    flags += ["--api-key", f"{KEY},{OTHER}", "--admin-api-key", ADMIN, "--resume-key", RESUME, "--drain-timeout", "30"]
    running = Served(folder, "serve", *flags, "--drain-grace", "1", "--served-model-name", "m,dovetail-demo")
    try:
        yield running.wait()
    finally:
        running.close()


def events(data: bytes) -> tuple[list[bytes], list[tuple[int, bytes]]]:
    """Return a stream's events, and its journal's lines, each with the number of events before it."""
    found: list[bytes] = []
    lines: list[tuple[int, bytes]] = []
    for event in data.split(b"\n\n")[:-1]:
        if event.startswith(PREFIX):
            lines.append((len(found), event.removeprefix(PREFIX)))
        elif not event.startswith(b":"):
            found.append(event)
    return found, lines


JOINED = frozenset({"content", "reasoning", "text", "arguments", "delta", "partial_json", "thinking", "token"})
SAME = frozenset({"id", "created", "created_at", "item_id", "finish_reason", "stop_reason", "name", "type", "model"})


def folded(path: str, found: list[bytes]) -> dict[str, Any]:
    """Return what a client makes of events: texts by their place, and identifiers.

    How many tokens come in one event depends on the moment.
    """
    texts: dict[str, str] = {}
    facts: set[str] = set()

    def walk(value: Any, place: str) -> None:
        if isinstance(value, dict):
            index = f"{place}/{value.get('index', value.get('output_index', ''))}"
            for key, inner in value.items():
                if isinstance(inner, str) and key in JOINED:
                    texts[f"{index}.{key}"] = texts.get(f"{index}.{key}", "") + inner
                elif key in SAME and inner is not None:
                    facts.add(f"{key}={inner}")
                elif key not in ("top_logprobs", "meta_info", "response", "message"):
                    walk(inner, index)
        elif isinstance(value, list):
            for inner in value:
                walk(inner, place)

    data = [event.partition(b"data: ")[2] for event in found]
    objects = [json.loads(line) for line in data if line and line != b"[DONE]"]
    for value in objects[-1:] if path == "/generate" else objects:
        walk(value, "")
    return {"texts": texts, "facts": facts, "end": data[-1] == b"[DONE]"}


def resume(base: str, path: str, body: bytes, name: str, skip: int, lines: list[bytes], **headers: str) -> Any:
    head = json.dumps({"path": path, "journal": name, "skip": skip})[:-1].encode()
    data = head + b',"deltas":[' + b",".join(lines) + b"]}\n" + body
    sent = {"authorization": f"Bearer {KEY}", "x-dovetail-resume-key": RESUME, "content-type": "application/json"}
    return requests.post(f"{base}/v1/resume", data=data, headers={**sent, **headers}, timeout=60)


@pytest.mark.parametrize("is_everywhere", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", STREAMS)
def test_another_server_makes_the_rest_of_a_stream(served: Served, name: str, is_everywhere: bool) -> None:
    """Letter for letter, identifiers and draws included, wherever it breaks off, of every API that streams."""
    path, sent = STREAMS[name]
    first, second = (worker["url"] for worker in served.workers(ADMIN))
    body = json.dumps(sent).encode()
    headers = {"authorization": f"Bearer {KEY}", "x-dovetail-resume-key": RESUME, "content-type": "application/json"}
    reply = requests.post(first + path, data=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    whole, journal = events(reply.content)
    assert len(journal) > 3
    for cut in {0, 1, 2, 3, len(whole) // 2, len(whole) - 1} if is_everywhere else {2, len(whole) - 1}:
        lines = [line for before, line in journal if before <= cut] if cut else []
        again = resume(second, path, body, reply.headers["x-dovetail-journal"], cut, lines)
        assert again.status_code == 200, again.text
        rest, more = events(again.content)
        assert more or cut == len(whole) - 1
        assert folded(path, whole[:cut] + rest) == folded(path, whole), cut


def test_only_gateways_resume(served: Served) -> None:
    """A key of a user does not do, nor a wrong resume key; through the gateway nobody reaches it at all."""
    worker = served.workers(ADMIN)[0]["url"]
    path, sent = STREAMS["chat"]
    body = json.dumps(sent).encode()
    name = "00" * 16 + ".1"
    assert resume(worker, path, body, name, 0, []).status_code == 200
    assert resume(worker, path, body, name, 0, [], authorization="Bearer wrong").status_code == 401
    for key in ("", "wrong", KEY, ADMIN):
        reply = resume(worker, path, body, name, 0, [], **{"x-dovetail-resume-key": key})
        assert reply.json()["error"]["code"] == "invalid_resume_key"
    for base in (served.base,):
        assert resume(base, path, body, name, 0, []).status_code == 403
    asked = served.post(path, sent, headers={"x-dovetail-resume-key": RESUME})
    assert PREFIX not in asked.content
    assert "x-dovetail-journal" not in asked.headers
    assert PREFIX not in served.post(path, sent).content


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"journal": "zz"}, "needs its journal's name"),
        ({"journal": "00.1"}, "needs its journal's name"),
        ({"skip": -1}, "needs its journal's name"),
        ({"path": "/v1/resume"}, "needs its journal's name"),
        ({"more": 1}, "unknown field"),
        ({"deltas": [[7, {"handle": 1, "ids": [5]}]]}, "choice 7, which does not run"),
        ({"deltas": [[0, {"handle": 1, "ids": [999999]}]]}, "outside the vocabulary"),
        ({"deltas": [[0, {"handle": 1, "ids": [-1]}]]}, "outside the vocabulary"),
        ({"deltas": [[0, {"handle": 1, "ids": [5] * 99}]]}, "more tokens than the reply may have"),
        ({"deltas": [[0, {"handle": 1}]]}, "missing required field"),
        ({"path": "/v1/models"}, "takes GET, not POST"),
    ],
)
def test_what_is_no_journal_is_refused(served: Served, change: dict[str, Any], said: str) -> None:
    """With what is wrong; the server goes on."""
    path, sent = STREAMS["chat"]
    head = {"path": path, "journal": "00" * 16 + ".1", "skip": 0, "deltas": [], **change}
    data = json.dumps(head).encode() + b"\n" + json.dumps(sent).encode()
    headers = {"authorization": f"Bearer {KEY}", "x-dovetail-resume-key": RESUME, "content-type": "application/json"}
    reply = requests.post(served.workers(ADMIN)[0]["url"] + "/v1/resume", data=data, headers=headers, timeout=60)
    assert reply.status_code in (400, 405), reply.text
    assert said in reply.json()["error"]["message"]
    assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_tokens_that_a_grammar_refuses_end_that_request_only(served: Served) -> None:
    """A journal that was tampered with harms nobody else."""
    path, sent = STREAMS["chat schema"]
    worker = served.workers(ADMIN)[0]["url"]
    restarts = served.count("dovetail_engine_restarts_total")
    lines = [b'[0,{"handle":1,"ids":[%d,%d],"grammar_option":0}]' % (n, n) for n in range(300, 310)]
    reply = resume(worker, path, json.dumps(sent).encode(), "11" * 16 + ".1", 0, lines)
    assert reply.status_code in (200, 400, 500)
    assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    assert served.count("dovetail_engine_restarts_total") == restarts


def story(number: int) -> dict[str, Any]:
    text = f"Tell me everything about the number {number}, and then about its neighbours."
    # Long enough that none ends between its first token's arrival and a signal, on a busy machine, too.
    draws = {"temperature": 0.9, "seed": number, "max_tokens": 96, "ignore_eos": True, "stream": True}
    return {"messages": [{"role": "user", "content": text}], **draws}


def told(served: Served, number: int, begun: Callable[[], object] = lambda: None, **headers: str) -> str:
    """Return a stream's text, and call `begun` when some of it is there; what is no whole stream says why."""
    with requests.post(
        f"{served.base}/v1/chat/completions",
        json=story(number),
        headers={"authorization": f"Bearer {KEY}", **headers},
        stream=True,
        timeout=120,
    ) as reply:
        data = b""
        for piece in reply.iter_content(None):
            is_first = b'"content":' not in data
            data += piece
            if is_first and b'"content":' in data:
                begun()
    found, _ = events(data)
    if reply.status_code != 200 or not found or found[-1] != b"data: [DONE]" or b"event: error" in data:
        return f"broken: {reply.status_code} {found[-2:]}"
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in found[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    return "".join(c["delta"].get("content") or c["delta"].get("reasoning") or "" for k in chunks for c in k["choices"])


NUM_STREAMS, IN_FLIGHT, AFTER = 10, 5, 4


@pytest.fixture(scope="module")
def unbroken(served: Served) -> list[str]:
    """What the streams say if nothing happens."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        texts = list(pool.map(lambda number: told(served, number), range(NUM_STREAMS)))
    assert not [text for text in texts if text.startswith("broken")]
    return texts


def while_streaming(served: Served, happens: Callable[[], None]) -> list[str]:
    """Return what the streams say while something happens once some have ended and another has begun.

    Those that begin together end together: at the moment of the last one's end no stream may be under way.
    """
    change, ended, running = threading.Condition(), set[int](), set[int]()

    def note(number: int, has_ended: bool) -> None:
        with change:
            (running.discard if has_ended else running.add)(number)
            ended.update({number} if has_ended else ())
            change.notify_all()

    def one(number: int) -> str:
        try:
            return told(served, number, lambda: note(number, has_ended=False))
        finally:
            note(number, has_ended=True)

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        texts = [pool.submit(one, number) for number in range(NUM_STREAMS)]
        with change:
            assert change.wait_for(lambda: len(ended) >= AFTER and running, 240)
        happens()
        return [text.result() for text in texts]


def all_ready(served: Served) -> bool:
    return all(worker["ready"] for worker in served.workers(ADMIN))


def test_no_stream_is_cut_by_the_death_of_a_worker(served: Served, unbroken: list[str]) -> None:
    """None by `kill -9`, and each says what it would have said."""

    for _ in range(8):  # a stream's end may be under way to the client when its worker stops
        pids = served.pids()  # smg may have given everything to one of them
        assert while_streaming(served, partial(served.kill_the_busiest, pids)) == unbroken
        served.until(lambda: all_ready(served) and not set(pids) <= set(served.pids()))  # noqa: B023
        if " to DP" in served.text():
            return
    raise AssertionError(f"no stream had to go on elsewhere: {served.text()[-3000:]}")


@pytest.mark.full
def test_no_stream_is_cut_by_the_end_of_a_worker(served: Served, unbroken: list[str]) -> None:
    """None by SIGTERM: it drains, and is started again."""
    pid = served.pids()[1]
    assert while_streaming(served, lambda: os.kill(pid, signal.SIGTERM)) == unbroken
    served.until(lambda: all_ready(served) and pid not in served.pids())


def test_no_stream_is_cut_by_a_rolling_restart(served: Served, unbroken: list[str]) -> None:
    """None by SIGHUP, after which both workers are new."""
    pids = served.pids()
    assert while_streaming(served, lambda: os.kill(served.process.pid, signal.SIGHUP)) == unbroken
    served.until(lambda: "All 2 workers restarted." in served.text())
    assert not set(pids) & set(served.pids())


def test_two_clients_with_one_identifier_keep_their_own_streams(served: Served, unbroken: list[str]) -> None:
    """Of two tenants and of one, while both workers are killed in turn: nothing is found by an identifier."""
    served.until(lambda: all_ready(served))
    pid = served.pids()[0]
    keys = (KEY, OTHER, KEY, OTHER)
    with ThreadPoolExecutor(len(keys)) as pool:
        texts = [
            pool.submit(told, served, number, **{"x-request-id": "the-same", "authorization": f"Bearer {key}"})
            for number, key in enumerate(keys)
        ]
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        assert [text.result() for text in texts] == unbroken[: len(keys)]
    served.until(lambda: all_ready(served))


@pytest.mark.full
def test_no_stream_hangs_with_a_stopped_worker(served: Served, unbroken: list[str]) -> None:
    """One that is stopped (SIGSTOP) answers nothing and breaks nothing off: it is ended, and its streams go on."""
    served.until(lambda: all_ready(served))
    pid = served.pids()[0]
    assert while_streaming(served, lambda: os.kill(pid, signal.SIGSTOP)) == unbroken
    served.until(lambda: all_ready(served) and pid not in served.pids())
    assert "DP0 is unresponsive" in served.text()


def test_a_client_that_leaves_ends_its_request(served: Served) -> None:
    """On the worker, too: nothing is computed for nobody."""
    served.until(lambda: all_ready(served))
    body = {**story(3), "max_tokens": 1500}
    replies = [served.post("/v1/chat/completions", body, stream=True) for _ in range(3)]
    readers = [reply.iter_content(None) for reply in replies]  # kept: one that nobody keeps closes its connection
    assert all(next(reader) for reader in readers)
    assert sum(worker["num_running"] for worker in served.workers(ADMIN)) == 3
    for reply in replies:
        reply.close()
    served.until(lambda: not sum(worker["num_running"] for worker in served.workers(ADMIN)), 10)
    served.until(lambda: not sum(served.count("dovetail_requests_running").values()), 10)


class Breaking(BaseHTTPRequestHandler):
    """A worker that breaks off every stream behind its first event, and every stream that it is to go on with."""

    protocol_version = "HTTP/1.1"
    num_broken = 0

    def do_GET(self) -> None:
        known = {"/version": {"version": dovetail.__version__}, "/v1/models": {"data": [{"id": "m"}]}}
        self.answer(200, known.get(self.path, {"status": "ok"}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        if not body:
            self.answer(400, {"error": {"message": "no body"}})
            return
        type(self).num_broken += 1
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.send_header("x-dovetail-journal", "00" * 16 + ".1")
        self.end_headers()
        if self.path != "/v1/resume":
            data = PREFIX + b'[0,{"handle":1,"ids":[5]}]\n\ndata: {"n": 1}\n\ndata: {"n'
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.close_connection = True

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def test_a_request_that_ends_every_worker_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the third one without a new token, with an error in the stream: it does not go round for ever."""
    monkeypatch.setattr(Breaking, "num_broken", 0)
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Breaking) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    named = [flag for server in servers for flag in ("--worker", f"http://127.0.0.1:{server.server_port}")]
    running = Served(tmp_path, "gateway", *named, "--resume-key", RESUME, key=None)
    try:
        running.wait()
        reply = running.post("/v1/chat/completions", story(1))
        found, _ = events(reply.content)
        assert found[0] == b'data: {"n": 1}'
        assert b"stream_lost" in found[-2]
        assert found[-1] == b"data: [DONE]"
        assert Breaking.num_broken == 3
    finally:
        assert running.close() == 0
        for server in servers:
            server.shutdown()
            server.server_close()


def stream_of(limit: int = 1 << 30) -> tuple[StreamBuffer, SimpleNamespace]:
    settings = SimpleNamespace(max_queued_bytes=limit)
    state = SimpleNamespace(num_kept_bytes=0, settings=settings)
    stream = StreamBuffer(cast("Any", state), "/v1/completions", b"{}", error_event)
    stream.name = "name"
    return stream, state


def test_events_are_told_from_the_journal_wherever_pieces_end() -> None:
    """One byte at a time or all at once: the same events, the same lines."""
    data = b"".join(
        PREFIX + b"[0,%d]\n\n" % n + b'data: {"n": %d}\n\n' % n + (b": keep-alive\n\n" if n % 3 == 0 else b"")
        for n in range(20)
    )
    for size in (1, 2, 3, 7, 64, len(data)):
        stream, state = stream_of()
        out = b"".join(stream.take(data[at : at + size]) for at in range(0, len(data), size))
        assert out == b"".join(event + b"\n\n" for event in data.split(b"\n\n")[:-1] if not event.startswith(PREFIX))
        assert stream.lines == [b"[0,%d]" % n for n in range(20)]
        assert (stream.num_events, state.num_kept_bytes) == (20, sum(map(len, stream.lines)))
        stream.forget()
        assert state.num_kept_bytes == 0


def test_a_journal_ends_where_memory_does(caplog: pytest.LogCaptureFixture) -> None:
    """The stream goes on without, and gives back what it held; the log says so once."""
    stream, state = stream_of(limit=100)
    piece = PREFIX + b"[0,%b]\n\n" % (b"1" * 40) + b"data: {}\n\n"
    with caplog.at_level("WARNING", "dovetail.server"):
        assert [stream.take(piece) for _ in range(5)] == [b"data: {}\n\n"] * 5
    assert (stream.name, stream.lines, state.num_kept_bytes) == (None, [], 0)
    assert sum("would end with its worker" in record.message for record in caplog.records) == 1
