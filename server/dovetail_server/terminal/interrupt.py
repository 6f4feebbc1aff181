"""Ctrl-C while a reply comes: between two writes to the terminal, never within one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Raises `KeyboardInterrupt` on SIGINT while `armed`, but not while something is `whole`.

    Rich counts how deep its writes are nested: an exception in the middle of one would leave that count wrong, and
    everything that is printed afterwards would stay in its buffer.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._is_due = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Take SIGINT over while the block runs."""
        self._is_due = False
        before = signal.signal(signal.SIGINT, self._interrupted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let the block end before an interrupt is raised."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_due:
            self._is_due = False
            raise KeyboardInterrupt

    def _interrupted(self, _: int, __: FrameType | None) -> None:
        if not self._is_held:
            raise KeyboardInterrupt
        self._is_due = True
