"""The second half of a step's input: masks of grammars, filled while the device computes, and who gets no token yet."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dovetail.engine.grammar_manager import GrammarManager
from dovetail.engine.request import StepPlan
from dovetail.engine.scheduler import Scheduler
from dovetail.grammar.matching.bitmask import FREE, fill_masks
from dovetail.grammar.matching.kept_lines import KeptLines
from dovetail.messages.executor import Executor, StepError
from dovetail.messages.step import StepLate

logger = logging.getLogger(__name__)

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
