"""Standing still for a while after a fault, each time longer."""

from __future__ import annotations

import time

from dovetail.contracts.errors import DovetailError

FIRST_S, LONGEST_S = 0.2, 5.0


class UnreadableFileError(DovetailError):
    """Something on the disk cannot be read, and waiting does not help."""


class Backoff:
    """Whether to wait, why, and for how long. The reason stays until something has gone well."""

    def __init__(self) -> None:
        """Begin without one."""
        self.reason: str | None = None
        self._until = 0.0
        self._next_s = FIRST_S

    @property
    def is_on(self) -> bool:
        """Whether it is still too early to try again."""
        return time.monotonic() < self._until

    def begin(self, reason: str) -> None:
        """Wait; several faults at a time are one."""
        self.reason = reason
        if not self.is_on:
            self._until = time.monotonic() + self._next_s
            self._next_s = min(2 * self._next_s, LONGEST_S)

    def end(self) -> None:
        """Something has gone well."""
        if not self.is_on:
            self.reason, self._next_s = None, FIRST_S
