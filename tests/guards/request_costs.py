"""What a request costs inside the server: calls, files, and changes of folder, counted over a scripted engine.

A server of the tests answers over real sockets; `sys.setprofile` sees every call of the product's code in each of its
threads. A coroutine that goes on counts as a call. The first request of a kind is not counted, as it imports things.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median_low
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/server"), str(ROOT / "tests/grammar")]

FEW, MANY = "a" * 12, "a" * 44
"""Two replies, a byte being a token: what they differ by is the cost of their tokens."""
SCRIPTED = ("framework/dovetail_testing/", "framework/dovetail_testing/")
"""Where the scripted engine is: no server has it, so its calls count nowhere."""
ENGINES = (*SCRIPTED, "framework/dovetail/engine/", "framework/dovetail/client/")
SUBMIT = "submit"
"""The function of an engine's client that takes a request, in one of these folders."""
REPEATS = 3
"""Each request is counted so often, and the median stands: a timer of the server may come between."""
LINE = "run_to_end"
"""The function that is given a line of a batch and returns its result."""
USER = [{"role": "user", "content": "What is the capital of Kenya?"}]
USUAL: dict[str, Any] = {"model": "tiny", "max_tokens": 64, "stream": True, "temperature": 0}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, streamed": ("/v1/chat/completions", {**USUAL, "messages": USER}),
    "chat, whole": ("/v1/chat/completions", {**USUAL, "messages": USER, "stream": False}),
    "messages, streamed": ("/v1/messages", {**USUAL, "messages": USER}),
    "completions, streamed": ("/v1/completions", {**USUAL, "prompt": "What is the capital of Kenya?"}),
    "generate, streamed": ("/generate", {"text": "What is it?", "stream": True, "sampling_params": {"temperature": 0}}),
    "responses, streamed": (
        "/v1/responses",
        {"model": "tiny", "input": USER, "stream": True, "temperature": 0, "store": False},
    ),
}


LONG, TIMES = 1000, 9
"""Tokens of a reply that is timed, and how many are."""
BATCH_LINE = "line of a batch"
Costs = dict[str, dict[str, float]]
"""What each request costs, by the name of a figure."""


class Event(NamedTuple):
    """A call: the file below the repository's root, and the function."""

    file: str
    name: str


class Trace:
    """Notes calls of the product while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.events: list[Event] = []
        self._files: dict[str, str | None] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """Take an event, as `sys.setprofile` gives it."""
        if event != "call" or not self.is_on:
            return
        name = frame.f_code.co_filename
        if name not in self._files:
            self._files[name] = below_root(name)
        if (file := self._files[name]) is not None:
            self.events.append(Event(file, frame.f_code.co_name))

    @contextmanager
    def of(self) -> Iterator[list[Event]]:
        """Note what happens in the block, in a list of its own."""
        self.events, self.is_on = [], True
        yield self.events
        self.is_on = False


def below_root(name: str) -> str | None:
    """Return a file's path below the root, None where it is no file of the product."""
    for folder in ("framework", "server", "plugins"):
        if name.startswith(f"{ROOT / folder}/"):
            return name.removeprefix(f"{ROOT}/")
    return None


def room(file: str) -> str:
    """Return where a file counts: a folder of the core; a folder of the server or a file beside it; itself a plugin."""
    parts = file.split("/")
    if parts[0] == "framework":
        return parts[2].removesuffix(".py") + (f"/{parts[3]}" if len(parts) > 4 else "")
    return f"server/{parts[2].removesuffix('.py')}" if parts[0] == "server" else f"plugin/{parts[-1]}"


def changes(events: list[Event]) -> int:
    """Count how often the next call is in another room."""
    return max(0, sum(1 for _ in itertools.groupby(room(event.file) for event in events)) - 1)


def is_submit(event: Event) -> bool:
    """Return whether a call hands a request to the engine."""
    return event.name == SUBMIT and event.file.startswith(ENGINES)


