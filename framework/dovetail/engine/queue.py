"""Requests that wait, always in order: adding, finding and taking out cost the same however many there are."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from dovetail.engine.request import Request
from dovetail.messages import BACKGROUND


def rank(request: Request) -> tuple[int, int]:
    """Higher priority first, then whoever came first."""
    return -request.priority, request.arrival


class WaitQueue:
    """Requests without pages and row, by `rank`; those of the background are its end."""

    def __init__(self) -> None:
        self._order: list[Request] = []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._order)

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        insort(self._order, request, key=rank)

    def remove(self, request: Request) -> None:
        """Take a request out.

        Raises:
            ValueError: It is not here.
        """
        at = bisect_left(self._order, rank(request), key=rank)
        if at == len(self._order) or self._order[at] is not request:
            raise ValueError(f"request {request.arrival} is not in the queue")
        del self._order[at]

    def first(self, num: int, *, background: bool) -> list[Request]:
        """Return the first `num` requests of the background, or of everybody else."""
        split = bisect_left(self._order, (-BACKGROUND, 0), key=rank)
        start, stop = (split, len(self._order)) if background else (0, split)
        return self._order[start : min(start + num, stop)]
