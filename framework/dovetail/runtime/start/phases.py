"""Names and times the phases of a start: whatever fails says in which of them it did."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

logger = logging.getLogger(__name__)

Phase = Literal["check", "load", "plan", "allocate", "compile", "probe", "capture"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class StartPhases:
    """The phases of one start.

    Attributes:
        seconds: What each took that has ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = {}

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Time a phase. What it raises gets a note that says so; see `described` and `said`."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            error.add_note(f"in the start's phase {name!r}")
            raise
        self.seconds[name] = time.perf_counter() - began

    def report(self) -> None:
        """Log what each phase took."""
        took = ", ".join(f"{name} {self.seconds[name]:.1f} s" for name in PHASES if name in self.seconds)
        logger.info("Start: %s.", took)