def counted(events: list[Event]) -> dict[str, int]:
    """Return what a request costs, to its submission and in all.

    Raises:
        RuntimeError: Nothing was submitted.
    """
    at = next((at for at, event in enumerate(events) if is_submit(event)), None)
    if at is None:
        raise RuntimeError(f"no call of {SUBMIT!r} in {ENGINES}; say in {__file__} what takes a request now")
    there, back = (
        [event for event in part if not event.file.startswith(SCRIPTED)] for part in (events[:at], events[at:])
    )
    return {
        "changes there": changes(there),
        "changes back": changes(back),
        "files": len({event.file for event in (*there, *back)}),
        "calls there": len(there),
        "calls": len(there) + len(back),
    }


@contextmanager
def traced(make: Callable[[Path], Any]) -> Iterator[tuple[Any, Trace]]:
    """Yield a server whose threads are traced; `make` is given a folder of its own."""
    trace, before = Trace(), threading.getprofile()
    threading.setprofile(trace)
    try:
        with tempfile.TemporaryDirectory() as folder:
            server = make(Path(folder))
            try:
                yield server, trace
            finally:
                server.close()
    finally:
        threading.setprofile(before)


def measure(names: Iterable[str] = (*REQUESTS, BATCH_LINE)) -> Costs:
    """Return the costs of each request and of each of its tokens, over the scripted engine."""
    from harness import Harness
    from server_tiny import write_model

    def make(folder: Path) -> Harness:
        return Harness(write_model(folder / "tiny"), **parsers(), min_free_disk_bytes=0)

    with traced(make) as (server, trace):
        return {
            name: line_cost(server, trace) if name == BATCH_LINE else request_cost(server, trace, *REQUESTS[name])
            for name in names
        }


def parsers() -> dict[str, Any]:
    """Return the parsers of a Qwen3 model."""
    from dovetail_parsers.reasoning.think_tags import Qwen3Reasoning
    from dovetail_parsers.tools.hermes import HermesTools

    return {"reasoning": Qwen3Reasoning(), "tools": HermesTools()}


def engine_cost() -> Costs:
    """Return what a streamed chat request costs with the demo model and its engine, in threads of this process."""
    from harness import Harness

    from dovetail.client.inprocess import InProcessClient
    from dovetail.demo import MODEL_DIR
    from dovetail_testing.engine import make_plans

    class Engined(Harness):
        """Runs the engine beside the server."""

        def reset(self) -> None:
            self.text = ""
            self.engine = InProcessClient(*make_plans(MODEL_DIR, grammar_backend="xgrammar"))  # type: ignore[assignment]  # as an engine, not scripted

        def _run(self) -> None:
            self.loop.run_until_complete(self.engine.start())
            self.make_ready()
            super()._run()

    def make(folder: Path) -> Harness:
        return Engined(MODEL_DIR, **parsers(), is_ready=False, file_storage_path=folder)

    path, body = REQUESTS["chat, streamed"]
    with traced(make) as (server, trace):
        server.eventually(lambda: server.get("/readyz").status_code == 200)
        found = median(ask(server, trace, path, {**body, "max_tokens": 12}) for _ in range(REPEATS))
    return {
        "chat, streamed, with the demo's engine": {
            name: found[name] for name in ("changes there", "calls there", "files")
        }
    }


def schema_cost() -> Costs:
    """Return what a streamed chat costs, with the demo model and its engine, that brings a schema nobody has seen."""
    from served import Served

    class Ported(Served):
        """Says its port, as `ask` wants it."""

        @property
        def port(self) -> int:
            return int(self.listener.getsockname()[1])

    path, body = REQUESTS["chat, streamed"]

    def with_schema(name: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
        held = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        return {**body, "model": "dovetail-demo", "max_tokens": 12, "response_format": held}

    with traced(lambda folder: Ported(file_storage_path=str(folder))) as (server, trace):
        ask(server, trace, path, with_schema("first"))
        found = median(ask(server, trace, path, with_schema(f"name{n}")) for n in range(REPEATS))
    return {"chat, streamed, with a schema and the demo's engine": {"files": found["files"]}}


def median(found: Iterable[dict[str, int]]) -> dict[str, float]:
    """Return the median of each figure."""
    rows = list(found)
    return {name: median_low([row[name] for row in rows]) for name in rows[0]}


def ask(server: Any, trace: Trace, path: str, body: dict[str, Any]) -> dict[str, int]:
    """Return what one request cost, sent in one piece over a connection that is there."""
    from wire import post

    data, reply = post(path.encode(), body), b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        settle(trace)
        with trace.of() as events:
            connection.sendall(data)
            while not is_whole(reply):
                reply += connection.recv(1 << 16)
            settle(trace)
    if not reply.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"{path}: {reply.decode()}")
    return counted(events)


