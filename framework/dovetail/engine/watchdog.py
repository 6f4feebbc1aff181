"""Telling an engine that hangs from one that is slow or idle."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_LOOK_S = 1.0
LATE_LOOKS = 3


class EngineWatchdog:
    """Watches one engine. `look` is called every `look_s` seconds.

    Time is counted by looks: where this process itself stood still (a stopped process, a laptop's lid, an event loop
    that was held up), no more than two intervals are counted, whatever the clock says.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin now; within `limit_s` a busy engine must bring news."""
        self.look_s = min(MAX_LOOK_S, limit_s / 16)
        self.limit_s = limit_s
        self._clock = clock
        self._last = clock()
        self._still_s = 0.0
        self._news = -1

    def look(self, news: int, *, is_busy: bool = True) -> float | None:
        """Return for how long a busy engine has stood still, if that is too long.

        Three looks early, so that an engine ends within the limit: what it did last was told up to a look later, seen
        up to another one later, and the next look may be the one that is too late.

        Args:
            news: What changes as the engine gets on.
            is_busy: Whether it has something to do.
        """
        now = self._clock()
        passed, self._last = min(max(now - self._last, 0.0), 2 * self.look_s), now
        self._still_s += passed
        if news != self._news or not is_busy:
            self._news, self._still_s = news, 0.0
        return self._still_s if self._still_s > self.limit_s - LATE_LOOKS * self.look_s else None
