"""Telling an engine that hangs from one that is slow or idle, by its step counter."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from dovetail.engine.client import EngineClient
from dovetail.errors import EngineError

HANG_S = 30.0
"""A busy engine may stand still for so long, or for `SLOW` times as long as a recent step took."""
SLOW = 10
NUM_RECENT = 8
ASK_S = 1.0


class Heartbeat:
    """Follows the step counter. It is looked at when somebody asks for the server's health, and costs nothing else."""

    def __init__(self) -> None:
        """Begin now."""
        self._step = -1
        self._since = time.monotonic()
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)

    def restart(self) -> None:
        """Count from now: there was no work until now, so no step was due."""
        self._since = time.monotonic()

    @property
    def patience_s(self) -> float:
        """How long the engine may stand still: a model whose steps take long has longer."""
        return max(HANG_S, SLOW * max(self._recent, default=0.0))

    def late_s(self, step: int, *, is_busy: bool) -> float | None:
        """Return for how long a busy engine stands still, or None while that is fine."""
        now = time.monotonic()
        if step != self._step:
            if is_busy and step > self._step >= 0:
                self._recent.append((now - self._since) / (step - self._step))
            self._step, self._since = step, now
        elif not is_busy:
            self._since = now
        still = now - self._since
        return still if still > self.patience_s else None


async def has_no_work(engine: EngineClient) -> bool:
    """Ask the engine itself: its replies may wait for a slow reader although it has finished. Silence means work."""
    try:
        stats = await asyncio.wait_for(engine.control("stats"), ASK_S)
    except (TimeoutError, EngineError):
        return False
    return bool(stats["num_running"] + stats["num_queued"] == 0)
