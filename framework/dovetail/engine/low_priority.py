"""When work that is in no hurry may run: beside nobody, and a little now and then so that it is never starved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

IDLE_DELAY_S = 1.0
"""For so long after the last other request background work holds back: where one was, the next is likely to come."""
INTERVAL_S = 0.5
"""While it holds back it takes part in one step in so many seconds where nobody else is served at the moment …"""
BUSY_INTERVAL_S = 5.0
"""… and in so many where somebody is, …"""
BUSY_ROWS = 4
"""… with so many requests. A step that computes more would be felt by whoever arrives during it."""


class LowPriorityThrottle:
    """Decides step by step how many background requests may take part."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds."""
        self._clock = clock
        self._busy_until = 0.0
        self._last_pulse = -math.inf

    def allowance(self, *, is_busy: bool) -> int | None:
        """Return how many background requests may take part in the next step, None for all of them.

        Args:
            is_busy: Whether anybody else waits or runs.
        """
        now = self._clock()
        if is_busy:
            self._busy_until = now + IDLE_DELAY_S
        elif now >= self._busy_until:
            return None
        if now < self._last_pulse + (BUSY_INTERVAL_S if is_busy else INTERVAL_S):
            return 0
        self._last_pulse = now
        return BUSY_ROWS

    def wait_s(self) -> float:
        """Seconds until the allowance changes by itself, at most."""
        return max(0.0, min(self._busy_until, self._last_pulse + INTERVAL_S) - self._clock())
