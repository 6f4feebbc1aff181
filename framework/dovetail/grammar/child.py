"""A process that can be killed: `python -m dovetail.grammar.child FD`. Started by `ChildProcess`, never by hand.

It compiles grammars and judges finished texts, one at a time. Whatever happens to it (time, memory, a crash in native
code) costs the one job at hand.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from dovetail.contracts.grammar import GrammarBackend, GrammarLimits, Vocabulary
from dovetail.errors import DovetailError, RequestError
from dovetail.grammar.vocabulary import unpack
from dovetail.grammar.wire import (
    ChildCheck,
    ChildJob,
    ChildReply,
    ChildStart,
    GoneError,
    receive,
    send,
    spec_of,
)
from dovetail.plugins import LoadedPlugins, load

NICE = 10
"""Compiling yields to the engine: it must not delay anybody's tokens."""
Job = ChildStart | ChildJob | ChildCheck


def main(argv: list[str]) -> int:
    """Serve jobs from the inherited socket until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    channel = socket.socket(fileno=int(argv[0]))
    decoder = msgspec.msgpack.Decoder(Job)
    compiler: Compiler | None = None
    try:
        while True:
            job = decoder.decode(receive(channel))
            if isinstance(job, ChildStart):
                compiler = Compiler(job)
                send(channel, ChildReply())
            elif isinstance(job, ChildCheck):
                send(channel, _limited(job.timeout_s, partial(check, job)))
            elif compiler is not None:
                send(channel, _limited(job.timeout_s, partial(compiler.compile, job)))
    except GoneError:
        return 0


def _limited(timeout_s: float, work: Callable[[], ChildReply]) -> ChildReply:
    """Run a job under an alarm that ends the process even in native code, should its parent be gone by then."""
    signal.alarm(math.ceil(timeout_s) + 2)
    try:
        return work()
    finally:
        signal.alarm(0)


class Compiler:
    """The backends of this process, made at first use."""

    def __init__(self, start: ChildStart) -> None:
        self._max_bytes = start.max_bytes
        self._vocabulary: Vocabulary = unpack(start.vocabulary)
        self._plugins: LoadedPlugins = load(start.plan, "compiler")
        self._backends: dict[str, GrammarBackend] = {}

    def compile(self, job: ChildJob) -> ChildReply:
        """Compile; what a backend raises becomes the reply's error."""
        try:
            backend = self._backend(job.step.backend)
            result = backend.compile(
                spec_of(job.step), GrammarLimits(timeout_s=job.timeout_s, max_bytes=self._max_bytes)
            )
        except RequestError as error:
            return ChildReply(error=error.message, code=error.code or "invalid_grammar")
        except MemoryError:
            return ChildReply(error="the grammar needs too much memory to compile", code="grammar_too_complex")
        except DovetailError as error:
            return ChildReply(error=str(error))
        except Exception as error:  # a backend may raise anything; the job's owner is told
            return ChildReply(error=f"{type(error).__name__}: {error}", code="invalid_grammar")
        return ChildReply(blob=result) if isinstance(result, bytes) else ChildReply()

    def _backend(self, name: str) -> GrammarBackend:
        if name not in self._backends:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            made: GrammarBackend = self._plugins.get("grammar_backend", name)(self._vocabulary)
            self._backends[name] = made
            limit = _address_space() + self._max_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        return self._backends[name]


def check(job: ChildCheck) -> ChildReply:
    """Judge texts by a schema. Here, because a pattern can take Python's matcher for ever."""
    from dovetail.grammar.judge import is_valid  # needs jsonschema, which a compile job does not

    try:
        schema = json.loads(job.schema)
        return ChildReply(verdicts=[is_valid(schema, text) for text in job.texts])
    except Exception as error:  # a schema that jsonschema cannot use judges nothing valid
        return ChildReply(error=f"{type(error).__name__}: {error}")


def _address_space() -> int:
    """Bytes of address space in use; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 36


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
