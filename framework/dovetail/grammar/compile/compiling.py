"""`Compiler`: one option to enforce a grammar at a time, here or in a process that can be killed.

What comes back from such a process is loaded here only if the process, which has loaded it too, says what that costs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from dovetail.contracts.errors import PluginError, RequestError
from dovetail.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarLimits, Vocabulary
from dovetail.grammar.compile.pool import ChildTimeoutError, WorkerPool
from dovetail.grammar.spec.refusals import TOO_COMPLEX
from dovetail.grammar.spec.relax import lightened, without
from dovetail.grammar.spec.route import PlaceMap, asked
from dovetail.grammar.spec.wire import ChildJob, ChildStart, spec_of
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
        num_bytes: Memory that it was seen to take; 0 where nobody looked.
        ignored: What was left out of its source.
    """

    grammar: CompiledGrammar
    num_bytes: int = 0
    ignored: tuple[str, ...] = ()


@dataclass(eq=False)
class Compiler:
    """One per engine. Thread-safe; backends, vocabulary and processes are made at first use."""

    plugins: LoadedPlugins
    make_vocabulary: Callable[[], Vocabulary]
    limits: GrammarLimits
    max_children: int
    _making: threading.Lock = field(default_factory=threading.Lock)
    _vocabulary: Vocabulary | None = None
    _backends: dict[str, GrammarBackend] = field(default_factory=dict)
    _pool: WorkerPool | None = None

    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary, made at the first call.

        Raises:
            DovetailError: It cannot be made.
        """
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self.make_vocabulary()
            return self._vocabulary

    def backend(self, name: str) -> GrammarBackend:
        """The backend of a name, made at the first call.

        Raises:
            DovetailError: It cannot be made.
        """
        vocabulary = self.vocabulary()
        with self._making:
            if name not in self._backends:
                self._backends[name] = self.plugins.get("grammar_backend", name)(vocabulary)
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
        result = backend.compile(spec_of(option), self.limits)
        return CompileResult(backend.load(result) if isinstance(result, bytes) else result)

    def lighter(self, option: GrammarOption) -> CompileResult | None:
        """Compile in this thread what takes too long, without what costs most; None where that is not known.

        Raises:
            RequestError: The grammar is refused without it, too.
        """
        found = lightened(self.backend(option.backend), spec_of(option))
        if found is None:
            return None
        spec, gone = found
        return replace(self.inline(msgspec.structs.replace(option, source=spec.source)), ignored=gone)

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
        reply = self.pool().run(ChildJob(option=option, timeout_s=left), left)
        if reply.error is not None:
            raise RequestError(reply.error, code=reply.code) if reply.code else PluginError(reply.error)
        if reply.load_s > MAX_LOAD_S or reply.load_bytes > MAX_LOAD_BYTES:
            text = f"the compiled grammar is too large ({reply.load_bytes >> 20} MiB, {reply.load_s:.1f} s to load)"
            raise RequestError(f"{text}; make it simpler", code=TOO_COMPLEX)
        if reply.blob is not None:
            return CompileResult(backend.load(reply.blob), reply.load_bytes, reply.ignored)
        again = self.inline(msgspec.structs.replace(option, source=without(option.source, reply.ignored)))
        return replace(again, num_bytes=reply.load_bytes, ignored=reply.ignored)

    def close(self) -> None:
        """End all processes."""
        with self._making:
            if self._pool is not None:
                self._pool.close()

    def pool(self) -> WorkerPool:
        """The processes that `outside` needs; none is started yet."""
        vocabulary = self.vocabulary()
        with self._making:
            if self._pool is None:
                plan, alone = self.plugins.plan, replace(vocabulary, encode=None)
                start = ChildStart(plan=plan, vocabulary=alone, max_bytes=self.limits.max_bytes)
                self._pool = WorkerPool(start, self.max_children)
            return self._pool
