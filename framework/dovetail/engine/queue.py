"""Queued requests, always in order: adding, finding and removing cost the same however many there are."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge

from dovetail.engine.owners import Owner, Owners
from dovetail.engine.request import Request


def rank(request: Request) -> tuple[int, int]:
    """Higher priority first, then whoever came first."""
    return -request.priority, request.arrival


class WaitQueue:
    """Requests without pages and row, by `rank`: of each owner, and of the background, which is behind all owners."""

    def __init__(self, owners: Owners | None = None) -> None:
        self._owners = owners or Owners()
        self._lines: dict[Owner, list[Request]] = {}
        self._background: list[Request] = []
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Request]:
        yield from merge(*self._lines.values(), key=rank)
        yield from self._background

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        self._num += 1
        if request.is_background:
            insort(self._background, request, key=rank)
            return
        owner = self._owners.of(request)
        line = self._lines.setdefault(owner, owner.waiting)
        insort(line, request, key=rank)
        if line[0] is request:
            self._owners.queued(owner)

    def remove(self, request: Request) -> None:
        """Take a request out.

        Raises:
            ValueError: It is not here.
        """
        owner = None if request.is_background else self._owners.of(request)
        line = self._background if owner is None else owner.waiting
        at = bisect_left(line, rank(request), key=rank)
        if at == len(line) or line[at] is not request:
            raise ValueError(f"request {request.arrival} is not in the queue")
        del line[at]
        self._num -= 1
        if owner is not None and not line:
            del self._lines[owner]

    def first(self, num: int, *, background: bool) -> list[Request]:
        """Return the first `num` requests of the background, or of everybody else, who are of one owner.

        Where requests of several owners wait, these take turns: see `Owners`.
        """
        if background:
            return self._background[:num]
        lines = list(self._lines.values())
        return lines[0][:num] if lines else []
