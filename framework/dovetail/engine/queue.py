"""Queued requests, always in order: adding, finding and removing cost the same however many there are."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge

from dovetail.engine.owners import Owner, Owners
from dovetail.engine.request import EngineRequest


def rank(request: EngineRequest) -> tuple[int, int]:
    """Higher priority first, then earlier arrival."""
    return -request.priority, request.arrival


class WaitQueue:
    """Requests without pages and row, by `rank`: of each owner; those of the background are behind all others."""

    def __init__(self, owners: Owners | None = None, background: Owners | None = None) -> None:
        self._owners = {False: owners or Owners(), True: background or Owners(background=True)}
        self._lines: dict[bool, dict[Owner, list[EngineRequest]]] = {False: {}, True: {}}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[EngineRequest]:
        for lines in self._lines.values():
            yield from merge(*lines.values(), key=rank)

    def add(self, request: EngineRequest) -> None:
        """Put a request in its place."""
        self._num += 1
        owners = self._owners[request.is_background]
        owner = owners.of(request)
        line = self._lines[request.is_background].setdefault(owner, owner.waiting)
        insort(line, request, key=rank)
        if line[0] is request:
            owners.queued(owner)

    def remove(self, request: EngineRequest) -> None:
        """Take a request out.

        Raises:
            ValueError: It is not here.
        """
        owner = self._owners[request.is_background].of(request)
        line = owner.waiting
        at = bisect_left(line, rank(request), key=rank)
        if at == len(line) or line[at] is not request:
            raise ValueError(f"request {request.arrival} is not in the queue")
        del line[at]
        self._num -= 1
        if not line:
            del self._lines[request.is_background][owner]

    def first(self, num: int, *, background: bool) -> list[EngineRequest]:
        """Return the first `num` requests of one owner, of the background or of all others.

        Where requests of several owners wait, these take turns: see `Owners`.
        """
        lines = list(self._lines[background].values())
        return lines[0][:num] if lines else []
