"""`GrammarManager`: structured outputs in the engine. Takes requests in, follows their tokens.

A request with a grammar may prefill while it is compiled; nothing is sampled for one that is `waiting_for_grammar`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dovetail.base.settings import EngineSettings
from dovetail.contracts.grammar import Vocabulary
from dovetail.engine.request import EngineRequest, GrammarRequest, StepPlan
from dovetail.engine.scheduler import Scheduler
from dovetail.grammar.compile.cache import Enforced, RejectedGrammar
from dovetail.grammar.compile.early import EarlyTokenizer
from dovetail.grammar.compile.jobs import CompileFuture
from dovetail.grammar.compile.service import GrammarService
from dovetail.grammar.matching.bitmask import FREE, KeptLines, fill_masks
from dovetail.grammar.matching.constraint import Constraint, WordRules
from dovetail.grammar.matching.reasoning_gate import make_gate
from dovetail.messages import Finish, Submit, Thinking
from dovetail.messages.executor import Executor, StepError
from dovetail.messages.step import StepLate
from dovetail.plugins import LoadedPlugins

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GrammarWaiter:
    """A request that waits for its grammar.

    Attributes:
        request: It.
        future: Its claim.
        first: Which of its options the future's first is.
        why: What made the option before fail while it was in force; empty where none has.
    """

    request: EngineRequest
    future: CompileFuture
    first: int = 0
    why: str = ""


class GrammarManager:
    """One per engine, in its thread."""

    def __init__(
        self,
        settings: EngineSettings,
        plugins: LoadedPlugins,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        tokenizer: EarlyTokenizer | None = None,
    ) -> None:
        """Prepare; nothing is loaded before it is needed.

        Args:
            settings: The engine's.
            plugins: Of the engine's process.
            vocab_size: The logits' width.
            eos_ids: Ids that end a reply.
            tokenizer: The model's, where somebody reads it already.
        """

        def vocabulary() -> Vocabulary:
            return (tokenizer or EarlyTokenizer(settings.tokenizer_folder)).vocabulary(vocab_size, eos_ids)

        self.service = GrammarService(
            plugins,
            vocabulary,
            timeout_s=settings.grammar_compile_timeout,
            cache_bytes=settings.grammar_cache_bytes,
        )
        self._waiting: list[GrammarWaiter] = []

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._waiting)

    def add(self, request: EngineRequest, message: Submit) -> None:
        """Take in a request; from now on it waits for its grammar, if it has one."""
        has_budget = message.thinking is not None and message.thinking.budget is not None
        if not (message.grammar or has_budget or WordRules.are_in(message.params)):
            return
        request.waiting_for_grammar = True
        request.grammar = GrammarRequest(message.grammar, message.thinking)
        self._waiting.append(GrammarWaiter(request, *self._claim(message)))

    def _claim(self, message: Submit) -> tuple[CompileFuture, int]:
        """Claim a grammar; returns the claim, and which of the request's options is its first."""
        service, options, at = self.service, message.grammar, message.grammar_option
        if not options:
            return service.prepare(), 0
        if at is None:
            return service.request(options, message.owner, again=message.again), 0
        known = service.known(options, at)
        if known is not None:
            return known, 0
        return service.request(options[at : at + 1], message.owner, again=message.again), at

    def again(self, request: EngineRequest) -> bool:
        """Claim the next option for a request whose grammar failed while it was in force; False: there is none.

        The request waits for it from now on. What it has said must fit the next option, too.
        """
        constraint, wanted = request.constraint, request.grammar
        if constraint is None or constraint.error is None or wanted is None or request.grammar_option is None:
            return False
        each = [(option.backend, option.source) for option in wanted.options]  # the rest is what may be left out
        at = request.grammar_option
        first = next((i for i in range(at + 1, len(each)) if each[i] != each[at]), None)
        if first is None:
            return False
        logger.warning("A grammar failed (%s); it is enforced in another way from here on.", constraint.error)
        request.waiting_for_grammar = True
        future = self.service.request(wanted.options[first:], request.owner)
        self._waiting.append(GrammarWaiter(request, future, first, constraint.error))
        request.constraint = None
        return True

    def forget(self, request: EngineRequest) -> None:
        """A request was aborted."""
        for item in self._waiting:
            if item.request is request:
                self.service.release(item.future)
        self._waiting = [item for item in self._waiting if item.request is not request]

    def decide(self) -> list[tuple[EngineRequest, Finish]]:
        """Let requests go on whose grammars are ready; return those that cannot be served, with the reason."""
        failed: list[tuple[EngineRequest, Finish]] = []
        still = []
        for item in self._waiting:
            if not item.future.is_ready:
                still.append(item)
            elif (finish := self._enforce(item)) is not None:
                failed.append((item.request, finish))
        self._waiting = still
        return failed

    def _enforce(self, item: GrammarWaiter) -> Finish | None:
        """Put a request's grammar into force; returns why that cannot be."""
        request, outcome = item.request, item.future.outcome
        if isinstance(outcome, RejectedGrammar):
            if item.why:
                return Finish("abort", None, item.why, "grammar_failed")
            return Finish("abort", None, outcome.message, outcome.code)
        thinking = None if request.grammar is None else request.grammar.thinking
        constraint = self._constraint(request, outcome, thinking)
        # What was generated in an engine before this one has to fit, too.
        errors = (error for error in map(constraint.accept, request.ids[request.num_prompt :]) if error is not None)
        error = next(errors, None)
        if error is not None:
            return Finish("abort", None, item.why or error, "grammar_failed")
        request.waiting_for_grammar = False
        request.timing.decided()
        request.constraint = constraint
        if outcome is not None:
            request.grammar_ignored = outcome.ignored
            request.grammar_option = item.first + outcome.option
        return None

    def wait(self, timeout_s: float) -> None:
        """Sleep until a grammar is ready, at most `timeout_s`."""
        self.service.wait(timeout_s)

    def close(self) -> None:
        """End threads and processes."""
        self.service.close()

    def _constraint(self, request: EngineRequest, outcome: Enforced | None, thinking: Thinking | None) -> Constraint:
        sets = self.service.token_sets()
        gate = None if thinking is None else make_gate(thinking, sets.tokens, constrained=outcome is not None)
        rules = WordRules(request.params, sets.size) if WordRules.are_in(request.params) else None
        stops = request.stop_ids
        if outcome is None:
            return Constraint(sets, gate, None, stop_ids=stops, rules=rules)
        return Constraint(sets, gate, outcome.compiled.matcher(), outcome.backend, stops, rules)


