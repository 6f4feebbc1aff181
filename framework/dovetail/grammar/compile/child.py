"""A process for work that may have to be killed: `python -m dovetail.grammar.compile.child FD`, by `WorkerPool`.

It loads what jobs need, and does none itself: for each socket that it is sent it forks a copy, which takes one job from
it, compiling a grammar or judging finished texts. Whatever happens to a copy (time, memory, a crash in native code)
costs that one job; the next copy finds everything loaded.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from dovetail.base.forks import GoneError, control_of, receive, send, serve_forks
from dovetail.base.process_limits import lower
from dovetail.contracts.errors import DovetailError, RequestError
from dovetail.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarLimits, GrammarSpec, Kind, Vocabulary
from dovetail.grammar.compile.memory import address_space, allocated_bytes, resident_bytes
from dovetail.grammar.spec.refusals import TOO_COMPLEX
from dovetail.grammar.spec.relax import relax_schema
from dovetail.grammar.spec.wire import (
    ChildBegun,
    ChildCheck,
    ChildJob,
    ChildReply,
    ChildStart,
    spec_of,
    time_left,
)
from dovetail.messages import GrammarOption
from dovetail.plugins import LoadedPlugins, PluginPlan, load
from dovetail.sdk.masks import draw_ids

Job = TypeVar("Job", ChildJob, ChildCheck)

# Trying a compiled grammar out before anybody is given it: what fails at its first texts is refused in time.

NUM_WALKS, NUM_TOKENS = 2, 8
MAX_MASK_S = 0.005
"""Processor time of a mask: all requests of a step wait for each other's, and those of usual grammars take 0.05 ms."""
MAX_TRIAL_S = 0.5
"""Processor time after which that much is known."""


def try_out(grammar: CompiledGrammar, vocabulary: Vocabulary) -> None:
    """Follow a grammar for a few tokens.

    Raises:
        RequestError: It fails there, or no text begins by it (`$ref`s that lead in a circle, for instance), or even the
            fastest mask takes too long (a hundred thousand characters that are forced).
    """
    fastest, spent = math.inf, 0.0
    mask = np.zeros((1, vocabulary.mask_words), dtype=np.int32)
    rng = random.Random(0)
    for _ in range(NUM_WALKS):
        matcher = grammar.matcher()
        for place in range(NUM_TOKENS):
            began = time.process_time()
            if not matcher.fill(mask, 0):
                return
            took = time.process_time() - began
            spent += took
            if place:  # a grammar's first mask is kept when it is compiled, and copied here
                fastest = min(fastest, took)
            if spent >= MAX_TRIAL_S and fastest >= MAX_MASK_S:
                raise _too_slow()
            if matcher.error is None and not mask.any() and not place:
                raise RequestError("the grammar cannot be enforced: it allows no text", code="unsupported_grammar")
            drawn = [i for i in draw_ids(mask[0], 8, rng) if i not in vocabulary.special_ids]
            taken = [min(drawn, key=lambda i: vocabulary.tokens[i].isspace())] if drawn else []
            if matcher.error is not None or (taken and matcher.accept(taken) != 1):
                why = matcher.error or "it refuses what it allows"
                raise RequestError(f"the grammar cannot be enforced: {why}", code="unsupported_grammar")
            if not taken:
                break
    if MAX_MASK_S <= fastest < math.inf:
        raise _too_slow()


def _too_slow() -> RequestError:
    text = f"the grammar cannot be enforced: each token's mask takes more than {MAX_MASK_S * 1e3:.0f} ms"
    return RequestError(f"{text}; make it simpler", code=TOO_COMPLEX)


NICE = 10
"""Jobs yield to the engine: they must not delay anybody's tokens. Loading does not yield, or it may take minutes."""
NOISE_BYTES = 8 << 20
"""What a process takes for anything: of what it is seen to hold, less is not the grammar's."""
SEARCH_SHARE = 0.6
"""Of a job's time, for finding out what to leave out."""
LIMITED = "the server's own limit of address space (ulimit -v, LimitAS) leaves too little to compile the grammar"
FIRST = {
    Kind.REGEX: GrammarSpec(kind=Kind.REGEX, source="a"),
    Kind.JSON: GrammarSpec(kind=Kind.JSON, source='{"type":"null"}'),
}
"""What a backend compiles first, so that copies of the process have its tables."""


def main(argv: list[str]) -> int:
    """Load, then fork for every socket that comes, until the inherited one closes."""
    control = control_of(argv)
    try:
        start = msgspec.msgpack.decode(receive(control), type=ChildStart)
    except GoneError:
        return 0
    if start.plan is None or start.vocabulary is None:
        from dovetail.grammar.compile.validity import conforms  # imports jsonschema, which compiling does not need

        return serve_forks(control, lambda channel: _serve(channel, ChildCheck, partial(_validate, conforms)))
    compiler = CompileChild(start.plan, start.vocabulary, start.max_bytes)
    return serve_forks(control, lambda channel: _serve(channel, ChildJob, compiler.work, compiler.prepare))


