"""`Compiler`: one option to enforce a grammar at a time, here or in a process that can be killed.

What comes back from such a process is loaded here only if the process, which has loaded it too, says what that costs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from dovetail.contracts.errors import PluginError, RequestError
from dovetail.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarLimits, Vocabulary
from dovetail.grammar.compile.pool import ChildTimeoutError, WorkerPool
from dovetail.grammar.spec.refusals import TOO_COMPLEX
from dovetail.grammar.spec.relax import lightened, without
from dovetail.grammar.spec.route import PlaceMap, asked
from dovetail.grammar.spec.wire import ChildJob, ChildReply, ChildStart, spec_of
from dovetail.messages import GrammarOption
from dovetail.plugins import LoadedPlugins

MAX_LOAD_S = 0.5
MAX_LOAD_BYTES = 256 << 20
"""What bringing a compiled grammar into the engine may cost in processor time and memory."""


@dataclass(frozen=True, slots=True)
class CompileResult:
    """A grammar that is ready.

    Attributes:
        grammar: It.
        backend: What made it.
        num_bytes: Memory that it was seen to take; 0 where nobody looked.
        ignored: What was left out of its source.
    """

    grammar: CompiledGrammar
    backend: GrammarBackend
    num_bytes: int = 0
    ignored: tuple[str, ...] = ()


class Compiler:
    """One per engine. Thread-safe."""

    def __init__(
        self,
        plugins: LoadedPlugins,
        make_vocabulary: Callable[[], Vocabulary],
        limits: GrammarLimits,
        max_children: int,
    ) -> None:
        """Prepare; backends, vocabulary and processes are made at first use."""
        self._plugins = plugins
        self._make_vocabulary = make_vocabulary
        self._limits = limits
        self._max_children = max_children
        self._making = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, GrammarBackend] = {}
        self._pool: WorkerPool | None = None

    @property
    def is_ready(self) -> bool:
        """Whether `outside` begins at once, and does not start the process that others are forked from."""
        return self._pool is not None and self._pool.is_ready

    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary, made at the first call.

        Raises:
            DovetailError: It cannot be made.
        """
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def backend(self, name: str) -> GrammarBackend:
        """The backend of a name, made at the first call.

        Raises:
            DovetailError: It cannot be made.
        """
        vocabulary = self.vocabulary()
        with self._making:
            if name not in self._backends:
                self._backends[name] = self._plugins.get("grammar_backend", name)(vocabulary)
            return self._backends[name]

    def asked(self, option: GrammarOption) -> tuple[GrammarOption, tuple[str, ...], PlaceMap] | None:
        """Ask an option's backend what it enforces, where nobody has; see `negotiation.asked`."""
        return asked(self.backend(option.backend), option) if option.unasked else (option, (), str)

    def inline(self, option: GrammarOption) -> CompileResult:
        """Compile in this thread.

        Raises:
            RequestError: The grammar is refused.
        """
        backend = self.backend(option.backend)
        result = backend.compile(spec_of(option), self._limits)
        made = backend.load(result) if isinstance(result, bytes) else result
        return CompileResult(made, backend)

    def lighter(self, option: GrammarOption) -> CompileResult | None:
        """Compile in this thread what takes too long, without what costs most; None where that is not known.

        Raises:
            RequestError: The grammar is refused without it, too.
        """
        backend = self.backend(option.backend)
        found = lightened(backend, spec_of(option))
        if found is None:
            return None
        spec, gone = found
        made = self.inline(msgspec.structs.replace(option, source=spec.source))
        return CompileResult(made.grammar, backend, ignored=gone)

    def outside(self, option: GrammarOption, deadline: float) -> CompileResult:
        """Compile in a process of its own, and load the result here.

        Raises:
            RequestError: The grammar is refused.
            ChildTimeoutError: The deadline passed.
            ChildDiedError: The process died.
        """
        backend = self.backend(option.backend)
        left = deadline - time.monotonic()
        if left <= 0:
            raise ChildTimeoutError
        reply = self._children().run(ChildJob(option=option, timeout_s=left), left)
        if reply.error is not None:
            raise RequestError(reply.error, code=reply.code) if reply.code else PluginError(reply.error)
        _check_cost(reply)
        if reply.blob is None:
            source = without(option.source, reply.ignored)
            again = self.inline(msgspec.structs.replace(option, source=source))
            return CompileResult(again.grammar, backend, reply.load_bytes, reply.ignored)
        return CompileResult(backend.load(reply.blob), backend, reply.load_bytes, reply.ignored)

    def warm_up(self) -> None:
        """Begin to start the process that others are forked from."""
        self._children().warm_up()

    def wait_ready(self, deadline: float) -> None:
        """Wait until `outside` does not have to wait for that process.

        Raises:
            ChildStartError: It could not be started by the deadline.
        """
        self._children().wait_ready(deadline - time.monotonic())

    def close(self) -> None:
        """End all processes."""
        with self._making:
            if self._pool is not None:
                self._pool.close()

    def _children(self) -> WorkerPool:
        vocabulary = self.vocabulary()
        with self._making:
            if self._pool is None:
                plan, alone = self._plugins.plan, replace(vocabulary, encode=None)
                start = ChildStart(plan=plan, vocabulary=alone, max_bytes=self._limits.max_bytes)
                self._pool = WorkerPool(start, self._max_children)
            return self._pool


def _check_cost(reply: ChildReply) -> None:
    if reply.load_s > MAX_LOAD_S or reply.load_bytes > MAX_LOAD_BYTES:
        text = f"the compiled grammar is too large ({reply.load_bytes >> 20} MiB, {reply.load_s:.1f} s to load)"
        raise RequestError(f"{text}; make it simpler", code=TOO_COMPLEX)