# The second half of a step's input: masks of grammars, filled while the device computes, and who gets no token yet.

PATIENCE_S = 0.005
"""How long a step waits for a grammar if nobody else takes part in it: about what computing it again would take."""
WATCH_S = 0.0002
"""How long it waits for one before it looks whether the device is done."""


class LateMasks:
    """Has the tokens of a launched step drawn, once everything is known that they depend on."""

    def __init__(
        self, executor: Executor, scheduler: Scheduler, grammars: GrammarManager | None, decide: Callable[[], None]
    ) -> None:
        """`decide` lets requests go on whose grammars have been compiled meanwhile."""
        self.executor, self.scheduler, self.grammars = executor, scheduler, grammars
        self._decide = decide
        num_kept = executor.info.kept_masks
        self._kept = KeptLines(num_kept) if num_kept else None

    def choose(self, plan: StepPlan) -> None:
        """Have the tokens drawn.

        Raises:
            StepError: The step failed, or a grammar's backend did, which is a plugin.
        """
        self._await_grammars(plan)
        self.executor.choose(self._late(plan))

    def _await_grammars(self, plan: StepPlan) -> None:
        """Wait for grammars that are still being compiled while that costs nothing.

        That is while the device computes the step, or for a moment where nobody else takes part in it.
        """
        late = [chunk.request for chunk in plan.chunks if chunk.samples and chunk.request.waiting_for_grammar]
        if not late or self.grammars is None:
            return
        deadline = time.monotonic() + (PATIENCE_S if len(late) == len(plan.requests) else 0)
        self._decide()
        while any(request.waiting_for_grammar and request.finish is None for request in late) and (
            self.executor.is_computing() or time.monotonic() < deadline
        ):
            self.grammars.wait(WATCH_S)
            self._decide()
        for request in late:
            if not request.waiting_for_grammar and request.row >= 0:
                self.scheduler.grammar_ready(request)

    def _late(self, plan: StepPlan) -> StepLate:
        """Fill the masks; those that still wait for their grammar get no token."""
        sampled = plan.sampled
        wants = [r.params.min_tokens > 0 and r.num_output < r.params.min_tokens for r in sampled]
        try:
            constraints = [r.constraint for r in sampled]
            mask_of, ends_only = fill_masks(constraints, wants, self.executor.masks, plan.drafts, self._kept)
        except Exception as error:
            logger.error("A grammar failed; its step's requests are tried again.", exc_info=error)
            self._discard(plan)
            raise StepError.of(error, is_memory=isinstance(error, MemoryError)) from error
        skip = np.fromiter((request.waiting_for_grammar for request in sampled), np.bool_, len(sampled))
        late = StepLate(step=plan.number, mask_of=mask_of, skip=skip, ends_only=ends_only)
        return late if self._kept is None else replace(late, keep=self._kept.new)

    def forget(self) -> None:
        """A step has failed, and with it perhaps what was to be kept."""
        if self._kept is not None:
            self._kept.forget()

    def _discard(self, plan: StepPlan) -> None:
        """Let a launched step end without its tokens."""
        rows, places = len(plan.sampled), plan.num_places
        free, no, skip = np.full(places, FREE, np.int32), np.zeros(places, np.bool_), np.ones(rows, np.bool_)
        with contextlib.suppress(StepError):
            self.executor.choose(StepLate(step=plan.number, mask_of=free, skip=skip, ends_only=no))
            self.executor.read()