def _serve(
    channel: socket.socket,
    kind: type[Job],
    work: Callable[[Job], ChildReply],
    prepare: Callable[[Job], None] = lambda _: None,
) -> None:
    """A copy's part: one job. A timer of the system ends it at the limit, in native code too."""
    os.nice(NICE)
    job = msgspec.msgpack.decode(receive(channel), type=kind)
    prepare(job)
    send(channel, ChildBegun(pid=os.getpid()))
    job = msgspec.structs.replace(job, timeout_s=time_left(job))
    signal.setitimer(signal.ITIMER_REAL, job.timeout_s)
    send(channel, work(job))


def _validate(conforms: Callable[[Any, str], bool | None], job: ChildCheck) -> ChildReply:
    """Judge finished texts by a schema. Here, because a pattern can take Python's matcher for ever."""
    try:
        schema = json.loads(job.schema)
        return ChildReply(validities=[conforms(schema, text) for text in job.texts])
    except Exception as error:  # a schema that jsonschema cannot use judges nothing valid
        return ChildReply(error=f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class Used:
    """What the process has used: processor time, memory that it holds, and how much of that is allocated."""

    cpu_s: float
    resident: int
    allocated: int

    @classmethod
    def now(cls) -> Used:
        """Look."""
        return cls(time.process_time(), resident_bytes(), allocated_bytes())

    def bytes_since(self, before: Used) -> int:
        """Return what was taken for good or, where that is much more, on the way."""
        held = self.resident - before.resident
        return max(held if held > NOISE_BYTES else 0, self.allocated - before.allocated, 0)


class CompileChild:
    """Compiles grammars. The backends are made before the first job."""

    def __init__(self, plan: PluginPlan, vocabulary: Vocabulary, max_bytes: int) -> None:
        self._max_bytes, self._vocabulary = max_bytes, vocabulary
        self._plugins: LoadedPlugins = load(plan, "compiler")
        self._backends: dict[str, GrammarBackend] = {}
        for planned in plan.of_kind("grammar_backend"):
            with contextlib.suppress(Exception):  # one that cannot be made says why to whoever asks for it
                backend = self._backend(planned.name)
                spec = next(spec for kind, spec in FIRST.items() if kind in backend.kinds)
                backend.compile(spec, GrammarLimits(timeout_s=1.0, max_bytes=max_bytes))

    def prepare(self, job: ChildJob) -> None:
        """Make sure that a job does not pay for its backend."""
        with contextlib.suppress(Exception):  # as above: `work` asks again
            self._backend(job.option.backend)

    def work(self, job: ChildJob) -> ChildReply:
        """Compile within the memory limit; what a backend raises becomes the reply's error."""
        has_memory = True
        try:
            backend = self._backend(job.option.backend)
            has_memory = lower(resource.RLIMIT_AS, address_space() + self._max_bytes)
            # Whole seconds, of all threads together, beyond what loading took.
            lower(resource.RLIMIT_CPU, math.ceil(time.process_time() + 2 * job.timeout_s) + 1)
            limits = GrammarLimits(timeout_s=job.timeout_s, max_bytes=self._max_bytes)
            return self._compile(backend, job.option, limits)
        except RequestError as error:
            return ChildReply(error=error.message, code=error.code or "invalid_grammar")
        except MemoryError:
            if not has_memory:
                return ChildReply(error=LIMITED)
            return ChildReply(error="the grammar needs too much memory to compile", code="grammar_too_complex")
        except DovetailError as error:
            return ChildReply(error=str(error))
        except Exception as error:  # a backend may raise anything; the job's owner is told
            return ChildReply(error=f"{type(error).__name__}: {error}", code="invalid_grammar")

    def _compile(self, backend: GrammarBackend, option: GrammarOption, limits: GrammarLimits) -> ChildReply:
        """Compile, where allowed without what the backend refuses."""
        spec = spec_of(option)
        if not option.relax_schema:
            return self._one(backend, spec, limits)
        until = time.monotonic() + SEARCH_SHARE * limits.timeout_s
        reply, ignored = relax_schema(spec, lambda each: self._one(backend, each, limits), until)
        return msgspec.structs.replace(reply, ignored=ignored)

    def _one(self, backend: GrammarBackend, spec: GrammarSpec, limits: GrammarLimits) -> ChildReply:
        """Compile, load the result as the engine will, measure that, and try the grammar out."""
        before = Used.now()
        result = backend.compile(spec, limits)
        blob = result if isinstance(result, bytes) else None
        if isinstance(result, bytes):
            before = Used.now()
            result = backend.load(result)
        after = Used.now()
        try_out(result, self._vocabulary)
        return ChildReply(blob=blob, load_s=after.cpu_s - before.cpu_s, load_bytes=after.bytes_since(before))

    def _backend(self, name: str) -> GrammarBackend:
        if name not in self._backends:
            made: GrammarBackend = self._plugins.get("grammar_backend", name)(self._vocabulary)
            self._backends[name] = made
        return self._backends[name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
