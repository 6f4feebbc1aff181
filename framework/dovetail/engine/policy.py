"""In which order waiting requests are admitted. Every policy puts higher `priority` first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dovetail.cache.radix import RadixTree
from dovetail.engine.request import Request


class SchedulePolicy(Protocol):
    """Orders waiting requests. `preempts`: a request may push out a running one of lower priority."""

    preempts: bool

    def order(self, waiting: Sequence[Request], tree: RadixTree) -> Sequence[Request]:
        """Return `waiting`, first to be admitted first.

        Args:
            waiting: The head of the queue, by priority and then arrival.
            tree: What is cached.
        """
        ...


class FirstCome:
    """First come, first served."""

    preempts = False

    def order(self, waiting: Sequence[Request], tree: RadixTree) -> Sequence[Request]:
        """By priority, then arrival: as they stand."""
        return waiting


class LongestPrefix:
    """Longest prefix match first: what shares most with the cache runs while it is there.

    Matching costs host time in every step. So only the head of the queue is ordered, and of it only so many are matched
    a step: those whose match is oldest, if pages have come or gone since.
    """

    preempts = False
    max_ordered = 128
    max_matched = 8

    def order(self, waiting: Sequence[Request], tree: RadixTree) -> Sequence[Request]:
        """By priority, then cached pages, then arrival."""
        head = waiting[: self.max_ordered]
        stale = [r for r in head if r.matched_version != tree.version]
        for request in sorted(stale, key=lambda r: (r.matched_version, -r.priority, r.arrival))[: self.max_matched]:
            request.matched_pages = tree.count(request.ids[:-1], request.cache_salt)
            request.matched_version = tree.version
        ordered = sorted(head, key=lambda r: (-r.priority, -r.matched_pages, r.arrival))
        return [*ordered, *waiting[self.max_ordered :]]


class Priority(FirstCome):
    """As first come, and a waiting request retracts running ones of lower priority when there is no room."""

    preempts = True


POLICIES: dict[str, type[SchedulePolicy]] = {"fcfs": FirstCome, "lpm": LongestPrefix, "priority": Priority}
