"""`GrammarService`: turns a request's grammar into something enforceable, beside the engine's loop.

A request waits for a `Ticket` and may prefill meanwhile. Compilations that bound themselves run in threads of the
engine (they release the GIL); all others in processes that are killed at the time limit. Equal grammars compile once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dovetail.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarLimits, GrammarSpec, Kind, Vocabulary
from dovetail.engine.messages import GrammarStep
from dovetail.errors import DovetailError, PluginError, RequestError
from dovetail.grammar.cache import Enforced, GrammarCache, Refused
from dovetail.grammar.constraint import TokenSets
from dovetail.grammar.pool import ChildDiedError, ChildPool, ChildTimeoutError
from dovetail.grammar.vocabulary import pack
from dovetail.grammar.wire import ChildJob, ChildStart, spec_of, step_of
from dovetail.plugins import LoadedPlugins

logger = logging.getLogger(__name__)

NUM_THREADS = 2
MAX_CHILDREN = 2
NICE = 5
EARLY_WAY_S = 1.5
"""What a way may take in a compile process while there are others to try: a faithful one is worth a short wait."""
VISIT_PAUSE_S, VISIT_S = 0.02, 0.06
"""How long a backend may prepare a grammar that is in force."""
WARM_UP = GrammarSpec(kind=Kind.JSON, source='{"type":"object","properties":{"a":{"type":"string"}}}')
FINAL = frozenset(("invalid_grammar", "invalid_json_schema"))
"""Errors that no other way of enforcing the same grammar would mend."""
Steps = tuple[GrammarStep, ...]


class Ticket:
    """A request's claim to a compiled grammar; filled once, from another thread.

    Attributes:
        outcome: What came of it; None for a claim to the vocabulary alone.
        is_ready: Whether it is filled.
    """

    __slots__ = ("is_ready", "outcome")

    def __init__(self, outcome: Enforced | Refused | None = None) -> None:
        self.outcome = outcome
        self.is_ready = outcome is not None

    def fill(self, outcome: Enforced | Refused | None) -> None:
        """Fill it."""
        self.outcome = outcome
        self.is_ready = True


class _TryElsewhereError(Exception):
    """The step has to run in a child process."""


class GrammarService:
    """One per engine; everything but `close` is called from the engine's thread."""

    def __init__(
        self,
        plugins: LoadedPlugins,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        timeout_s: float,
        cache_bytes: int,
        max_child_bytes: int = 2 << 30,
    ) -> None:
        """Prepare; backends and vocabulary are made at first use.

        Args:
            plugins: Of the engine's process.
            make_vocabulary: Called once, in a thread.
            timeout_s: For one request's grammar, all steps together.
            cache_bytes: Bound of the compiled grammars that are kept.
            max_child_bytes: What a compile process may allocate.
        """
        self._plugins = plugins
        self._make_vocabulary = make_vocabulary
        self._limits = GrammarLimits(timeout_s=timeout_s, max_bytes=max_child_bytes)
        self._cache = GrammarCache(cache_bytes)
        self._pending: dict[Steps, Ticket] = {}
        self._lock = threading.RLock()
        self._finished = threading.Event()
        self._inline = ThreadPoolExecutor(NUM_THREADS, "dovetail-grammar", initializer=_be_nice)
        self._outside = ThreadPoolExecutor(MAX_CHILDREN, "dovetail-grammar-child", initializer=_be_nice)
        self._beside = ThreadPoolExecutor(1, "dovetail-grammar-visit", initializer=_be_nice)
        self._making = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._sets: TokenSets | None = None
        self._backends: dict[str, GrammarBackend] = {}
        self._pool: ChildPool | None = None

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that compile."""
        return self._pool.pids if self._pool is not None else []

    @property
    def template_pid(self) -> int | None:
        """Id of the process that those are forked from; None while there is none."""
        return self._pool.template_pid if self._pool is not None else None

    def request(self, steps: Steps) -> Ticket:
        """Claim a grammar. The ticket of one that is known is filled at once."""
        with self._lock:
            known = self._cache.get(steps)
            if known is not None:
                return Ticket(known)
            ticket = self._pending.get(steps)
            if ticket is None:
                ticket = self._pending[steps] = Ticket()
                self._inline.submit(self._work, steps, ticket, 0, None)
        return ticket

    def prepare(self) -> Ticket:
        """Claim the vocabulary: a thinking budget needs its token sets, and making them takes a while at first."""
        ticket = Ticket()
        if self._sets is not None:
            ticket.fill(None)
        else:
            self._inline.submit(self._prepare, ticket)
        return ticket

    def wait(self, timeout_s: float) -> None:
        """Sleep until a ticket is filled, at most `timeout_s`."""
        self._finished.wait(timeout_s)
        self._finished.clear()

    def token_sets(self) -> TokenSets:
        """Masks of the vocabulary that all constraints share.

        Raises:
            DovetailError: The vocabulary cannot be made.
        """
        vocabulary = self.vocabulary()
        with self._making:
            if self._sets is None:
                self._sets = TokenSets(vocabulary)
            return self._sets

    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary, made at the first call.

        Raises:
            DovetailError: It cannot be made.
        """
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def warm_up(self) -> None:
        """Prepare in the background what the first grammar would wait for."""
        self._inline.submit(self._warm_up)

    def close(self) -> None:
        """End threads and processes; tickets that are still open stay so."""
        self._inline.shutdown(wait=False, cancel_futures=True)
        self._outside.shutdown(wait=False, cancel_futures=True)
        self._beside.shutdown(wait=False, cancel_futures=True)
        with self._making:
            if self._pool is not None:
                self._pool.close()

    def _prepare(self, ticket: Ticket) -> None:
        try:
            self.token_sets()
            ticket.fill(None)
        except Exception as error:  # ends the one request
            ticket.fill(_refusal(error))
        self._finished.set()

    def _warm_up(self) -> None:
        try:
            self.token_sets()
            for planned, _ in self._plugins.candidates("grammar_backend"):
                backend = self._backend(planned.name)
                if backend.inline(WARM_UP):
                    self._compile_inline(step_of(planned.name, WARM_UP))
            self._children().warm_up()
        except DovetailError as error:
            logger.warning("Structured outputs are not available: %s", error)
        except Exception:
            # Nobody waits for this thread's result: the log is the only place to say it.
            logger.exception("preparing structured outputs failed")

    def _work(self, steps: Steps, ticket: Ticket, first: int, deadline: float | None) -> None:
        """Try the steps from `first` on. Runs in a thread; goes on in another where a child process is needed."""
        deadline = deadline or time.monotonic() + self._limits.timeout_s
        inline = threading.current_thread().name.startswith("dovetail-grammar_")
        refused: Refused | None = None
        outcome: Enforced | Refused | None = None
        for index in range(first, len(steps)):
            try:
                self.token_sets()  # here, and not when the engine needs them
                last = index == len(steps) - 1
                until = deadline if last else min(deadline, time.monotonic() + EARLY_WAY_S)
                outcome = Enforced(index, *self._compile(steps[index], until, may_wait=not inline))
                break
            except _TryElsewhereError:
                self._outside.submit(self._work, steps, ticket, index, deadline)
                return
            except Exception as error:  # whatever a backend raises ends one request
                refused = refused or _refusal(error)
                if isinstance(error, RequestError) and error.code in FINAL:
                    break
        self._finish(steps, ticket, outcome or refused or Refused("no way to enforce the grammar was given", None))

    def _finish(self, steps: Steps, ticket: Ticket, outcome: Enforced | Refused) -> None:
        with self._lock:
            if isinstance(outcome, Enforced) or outcome.code is not None:
                self._cache.put(steps, outcome, sum(len(step.source) for step in steps))
            self._pending.pop(steps, None)
            ticket.fill(outcome)
        self._finished.set()
        if isinstance(outcome, Enforced):
            with contextlib.suppress(RuntimeError):  # the executor was shut down
                self._beside.submit(self._visit, outcome)

    def _visit(self, outcome: Enforced) -> None:
        """Let a backend prepare a grammar that is in force already, once the engine has gone on."""
        time.sleep(VISIT_PAUSE_S)
        try:
            outcome.backend.warm_up(outcome.compiled, VISIT_S)
        except Exception:
            # The grammar works without; the log is the only place to say it.
            logger.exception("preparing a grammar failed")

    def _compile(self, step: GrammarStep, deadline: float, *, may_wait: bool) -> tuple[CompiledGrammar, GrammarBackend]:
        backend = self._backend(step.backend)
        if backend.inline(spec_of(step)):
            return self._compile_inline(step), backend
        if not may_wait:
            raise _TryElsewhereError
        left = deadline - time.monotonic()
        if left <= 0:
            raise ChildTimeoutError
        reply = self._children().run(ChildJob(step=step, timeout_s=left), left)
        if reply.error is not None:
            raise RequestError(reply.error, code=reply.code) if reply.code else PluginError(reply.error)
        compiled = self._compile_inline(step) if reply.blob is None else backend.load(reply.blob)
        self._check_start(compiled)
        return compiled, backend

    def _check_start(self, compiled: CompiledGrammar) -> None:
        """Refuse a grammar by which no text begins: `$ref`s that lead in a circle, for instance."""
        mask = np.zeros((1, self.vocabulary().mask_words), dtype=np.int32)
        if compiled.matcher().fill(mask, 0) and not mask.any():
            raise RequestError("the grammar cannot be enforced: it allows no text", code="unsupported_grammar")

    def _compile_inline(self, step: GrammarStep) -> CompiledGrammar:
        backend = self._backend(step.backend)
        result = backend.compile(spec_of(step), self._limits)
        return backend.load(result) if isinstance(result, bytes) else result

    def _backend(self, name: str) -> GrammarBackend:
        vocabulary = self.vocabulary()
        with self._making:
            if name not in self._backends:
                self._backends[name] = self._plugins.get("grammar_backend", name)(vocabulary)
            return self._backends[name]

    def _children(self) -> ChildPool:
        vocabulary = self.vocabulary()
        with self._making:
            if self._pool is None:
                start = ChildStart(
                    plan=self._plugins.plan, vocabulary=pack(vocabulary), max_bytes=self._limits.max_bytes
                )
                self._pool = ChildPool(start, MAX_CHILDREN)
            return self._pool


def _refusal(error: Exception) -> Refused:
    """Word an error for the request it ends."""
    if isinstance(error, RequestError):
        return Refused(error.message, error.code or "invalid_grammar")
    if isinstance(error, ChildTimeoutError):
        return Refused("the grammar took too long to compile; make it simpler", "grammar_too_complex")
    if isinstance(error, ChildDiedError):
        return Refused(
            "the grammar could not be compiled: its compiler ran out of memory or crashed", "grammar_too_complex"
        )
    if isinstance(error, DovetailError):
        return Refused(str(error), None)
    logger.error("a grammar backend failed", exc_info=error)
    return Refused(f"the grammar backend failed: {type(error).__name__}", "invalid_grammar")


def _be_nice() -> None:
    """Compile threads yield to the engine's; on Linux a thread has a niceness of its own."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    except OSError:
        logger.debug("cannot lower the priority of a compile thread")
