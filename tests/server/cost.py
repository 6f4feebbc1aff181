"""What a request body costs: processor time, how long the event loop stands still, and memory.

Every field of every body of the OpenAPI document is filled with each of some shapes until the body has a size.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import json
import os
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness import Harness
from wire import JSON_TYPE, Wire, request

from dovetail.text.chat.budget import FULL
from dovetail_server.apis.responses.references import ReferencedItems
from dovetail_server.openapi.examples import BODIES, fill
from dovetail_server.reading.wire import BodyJob, BodyResult
from dovetail_server.reading.work import do
from dovetail_server.serving.served import Served
from dovetail_server.supervision import imports

KIB, MIB = 1 << 10, 1 << 20


def repeated(piece: Any) -> Callable[[int], Any]:
    """Return what makes a list of equal pieces of about so many bytes."""
    length = len(json.dumps(piece)) + 2
    return lambda size: [piece] * max(1, size // length)


def objects_of(value: Any) -> Callable[[int], Any]:
    """Return what makes an object of many names."""
    length = len(json.dumps(value)) + 14
    return lambda size: {f"k{i:07}": value for i in range(max(1, size // length))}


def nested(size: int) -> Any:
    """Lists in lists, as deep as the parser allows, again and again."""
    one: Any = 1
    for _ in range(150):
        one = [one]
    return [one] * max(1, size // 304)


SHAPES: dict[str, Callable[[int], Any]] = {
    "text": lambda size: "some words " * (size // 11),
    "one word": lambda size: "a" * size,
    "escapes": lambda size: '"\\\n' * (size // 6),
    "digits": lambda size: ("1" * 4000 if size > 4000 else "1" * size) + "x",
    "numbers": repeated(123),
    "floats": repeated(1.5),
    "texts": repeated("abc"),
    "empty objects": repeated({}),
    "empty lists": repeated([]),
    "messages": repeated({"role": "user", "content": "hello there"}),
    "messages of no role": repeated({"role": "x", "content": "hello there"}),
    "parts": lambda size: [{"role": "user", "content": repeated({"type": "text", "text": "hello"})(size)}],
    "tools": repeated({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}),
    "items": repeated({"type": "function_call_output", "call_id": "a", "output": "hello there"}),
    "names": objects_of(1),
    "names of objects": objects_of({"a": [1]}),
    "ids with a bias": lambda size: {str(i): 1.0 for i in range(size // 12)},
    "schema": lambda size: {"type": "object", "properties": objects_of({"type": "string"})(size)},
    "nested": nested,
}
TASK_OF = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "create_completion",
    "/generate": "generate_text",
    "/v1/messages": "create_message",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/responses": "responses",
    "/v1/responses/input_tokens": "input_tokens",
    "/v1/responses/compact": "compact",
    "/v1/score": "score",
    "/score": "score",
    "/v1/embeddings": "embeddings",
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), "rerank"),
    **dict.fromkeys(("/v1/classify", "/classify"), "classify"),
    "/tokenize": "tokenize",
    "/v1/tokenize": "tokenize",
    "/detokenize": "detokenize",
    "/v1/detokenize": "detokenize",
    "/separate_reasoning": "separate_reasoning",
    "/parse_function_call": "parse_calls",
    "/v1/messages/batches": "message_batch",
}
"""What is done with a large body of a route."""
SMALL, BIG = 10 * KIB, MIB
FLOOR_S = 0.01
"""Below this, processor time is noise."""
MORE_THAN_LINEAR = 5
TRIES = 3
MOST_STALL_S = float(os.environ.get("DOVETAIL_MOST_STALL_S", "0.05"))
REFUSED = (400, 404, 413, 422, 501)
LARGE = ("text", "escapes", "numbers", "empty objects", "messages", "names")
"""Shapes that are tried at the limit as well."""


@dataclass(frozen=True)
class Case:
    """A field of a route's body, and a shape."""

    path: str
    field: str
    shape: str

    def __str__(self) -> str:
        """Write it in short."""
        return f"{self.path}-{self.field}-{self.shape}"

    def body(self, size: int) -> bytes:
        """Return the request's body, of about `size` bytes."""
        examples = BODIES.get(self.path, {"": {"model": "$model"}})
        example = fill(next(iter(examples.values())), "tiny")
        rest = {name: value for name, value in example.items() if name != self.field}
        field = json.dumps({**rest, self.field: 0}).encode()
        return b"%b%b}" % (field[:-2], written(self.shape, size))


@lru_cache(maxsize=2 * len(LARGE))
def written(shape: str, size: int) -> bytes:
    """Return a value of a shape as JSON; the same for every field."""
    return json.dumps(SHAPES[shape](size)).encode()


