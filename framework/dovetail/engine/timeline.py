"""The last steps, one after the other: when each began and ended, and what it computed."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

from dovetail.engine.request import StepPlan

KEPT = 512


class Timeline:
    """A step costs a clock read when it is launched, and one more and a tuple when it is read."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, float, float, int, int, int]] = deque(maxlen=KEPT)

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