def is_whole(reply: bytes) -> bool:
    """Return whether a reply has come to its end, as its length or its last chunk says."""
    head, end, body = reply.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    return bool(end) and (len(body) >= int(length[1]) if length else body.endswith(b"0\r\n\r\n"))


def request_cost(server: Any, trace: Trace, path: str, body: dict[str, Any]) -> dict[str, float]:
    """Return what a request costs, and a token of it."""
    found = []
    for text in (FEW, MANY):
        server.text = text
        ask(server, trace, path, body)  # the first of its kind imports something
        found.append(median(ask(server, trace, path, body) for _ in range(REPEATS)))
    few, many = found
    num = len(MANY) - len(FEW)
    return {
        **few,
        "calls a token": round((many["calls"] - few["calls"]) / num, 1),
        "changes a token": round((many["changes back"] - few["changes back"]) / num, 1),
    }


def settle(trace: Trace) -> None:
    """Wait until nothing was called for a while: the last byte is sent before a request is put away."""
    was_on, trace.is_on, num = trace.is_on, True, -1
    while num != len(trace.events):
        num = len(trace.events)
        time.sleep(0.03)
    trace.is_on = was_on


def line_cost(server: Any, trace: Trace) -> dict[str, float]:
    """Return what a line of a batch costs, from the function that is given it to its result."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": REQUESTS["chat, whole"][1]}
    server.text = FEW
    return median([one_line(server, trace, json.dumps(line)) for _ in range(REPEATS)])


def one_line(server: Any, trace: Trace, line: str) -> dict[str, int]:
    """Run a batch of one line and return what the line cost."""
    files = {"file": ("in.jsonl", f"{line}\n")}
    upload = server.http.post(f"{server.base}/v1/files", files=files, data={"purpose": "batch"}, timeout=60)
    asked = {"input_file_id": upload.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    with trace.of() as events:
        batch = server.post("/v1/batches", asked).json()["id"]
        server.eventually(lambda: any(map(is_submit, events)))
        settle(trace)  # no other request comes between
    server.eventually(lambda: server.get(f"/v1/batches/{batch}").json()["status"] == "completed")
    own = [at for at, event in enumerate(events) if event.name == LINE]
    if not own:
        raise RuntimeError(f"no call of {LINE!r}; say in {__file__} what is given a line of a batch now")
    return counted(events[own[0] : own[-1] + 1])


def token_times() -> Costs:
    """Return processor time a token of a streamed chat, of the thread that serves: median, least and most of some."""
    from harness import Harness
    from server_tiny import write_model

    def seconds(text: str) -> float:
        server.text = text
        began = asyncio.run_coroutine_threadsafe(thread_time(), server.loop).result()
        server.post(path, {**body, "max_tokens": LONG}).raise_for_status()
        return asyncio.run_coroutine_threadsafe(thread_time(), server.loop).result() - began

    path, body = REQUESTS["chat, streamed"]
    with tempfile.TemporaryDirectory() as folder:
        server = Harness(write_model(Path(folder) / "tiny"), **parsers(), context_len=2 * LONG)
        try:
            found = sorted(1e6 * (seconds("a" * LONG) - seconds("a")) / LONG for _ in range(TIMES))
        finally:
            server.close()
    spread = {"us a token, median": found[TIMES // 2], "least": found[0], "most": found[-1]}
    return {"chat, streamed": {name: round(value, 1) for name, value in spread.items()}}


async def thread_time() -> float:
    """Return the processor time of the thread that runs this."""
    return time.thread_time()
