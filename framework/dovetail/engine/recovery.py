"""What follows a step that failed: its requests wait again, and the next step is another one.

A step fails where memory runs out, or where a model, an attention backend, a sampler or a grammar raises. Its requests
are as they were before it, so nobody loses anything but time:

- Out of memory: the next steps compute fewer prompt tokens, half as many each time, and then fewer rows. What was asked
  for comes back little by little while all is well.
- A step that verified drafts is computed without them first.
- The engine before this one hung: steps compute an eighth of the prompt tokens, so that what is slow gets through.
- Anything else is somebody's fault: of the step's requests half take part in the next step, until one fails alone.

Only a request that fails alone, and with as little as possible, ends.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from dovetail.engine.kv_cache_manager import KVCacheManager
from dovetail.engine.limits import StepLimits
from dovetail.engine.request import EngineRequest, StepPlan
from dovetail.engine.scheduler import Scheduler
from dovetail.messages import OUT_OF_MEMORY, Finish
from dovetail.messages.executor import StepError

logger = logging.getLogger(__name__)

PATIENCE = 64
"""Good steps before larger ones are tried again; twice as many after each failure, …"""
MAX_PATIENCE = 1 << 14
"""… up to this."""
HANG_CUT = 8
"""Prompt tokens of a step are divided by this after each hang in a row: the third try has a 64th of them."""
NO_MEMORY = "memory ran out for this request alone, in the smallest step; send it again later, or ask for less"


def finish_of(failure: StepError) -> Finish:
    """Return the end of a request that failed alone."""
    if failure.is_memory:
        return Finish("abort", None, NO_MEMORY, OUT_OF_MEMORY)
    return Finish("abort", None, f"computing it failed: {failure.text}")


class Recovery:
    """Bounds the steps of a scheduler after some have failed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._asked = scheduler, scheduler.limits
        self._patience, self._num_good = PATIENCE, 0

    def bound(self, max_prefill_tokens: int) -> None:
        """Take a bound for good: larger steps have been tried, and do not fit."""
        is_whole = self._scheduler.limits is self._asked
        self._asked = _at_most(self._asked, max_prefill_tokens)
        self._scheduler.limits = self._asked if is_whole else _at_most(self._scheduler.limits, max_prefill_tokens)

    def hung(self, num: int) -> None:
        """So many engines in a row hung before this one: begin with smaller chunks of prompts."""
        limits, page_size = self._scheduler.limits, self._scheduler.pages.page_size
        if not limits.cut_prompts:
            return
        tokens = min(limits.max_prefill_tokens, max(page_size, limits.max_prefill_tokens // HANG_CUT**num))
        self._patience = min(PATIENCE << num, MAX_PATIENCE)
        self._scheduler.limits = _at_most(limits, tokens)
        text = (
            "The engine hung %d times in a row: for a while steps have at most %d prompt tokens. If long prompts are "
            "slow here, lower --chunked-prefill-size, if large images are, --max-image-patches, or raise "
            "--engine-hang-timeout."
        )
        logger.warning(text, num, tokens)

    def failed(self, plan: StepPlan, failure: StepError) -> EngineRequest | None:
        """A step has failed and was undone; returns the request that is to be ended for it."""
        self._num_good, self._patience = 0, min(2 * self._patience, MAX_PATIENCE)
        if plan.drafts:
            self._scheduler.limits = dataclasses.replace(self._scheduler.limits, max_places=0)
            return None
        live = [request for request in plan.requests if request.finish is None]
        if failure.is_memory:
            return self._shrink(plan, live, failure.text)
        if len(plan.requests) == 1:
            return live[0] if live else None
        poison_candidates = [request for request in live if request in self._scheduler.poison_candidates]
        self._scheduler.poison_candidates = poison_candidates or live
        return None

    def worked(self, plan: StepPlan) -> None:
        """No step has failed since the last call."""
        scheduler = self._scheduler
        if scheduler.poison_candidates:
            scheduler.poison_candidates = [request for request in scheduler.poison_candidates if request.row < 0]
        if scheduler.limits is self._asked or not plan.requests:
            return
        self._num_good += 1
        if self._num_good >= self._patience:
            self._num_good = 0
            scheduler.limits = dataclasses.replace(
                self._asked,
                max_prefill_tokens=min(self._asked.max_prefill_tokens, 2 * scheduler.limits.max_prefill_tokens),
                max_running_requests=min(self._asked.max_running_requests, 2 * scheduler.limits.max_running_requests),
            )
            if scheduler.limits == self._asked:
                scheduler.limits = self._asked

    def _shrink(self, plan: StepPlan, live: list[EngineRequest], why: str) -> EngineRequest | None:
        """Make the next steps smaller; where they cannot be, that is the request's end."""
        limits, page_size = self._scheduler.limits, self._scheduler.pages.page_size
        if limits.cut_prompts and plan.num_prefill_tokens > page_size:
            tokens = max(page_size, min(limits.max_prefill_tokens, plan.num_prefill_tokens) // 2)
            limits = dataclasses.replace(limits, max_prefill_tokens=tokens)
        elif len(plan.requests) > 1:
            limits = dataclasses.replace(limits, max_running_requests=max(1, len(plan.requests) // 2))
        else:
            return live[0] if live else None
        self._scheduler.limits = limits
        logger.warning(
            "Out of memory in a step of %d decode rows and %d prompt tokens; its requests are computed again, with at "
            "most %d prompt tokens and %d requests a step. Lower --chunked-prefill-size, --max-running-requests or "
            "--mem-fraction-static (%s)",
            len(plan.decode),
            plan.num_prefill_tokens,
            limits.max_prefill_tokens,
            limits.max_running_requests,
            why,
        )
        return None


def _at_most(limits: StepLimits, max_prefill_tokens: int) -> StepLimits:
    return dataclasses.replace(limits, max_prefill_tokens=min(limits.max_prefill_tokens, max_prefill_tokens))


# Checks the owners of pages while the engine runs: a fault is repaired, counted and logged, not fatal.

CHECK_INTERVAL = 256
"""Steps between two looks at the counts."""
DEEP_CHECK_INTERVAL = 16384
"""Steps between two looks at every page, if nothing is wrong; they wait for a moment without running requests."""
SHARED_PAGE = Finish("abort", None, "a fault of the engine mixed up the request's cached state; send it again")


class KVCacheChecker:
    """Checks that free + cached + held is all, every so many steps.

    Attributes:
        num_repairs: How often they had to be repaired.
        num_repaired_pages: Pages that had no owner, or two, or were locked by nobody, in all repairs.
    """

    def __init__(self, pages: KVCacheManager) -> None:
        self.num_repairs = 0
        self.num_repaired_pages = 0
        self._pages = pages
        self._steps = 0
        self._steps_to_deep = DEEP_CHECK_INTERVAL

    def check(self, running: Sequence[EngineRequest]) -> list[EngineRequest]:
        """Called after every step; returns requests to end with `SHARED_PAGE`, in nearly every case none."""
        self._steps += 1
        is_due = self._steps % CHECK_INTERVAL == 0
        is_deep = not running and self._steps >= self._steps_to_deep
        if not (is_due or is_deep) or (not is_deep and self._pages.check_counts(running)):
            return []
        self._steps_to_deep = self._steps + DEEP_CHECK_INTERVAL
        if self._pages.check_counts(running) and self._pages.check_ownership(running):
            return []
        return self._repair(running)

    def _repair(self, running: Sequence[EngineRequest]) -> list[EngineRequest]:
        found = self._pages.repair(running)
        if found:
            self.num_repairs += 1
            self.num_repaired_pages += found.num_lost + found.num_doubled + found.num_stuck
            logger.error(
                "Page accounting was wrong and is repaired: %d pages without an owner, %d with two, %d locked without "
                "a reader; aborted %d requests. Please report this.",
                found.num_lost,
                found.num_doubled,
                found.num_stuck,
                len(found.affected),
            )
        return found.affected
