"""The engine's log lines, word for word those that dashboards of SGLang read."""

from __future__ import annotations

import logging
import time
from collections import deque
from time import perf_counter
from typing import Any

from dovetail.engine.kv_cache_manager import KVCacheManager
from dovetail.engine.request import StepPlan
from dovetail.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)


PAUSE_S = 1.0
"""Minimum time between two steps that counts as idle; no rate includes it."""

WINDOW_S = 1.0
"""Minimum time over which `StatsLog.throughput` is measured."""


class TokenRate:
    """Tokens per second since it was last taken, idle time excluded."""

    def __init__(self) -> None:
        self.since = time.perf_counter()
        self.num_tokens = 0

    def take(self) -> float:
        """Return the rate, in tokens per second, and begin anew."""
        now = time.perf_counter()
        rate = self.num_tokens / (now - self.since) if now > self.since else 0.0
        self.num_tokens, self.since = 0, now
        return rate


class StatsLog:
    """Logs prefill steps, and every `interval`-th decode step with the throughput since the last such line.

    Attributes:
        throughput: Generated tokens per second over the last second of work. The line's own figure would be too old for
            a gauge: on a slow device its steps take many seconds.
    """

    def __init__(self, interval: int) -> None:
        self.throughput = 0.0
        self._interval = interval
        self._num_decode_steps = 0
        self._logged, self._recent = TokenRate(), TokenRate()
        self._last_end = time.perf_counter()

    def planned(self, plan: StepPlan, scheduler: Scheduler, pages: KVCacheManager) -> None:
        """Log a step with prefill that is about to run."""
        pause_s = time.perf_counter() - self._last_end
        if pause_s > PAUSE_S:
            self._logged.since += pause_s
            self._recent.since += pause_s
        if plan.has_prefill:
            logger.info(
                "Prefill batch. #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
                "#running-req: %d, #queue-req: %d,",
                plan.num_new_requests,
                plan.num_prefill_tokens,
                plan.num_cached_tokens,
                pages.usage,
                plan.num_decode,
                len(scheduler.waiting),
            )

    def finished(self, plan: StepPlan, num_tokens: int, scheduler: Scheduler, pages: KVCacheManager) -> None:
        """Count the step's tokens, and log a decode step in its turn."""
        self._last_end = time.perf_counter()
        for rate in (self._logged, self._recent):
            rate.num_tokens += num_tokens
        if self._last_end - self._recent.since >= WINDOW_S:
            self.throughput = self._recent.take()
        if plan.has_prefill:
            return
        self._num_decode_steps += 1
        if self._num_decode_steps % self._interval == 0:
            logger.info(
                "Decode batch. #running-req: %d, #token: %d, token usage: %.2f, cuda graph: %s, "
                "gen throughput (token/s): %.2f, #queue-req: %d,",
                plan.num_decode,
                sum(len(r.ids) for r in plan.requests),
                pages.usage,
                plan.has_graphs,
                self._logged.take(),
                len(scheduler.waiting),
            )


# The last steps, one after the other: when each began and ended, and what it computed.

KEPT_STEPS = 512


class Timeline:
    """A step costs a clock read when it is launched, and one more and a tuple when it is read."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, float, float, int, int, int]] = deque(maxlen=KEPT_STEPS)

    def read(self, plan: StepPlan, num_queued: int) -> None:
        """Note a step that was launched and has been read now."""
        row = (plan.number, plan.began, perf_counter(), plan.num_decode, plan.num_prefill_tokens, num_queued)
        self._rows.append(row)

    def since(self, number: int) -> dict[str, Any]:
        """Return the steps after this one, the oldest first: how long ago each ended, and how long it took."""
        now = perf_counter()
        rows = [row for row in self._rows if row[0] > number]
        return {
            "steps": [
                {
                    "step": step,
                    "ago_s": round(now - ended, 6),
                    "seconds": round(ended - began, 6),
                    "num_decode": num_decode,
                    "num_prefill_tokens": num_prefill,
                    "num_queued": num_queued,
                }
                for step, began, ended, num_decode, num_prefill, num_queued in rows
            ]
        }
