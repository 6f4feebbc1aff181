"""Watches the engine from its own thread: reports to its client that a long step progresses, and logs a stall."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from dovetail.engine.loop import EARLY, ClosedError
from dovetail.plugins import PluginPlan
from dovetail.plugins.loader import describe, nearest_plugin

logger = logging.getLogger("dovetail.engine")


# Telling an engine that hangs from one that is slow or idle.

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


class StallLogger:
    """Looks at the thread that makes it, from a thread of its own, while the block lasts.

    Code that holds Python's lock stops that thread, too: what never leaves C is not named, and no progress is told.
    """

    def __init__(
        self,
        plan: PluginPlan,
        hang_s: float,
        progress: Callable[[], tuple[int, int]],
        is_busy: Callable[[], bool],
        report: Callable[[], None],
        why: Callable[[], str] = str,
    ) -> None:
        """Prepare.

        Args:
            plan: The plugins that may be to blame.
            hang_s: Seconds without news after which the client considers a busy engine hung.
            progress: Returns the engine's step counter, which is sent with each step, and what grows within a step.
            is_busy: Whether it has something to do.
            report: Reports progress to the client; may be called while the engine sends.
            why: Returns what is known of why a step takes long, as a sentence behind others.
        """
        self._plan, self._progress, self._is_busy, self._report, self._why = plan, progress, is_busy, report, why
        self._watchdog = EngineWatchdog(EARLY * hang_s)
        self._watched = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dovetail-standstill", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        news, before, logged_step = 0, (-1, -1), (-1, -1)
        while not self._ended.wait(self._watchdog.look_s):
            now, is_busy = self._progress(), self._is_busy()
            if now != before:
                if now[0] == before[0] and is_busy:
                    with contextlib.suppress(ClosedError):  # the loop will hear of it, too
                        self._report()
                news, before = news + 1, now
            still_s = self._watchdog.look(news, is_busy=is_busy)
            frame = sys._current_frames().get(self._watched)
            if still_s is not None and now != logged_step and frame is not None:
                logged_step = now
                text = "No engine progress for %.0f s; stalled in %s.%s"
                logger.error(text, still_s, place_of(frame, self._plan), self._why())


def place_of(frame: FrameType, plan: PluginPlan) -> str:
    """Say where a thread is: in which plugin, if one is being called, and in which function."""
    frames: list[FrameType] = []
    at: FrameType | None = frame
    while at is not None:
        frames.append(at)
        at = at.f_back
    found = nearest_plugin(frames, plan)
    where = frame if found is None else found[1]
    name = "" if found is None else f"{describe(found[0])}, "
    return f"{name}{where.f_code.co_qualname} ({where.f_code.co_filename}, line {where.f_lineno})"
