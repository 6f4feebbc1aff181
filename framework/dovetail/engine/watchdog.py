"""Telling an engine that hangs from one that is slow or idle."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

SLOW = 10
"""An engine may stand still for so many times as long as a recent step took."""
NUM_RECENT = 8
MAX_LOOK_S = 1.0


class EngineWatchdog:
    """Watches one engine. `look` is called every `look_s` seconds.

    Time is counted by looks: where this process itself stood still (a stopped process, a laptop's lid, an event loop
    that was held up), no more than two intervals are counted, whatever the clock says.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin now; the engine may stand still for `limit_s`, and for longer where its steps take long."""
        self.look_s = min(MAX_LOOK_S, limit_s / 8)
        self.limit_s = limit_s
        self._clock = clock
        self._last = clock()
        self._still_s = 0.0
        self._news = self._step = -1
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)

    @property
    def patience_s(self) -> float:
        """How long a busy engine may stand still."""
        return max(self.limit_s, SLOW * max(self._recent, default=0.0))

    def look(self, news: int, step: int = 0, *, is_busy: bool = True) -> float | None:
        """Return for how long a busy engine has stood still, if that is too long.

        Args:
            news: Messages that have come from it.
            step: Its step counter.
            is_busy: Whether it has something to do.
        """
        now = self._clock()
        passed, self._last = min(max(now - self._last, 0.0), 2 * self.look_s), now
        self._still_s += passed
        if news != self._news or not is_busy:
            if is_busy and step > self._step >= 0:
                self._recent.append(self._still_s / (step - self._step))
            self._news, self._step, self._still_s = news, step, 0.0
        return self._still_s if self._still_s > self.patience_s else None