def fields_of(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield path and name of every field of every JSON body."""
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content:
            name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
            for field in schemas[name].get("properties", ()):
                yield path, field


def kinds_of_fields(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield of fields with one name and one schema, which one function checks, the first; and one of every body."""
    schemas, seen = document["components"]["schemas"], set[str]()
    for path, field in fields_of(document):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        kind = json.dumps([field, {**schemas[name]["properties"][field], "description": ""}], sort_keys=True)
        if kind not in seen or path not in seen:
            yield path, field
        seen |= {kind, path}


@dataclass(frozen=True)
class Cost:
    """What one request cost."""

    num_bytes: int
    status: int
    cpu_s: float
    """Of the server's process."""
    stall_s: float
    """Processor time of the process between two rounds of the event loop, at most."""
    apart_s: float = 0.0
    """Of the process that read the body."""
    grown_bytes: int = 0
    """By how much that one grew at most, as the system counts it."""

    @property
    def ratio(self) -> float:
        """How many times the body that is."""
        return self.grown_bytes / self.num_bytes


@dataclass(frozen=True)
class Memory:
    """What one body takes, and the size of it with what it became: ids, a reply, items to be stored."""

    peak_bytes: int
    num_bytes: int

    @property
    def ratio(self) -> float:
        """The one by the other."""
        return self.peak_bytes / self.num_bytes


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yield a list that gets the memory that Python objects took in the block, at most."""
    found = [0]
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield found
        found[0] = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


class Meter:
    """Sends bodies to a server in this process, and looks at what they cost."""

    def __init__(self, harness: Harness) -> None:
        """Measure `harness`."""
        self.harness = harness
        self.patient = copy.copy(harness.tools)
        self.patient.limits = dataclasses.replace(harness.tools.limits, context_len=1 << 24)
        self.patient.template = copy.copy(harness.tools.template)
        self.patient.template.limits = FULL
        self._apart: list[BodyResult] = []
        bodies = harness.state.bodies
        bodies._attempt = self._noted(bodies._attempt)  # type: ignore[method-assign, assignment]

    def _noted(self, attempt: Callable[..., Awaitable[BodyResult]]) -> Callable[..., Awaitable[BodyResult]]:
        """Keep what came of each body that another process reads."""

        async def noted(*args: Any) -> BodyResult:
            outcome = await attempt(*args)
            self._apart.append(outcome)
            return outcome

        return noted

    def send(self, path: str, body: bytes) -> Cost:
        """Send one body and measure processor time and stalls."""
        head = JSON_TYPE + b"content-length: %d\r\n" % len(body)
        data = request(b"POST %b HTTP/1.1" % path.encode(), head)
        self._apart.clear()
        stalls: list[float] = []
        probe = asyncio.run_coroutine_threadsafe(self._probe(stalls), self.harness.loop)
        with Wire.to(self.harness) as wire:
            began = time.process_time()
            wire.send(data)
            wire.send(body)
            reply = wire.reply()
            took = time.process_time() - began
        probe.cancel()
        assert reply is not None, (path, body[:200])
        apart_s = sum(outcome.cpu_s for outcome in self._apart)
        grown = max((outcome.grown_bytes for outcome in self._apart), default=0)
        return Cost(len(body), reply.status, took, max(stalls, default=0.0), apart_s, grown)

    def server_memory(self, path: str, body: bytes) -> int:
        """Return what Python objects of the server's own process take for a body, at most."""
        with peak_memory() as peak:
            self.send(path, body)
        return max(0, peak[0] - 2 * len(body))  # the request as this client holds it

    def memory(self, path: str, body: bytes) -> Memory:
        """Do here what a process does with a body, with a context that takes all, and return what it took."""
        job = BodyJob(task=TASK_OF[path], num_bytes=len(body), is_line=False, cpu_s=60, context=f"resp_{'0' * 40}")
        with peak_memory() as peak:
            outcome = do(job, lambda: body, self.patient, Served(["tiny"], []), lambda question: ReferencedItems())
        assert outcome.fault is None, outcome.fault
        ids = [ids for ids, *_ in (*outcome.prompts, *(row for one in outcome.packed for row in one.prompts))]
        became = len(outcome.reply or b"") + len(outcome.items) + sum(map(len, ids))
        return Memory(peak[0], len(body) + became)

    async def _probe(self, stalls: list[float]) -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.process_time()
            stalls.append(now - last)
            last = now


def cases(fields: Iterable[tuple[str, str]], shapes: Sequence[str] | None = None) -> list[Case]:
    """Return every field with every shape; without `shapes`, each field with one of them, in turn."""
    if shapes is not None:
        return [Case(path, field, shape) for path, field in fields for shape in shapes]
    names = list(SHAPES)
    return [Case(path, field, names[at % len(names)]) for at, (path, field) in enumerate(fields)]


@contextmanager
def meter_of(folder: Path) -> Iterator[Meter]:
    """Yield a server that looks at prompts of any size, with the parsers of a Qwen3 model."""
    from dovetail_parsers.reasoning.think_tags import Qwen3Reasoning
    from dovetail_parsers.tools.hermes import HermesTools

    harness = Harness(folder, reasoning=Qwen3Reasoning(), tools=HermesTools(), max_prompt_bytes=1 << 30)
    found = Meter(harness)
    for path in BODIES:  # what is imported and made at the first request
        found.send(path, Case(path, "user", "text").body(10))
    thresholds = gc.get_threshold()
    imports.started()  # as a server does when it has started
    yield found
    gc.set_threshold(*thresholds)
    harness.close()


def check(case: Case, small: Cost, big: Cost) -> str | None:
    """Say what is wrong with what a case costs."""
    times = big.num_bytes / max(small.num_bytes, SMALL // 2)
    if big.cpu_s > MORE_THAN_LINEAR * times * max(small.cpu_s, FLOOR_S):
        return f"{case}: {small.cpu_s:.3f} s for {small.num_bytes} bytes, {big.cpu_s:.3f} s for {big.num_bytes}"
    if big.stall_s > MOST_STALL_S:
        return f"{case}: the event loop stood still for {big.stall_s:.3f} s of processor time"
    if big.status != 200 and big.status not in REFUSED:
        return f"{case}: status {big.status}"
    return None


def measure(meter: Meter, case: Case, size: int) -> Cost:
    return meter.send(case.path, case.body(size))


def wrong_with(meter: Meter, case: Case) -> str | None:
    """Say what a case costs too much, each time that it is measured."""
    found = None
    for _ in range(TRIES):
        found = check(case, measure(meter, case, SMALL), measure(meter, case, BIG))
        if found is None:
            break
    return found
