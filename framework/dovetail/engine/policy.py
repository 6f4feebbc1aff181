"""In which order waiting requests are admitted. Every policy puts higher `priority` first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dovetail.cache.radix import RadixTree
from dovetail.engine.request import Request


class SchedulePolicy(Protocol):
    """Orders waiting requests. `preempts`: a request may push out a running one of lower priority."""

    preempts: bool

    def order(self, waiting: Sequence[Request], tree: RadixTree) -> list[Request]:
        """Return `waiting`, first to be admitted first."""
        ...


class FirstCome:
    """First come, first served."""

    preempts = False

    def order(self, waiting: Sequence[Request], tree: RadixTree) -> list[Request]:
        """By priority, then arrival."""
        return sorted(waiting, key=lambda r: (-r.priority, r.arrival))


class LongestPrefix:
    """Longest prefix match first: what shares most with the cache runs while it is there."""

    preempts = False
    max_matched = 128
    """Beyond so many waiting requests, matching all of them each step costs more than it gains."""

    def order(self, waiting: Sequence[Request], tree: RadixTree) -> list[Request]:
        """By priority, then cached pages, then arrival."""
        if len(waiting) > self.max_matched:
            return FirstCome().order(waiting, tree)
        matched = {id(r): len(tree.match(r.ids[:-1], r.cache_salt)[0]) for r in waiting}
        return sorted(waiting, key=lambda r: (-r.priority, -matched[id(r)], r.arrival))


class Priority(FirstCome):
    """As first come, and a waiting request retracts running ones of lower priority when there is no room."""

    preempts = True


POLICIES: dict[str, type[SchedulePolicy]] = {"fcfs": FirstCome, "lpm": LongestPrefix, "priority": Priority}
