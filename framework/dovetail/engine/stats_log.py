"""The engine's log lines, word for word those that dashboards of SGLang read."""

from __future__ import annotations

import logging
import time

from dovetail.engine.kv_cache_manager import KVCacheManager
from dovetail.engine.request import StepPlan
from dovetail.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)


PAUSE_S = 1.0
"""Time between two steps from which on there was no work: no rate counts it."""


class StatsLog:
    """Logs prefill steps, and every `interval`-th decode step with the throughput since the last such line."""

    def __init__(self, interval: int) -> None:
        self.throughput = 0.0
        self._interval = interval
        self._num_decode_steps = 0
        self._num_tokens = 0
        self._since = self._last_end = time.perf_counter()

    def planned(self, plan: StepPlan, scheduler: Scheduler, pages: KVCacheManager) -> None:
        """Log a step with prefill that is about to run."""
        pause_s = time.perf_counter() - self._last_end
        if pause_s > PAUSE_S:
            self._since += pause_s
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
        self._num_tokens += num_tokens
        self._last_end = time.perf_counter()
        if plan.has_prefill:
            return
        self._num_decode_steps += 1
        if self._num_decode_steps % self._interval == 0:
            self._measure()
            logger.info(
                "Decode batch. #running-req: %d, #token: %d, token usage: %.2f, cuda graph: %s, "
                "gen throughput (token/s): %.2f, #queue-req: %d,",
                plan.num_decode,
                sum(len(r.ids) for r in plan.requests),
                pages.usage,
                plan.has_graphs,
                self.throughput,
                len(scheduler.waiting),
            )

    def _measure(self) -> None:
        now = time.perf_counter()
        self.throughput = self._num_tokens / (now - self._since) if now > self._since else 0.0
        self._num_tokens, self._since = 0, now
