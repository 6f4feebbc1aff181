"""Checks the owners of pages while the engine runs: a fault is repaired, counted and logged, not fatal."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dovetail.engine.kv_cache_manager import KVCacheManager
from dovetail.engine.request import EngineRequest
from dovetail.messages import Finish

logger = logging.getLogger(__name__)

INTERVAL = 256
"""Steps between two looks at the counts."""
DEEP_INTERVAL = 16384
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
        self._steps_to_deep = DEEP_INTERVAL

    def check(self, running: Sequence[EngineRequest]) -> list[EngineRequest]:
        """Called after every step; returns requests to end with `SHARED_PAGE`, in nearly every case none."""
        self._steps += 1
        is_due = self._steps % INTERVAL == 0
        is_deep = not running and self._steps >= self._steps_to_deep
        if not (is_due or is_deep) or (not is_deep and self._pages.check_counts(running)):
            return []
        self._steps_to_deep = self._steps + DEEP_INTERVAL
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
