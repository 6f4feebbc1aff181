"""What the engine does while it stands still: written to the log before its client ends it as hanging."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from types import FrameType

from dovetail.engine.watchdog import EngineWatchdog
from dovetail.plugins import PluginPlan
from dovetail.plugins.loader import describe, nearest_plugin

logger = logging.getLogger("dovetail.engine")
EARLY = 0.75
"""The part of the client's limit after which it is said: the engine does not live to say it later."""


class StandstillWatch:
    """Looks at the thread that makes it, from a thread of its own, while the block lasts.

    Code that holds Python's lock stops that thread, too: what never leaves C is not named.
    """

    def __init__(self, plan: PluginPlan, hang_s: float, step: Callable[[], int], is_busy: Callable[[], bool]) -> None:
        """Prepare.

        Args:
            plan: The plugins that may be to blame.
            hang_s: After so many seconds the client takes a busy engine for hanging.
            step: Returns the engine's step counter.
            is_busy: Whether it has something to do.
        """
        self._plan, self._step, self._is_busy = plan, step, is_busy
        self._heart = EngineWatchdog(EARLY * hang_s)
        self._watched = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dovetail-standstill", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        told = -1
        while not self._ended.wait(self._heart.look_s):
            step = self._step()
            still_s = self._heart.look(step, step, is_busy=self._is_busy())
            frame = sys._current_frames().get(self._watched)
            if still_s is not None and step != told and frame is not None:
                told = step
                logger.error("The engine has not got on for %.0f s. It is in %s.", still_s, place_of(frame, self._plan))


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
