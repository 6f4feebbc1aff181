"""`GrammarService`: turns a request's grammar into something enforceable, beside the engine's loop.

A request waits for a `CompileFuture` and may prefill meanwhile; its time runs from then on, waits too. Compilations
whose cost is bounded beforehand run in threads of the engine (they release the GIL); all others in processes that are
killed at the time limit (`compiling`). Equal grammars compile once. What waits is bounded, per owner and in all.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from dovetail.contracts.errors import DovetailError, RequestError
from dovetail.contracts.grammar import GrammarLimits, GrammarSpec, Kind, Vocabulary
from dovetail.grammar.compile.cache import Enforced, GrammarCache, RejectedGrammar, key_of
from dovetail.grammar.compile.compiling import Compiler, CompileResult
from dovetail.grammar.compile.jobs import (
    CompileFuture,
    CompileJob,
    CompileSite,
    Options,
    QueueBounds,
    WaitingCompile,
    Workers,
)
from dovetail.grammar.compile.memory import Trimmer
from dovetail.grammar.compile.pool import START_S, ChildDiedError, ChildStartError, ChildTimeoutError
from dovetail.grammar.matching.constraint import TokenSets
from dovetail.grammar.spec.refusals import BUSY, FINAL, TOO_COMPLEX
from dovetail.grammar.spec.relax import is_relaxable
from dovetail.grammar.spec.wire import option_of, spec_of
from dovetail.messages import GrammarOption
from dovetail.plugins import LoadedPlugins

logger = logging.getLogger(__name__)

NUM_THREADS = 2
MAX_SLOW, MAX_SWIFT, SWIFT_S = 2, 1, 0.7
"""Compile processes that may take their time, those for what comes while all of these are busy, and what it may take
there: what takes longer waits for one of the others, so that plain grammars do not wait behind hard ones."""
EARLY_OPTION_S = 2.5
"""What an option may take in a compile process while there are others to try: a faithful one is worth a short wait."""
WARM_PAUSE_S, WARM_S = 0.02, 0.06
"""How long a backend may prepare a grammar that is in force."""
AGAIN = 12
"""Times as long may compiling take after a restart of the engine, when all grammars are compiled anew at once."""
MAX_WARMING = 8
"""Grammars that wait for that: with more, there is no time for any."""
WARM_UP = GrammarSpec(kind=Kind.JSON, source='{"type":"object","properties":{"a":{"type":"string"}}}')


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
        bounds: QueueBounds | None = None,
    ) -> None:
        """Prepare; backends and vocabulary are made at first use.

        Args:
            plugins: Of the engine's process.
            make_vocabulary: Called once, in a thread.
            timeout_s: For one request's grammar, all options and waiting together.
            cache_bytes: Bound of the compiled grammars that are kept.
            max_child_bytes: What a compile process may allocate.
            bounds: Of what waits.
        """
        self._plugins = plugins
        self._timeout_s = timeout_s
        self._bounds = bounds or QueueBounds()
        limits = GrammarLimits(timeout_s=timeout_s, max_bytes=max_child_bytes)
        self._compiler = Compiler(plugins, make_vocabulary, limits, MAX_SLOW + MAX_SWIFT)
        self._cache = GrammarCache(cache_bytes)
        self._pending: dict[bytes, CompileFuture] = {}
        self._waiting = WaitingCompile()
        self._lock = threading.RLock()
        self._finished = threading.Event()
        self._is_warm = threading.Event()
        self._inline = Workers("dovetail-grammar", NUM_THREADS)
        self._outside = Workers("dovetail-grammar-child", MAX_SLOW)
        self._swift = Workers("dovetail-grammar-swift", MAX_SWIFT)
        self._warmup_pool = Workers("dovetail-grammar-warm", 1)
        self._trimmer = Trimmer(self._let_go)
        self._making = threading.Lock()
        self._sets: TokenSets | None = None

    def request(self, options: Options, owner: str = "", *, again: bool = False) -> CompileFuture:
        """Claim a grammar. The future of one that is known is filled at once, and that of one too many, too.

        Args:
            options: The options to enforce it.
            owner: Who asks.
            again: An engine before this one was asked for it. Then it is not refused for all that have come back at
                once, and has longer.
        """
        key = key_of(options)
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                return CompileFuture(known)
            future = self._pending.get(key)
            if future is not None:
                future.num_claims += 1
                return future
            now, patience_s = time.monotonic(), self._timeout_s * (AGAIN if again else 1)
            job = CompileJob(
                options=options,
                key=key,
                future=CompileFuture(),
                owner=owner,
                asked=now,
                deadline=now + patience_s,
                patience_s=patience_s,
                is_early=self._sets is None,
            )
            refused = None if again else self._waiting.refuse(job, self._bounds)
            if refused is not None:
                return CompileFuture(refused)
            self._pending[key] = job.future
            self._waiting.add(job)
        self._inline.put(owner, partial(self._work, job, CompileSite.HERE))
        return job.future

    def known(self, options: Options, at: int) -> CompileFuture | None:
        """Claim a grammar that was asked for with several options, if it is in force as option number `at`."""
        with self._lock:
            found = self._cache.get(key_of(options))
        return CompileFuture(found) if isinstance(found, Enforced) and found.option == at else None

    def release(self, future: CompileFuture) -> None:
        """Give a claim back. A grammar that nobody waits for any more is not compiled, if that has not begun."""
        with self._lock:
            future.num_claims -= 1

    def prepare(self) -> CompileFuture:
        """Claim the vocabulary: a thinking budget needs its token sets, and making them takes a while at first."""
        future = CompileFuture()
        if self._sets is not None:
            future.fill(None)
        else:
            self._inline.put("", partial(self._prepare, future))
        return future

    def wait(self, timeout_s: float) -> None:
        """Sleep until a future is filled, at most `timeout_s`."""
        self._finished.wait(timeout_s)
        self._finished.clear()

    def token_sets(self) -> TokenSets:
        """Masks of the vocabulary that all constraints share.

        Raises:
            DovetailError: The vocabulary cannot be made.
        """
        vocabulary = self._compiler.vocabulary()
        with self._making:
            if self._sets is None:
                self._sets = TokenSets(vocabulary)
            return self._sets

    def warm_up(self) -> threading.Event:
        """Prepare in the background what the first grammar would wait for.

        Returns:
            Set when this process has done its part, which holds up all its threads for a while at a time; what other
            processes do may go on.
        """
        self._inline.put("", self._warm_up)
        return self._is_warm

    def close(self) -> None:
        """End threads and processes; futures that are still open stay so."""
        for part in (self._inline, self._outside, self._swift, self._warmup_pool, self._trimmer, self._compiler):
            part.close()

    def _prepare(self, future: CompileFuture) -> None:
        try:
            self.token_sets()
            future.fill(None)
        except Exception as error:  # ends the one request
            future.fill(_refusal(error))
        self._finished.set()

    def _warm_up(self) -> None:
        try:
            self.token_sets()
            options = [option_of(planned.name, WARM_UP) for planned, _ in self._plugins.candidates("grammar_backend")]
            for option in filter(self._is_inline, options):
                self._compiler.inline(option)
            self._compiler.pool().warm_up()
            for option in (option for option in options if not self._is_inline(option)):
                self._outside.put("", partial(self._load_early, option))
        except DovetailError as error:
            logger.warning("Structured outputs are not available: %s", error)
        except Exception:
            # Nobody waits for this thread's result: the log is the only place to say it.
            logger.exception("preparing structured outputs failed")
        finally:
            self._is_warm.set()

    def _load_early(self, option: GrammarOption) -> None:
        """Have a backend that compiles elsewhere load here what its first grammar would wait for, tokens of others too.

        One that cannot says why to whoever asks for it.
        """
        try:
            if WARM_UP.kind in self._compiler.backend(option.backend).kinds:
                self._compiler.pool().wait_ready(START_S)
                self._compiler.outside(option, time.monotonic() + self._timeout_s)
        except Exception as error:
            logger.debug("grammar backend %s is not prepared: %s", option.backend, error)

    def _work(self, job: CompileJob, place: CompileSite) -> None:
        """Bring a job on, whatever its backends do: a future that is never filled is waited for without end."""
        try:
            self._try_options(job, place)
        except Exception as error:
            self._finish(job, _refusal(error), 0)

    def _try_options(self, job: CompileJob, place: CompileSite) -> None:
        """Try the options that are left, up to the first that needs a process of another place."""
        while job.index < len(job.options):
            now = time.monotonic()
            if self._was_left(job):
                return
            if now >= job.deadline and not self._has_grace(job):
                break
            option = job.options[job.index]
            is_slow = (option.backend, option.source) in job.slow
            if job.index < len(job.options) - 1 and (
                ((job.began is not None or job.is_early) and now >= job.last_option_at)
                or (is_slow and not option.relax_schema)
            ):
                job.index += 1
                continue
            try:
                self.token_sets()  # here, and not when the engine needs them
                with self._lock:
                    alone = self._cache.get(key_of((option,)))  # of a request that went on with it, after a restart
                if isinstance(alone, Enforced):
                    self._finish(job, dataclasses.replace(alone, option=job.index), 0)
                    return
                found = self._compiler.asked(option)
                if found is None:
                    job.index += 1
                    continue
                option, lost, origin = found
                compiled = self._compiler.lighter(option) if is_slow else self._compile(job, option, now, place)
                if compiled is None and is_slow:
                    job.index += 1
                    continue
                if compiled is None:
                    self._pass_on(job, place)
                    return
                ignored = (*lost, *map(origin, compiled.ignored))
                enforced = Enforced(job.index, compiled.grammar, self._compiler.backend(option.backend), ignored)
                self._finish(job, enforced, compiled.num_bytes)
                return
            except Exception as error:  # whatever a backend raises ends one request
                job.refused = job.refused or _refusal(error)
                if isinstance(error, (ChildTimeoutError, ChildStartError)):
                    job.slow.add((option.backend, option.source))
                    if option.relax_schema:
                        continue  # without what costs most
                if isinstance(error, RequestError) and _is_final(job.options[job.index], error):
                    break
            job.index += 1
        self._finish(job, self._why_not(job), 0)

    def _pass_on(self, job: CompileJob, place: CompileSite) -> None:
        """Have a job done in a process; where all are busy, first in the one for what is done soon."""
        if not self._compiler.pool().is_ready and not self._is_inline(job.options[-1]):
            job.deadline = job.asked + START_S + job.patience_s
        if place is CompileSite.HERE and not self._outside.is_free:
            self._swift.put(job.owner, partial(self._work, job, CompileSite.SWIFT))
        else:
            self._outside.put(job.owner, partial(self._work, job, CompileSite.OUTSIDE))

    def _compile(self, job: CompileJob, option: GrammarOption, now: float, place: CompileSite) -> CompileResult | None:
        """Compile one option; None where that has to be done elsewhere."""
        is_last = job.index == len(job.options) - 1
        if place is CompileSite.HERE or (is_last and self._is_inline(option)):
            if not self._is_inline(option):
                return None
            job.began = job.began or now
            try:
                return self._compiler.inline(option)
            except RequestError as error:
                if place is CompileSite.HERE and option.relax_schema and is_relaxable(error.code, error.message):
                    return None  # finding out what to leave out takes many compilations
                raise
        if place is CompileSite.SWIFT:
            with suppress(ChildTimeoutError, ChildStartError):
                return self._compiler.outside(option, min(job.last_option_at, now + SWIFT_S))
            return None  # what is not done soon
        job.began = job.began or now
        self._await_process(job, now)
        now = time.monotonic()
        return self._compiler.outside(
            option, job.deadline if is_last else min(job.last_option_at, now + EARLY_OPTION_S)
        )

    def _await_process(self, job: CompileJob, now: float) -> None:
        """Wait for the first process: a while where another option needs none, else as long as it takes to start.

        What an option may take does not pass meanwhile.
        """
        if not self._compiler.pool().is_ready:
            early = now if job.has_waited else min(job.last_option_at, now + EARLY_OPTION_S)
            job.has_waited = True
            until = early if self._is_inline(job.options[-1]) else job.deadline
            self._compiler.pool().wait_ready(until - time.monotonic())
        job.deadline = min(job.deadline, time.monotonic() + job.patience_s)

    def _was_left(self, job: CompileJob) -> bool:
        """Take a job out that nobody waits for any more: who comes from now on is served by another."""
        with self._lock:
            if job.future.num_claims > 0:
                return False
            del self._pending[job.key]
            self._waiting.add(job, -1)
            job.future.fill(RejectedGrammar("nobody waits for it any more", BUSY))
            return True

    def _is_inline(self, option: GrammarOption) -> bool:
        return self._compiler.backend(option.backend).inline(spec_of(option))

    def _has_grace(self, job: CompileJob) -> bool:
        """Whether the options before took all the time, and the last one takes next to none: then it is still tried."""
        is_ours = job.is_early or (job.began is not None and job.began < (job.asked + job.deadline) / 2)
        return is_ours and len(job.options) > 1 and self._is_inline(job.options[-1])

    def _why_not(self, job: CompileJob) -> RejectedGrammar:
        """Word the refusal: a grammar that spent its time waiting for others is not to blame."""
        waited = (job.began or job.deadline) - job.asked
        timed_out = job.refused is None or job.refused.code == TOO_COMPLEX
        if timed_out and time.monotonic() >= job.deadline and waited > (job.deadline - job.asked) / 2:
            return RejectedGrammar("the server is busy compiling other grammars; try again later", BUSY)
        return job.refused or RejectedGrammar("no way to enforce the grammar was given", None)

    def _finish(self, job: CompileJob, outcome: Enforced | RejectedGrammar, num_bytes: int) -> None:
        with self._lock:
            if isinstance(outcome, Enforced) or outcome.code not in (None, BUSY):
                self._cache.put(job.key, outcome, num_bytes)
            if self._pending.pop(job.key, None) is not None:
                self._waiting.add(job, -1)
            job.future.fill(outcome)
        self._finished.set()
        self._trimmer.soon()
        if isinstance(outcome, Enforced) and len(self._warmup_pool) < MAX_WARMING:
            self._warmup_pool.put(job.owner, partial(self._warm, outcome))

    def _let_go(self) -> bool:
        with self._lock:
            return self._cache.let_go()

    def _warm(self, outcome: Enforced) -> None:
        """Let a backend prepare a grammar that is in force already, once the engine has gone on."""
        time.sleep(WARM_PAUSE_S)
        try:
            outcome.backend.warm_up(outcome.compiled, WARM_S)
        except Exception:
            # The grammar works without; the log is the only place to say it.
            logger.exception("preparing a grammar failed")


def _is_final(option: GrammarOption, error: RequestError) -> bool:
    """Whether no other option to enforce the same grammar would mend it."""
    has_schemas = option.kind in (Kind.JSON, Kind.STRUCTURAL)
    return error.code in FINAL and not (has_schemas and is_relaxable(error.code, error.message))


def _refusal(error: Exception) -> RejectedGrammar:
    """Word an error for the request it ends."""
    if isinstance(error, RequestError):
        return RejectedGrammar(error.message, error.code or "invalid_grammar")
    if isinstance(error, ChildTimeoutError):
        return RejectedGrammar("the grammar took too long to compile; make it simpler", TOO_COMPLEX)
    if isinstance(error, ChildStartError):
        return RejectedGrammar(f"the process that compiles grammars is not there: {error}; try again later", BUSY)
    if isinstance(error, ChildDiedError):
        return RejectedGrammar(
            "the grammar could not be compiled: its compiler ran out of memory or crashed", TOO_COMPLEX
        )
    if isinstance(error, DovetailError):
        return RejectedGrammar(str(error), None)
    logger.error("a grammar backend failed", exc_info=error)
    return RejectedGrammar(f"the grammar backend failed: {type(error).__name__}", "invalid_grammar")
