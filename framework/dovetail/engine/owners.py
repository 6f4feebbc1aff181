"""Whose turn it is, where requests of several owners wait: the owner served least for its weight.

This is deficit round robin with the tokens that were computed in place of a guess of what a request will cost: how long
an output becomes is not known before (as the virtual token counter, arXiv:2401.00588). An owner that begins to wait
gets `CREDIT` for the time before and no more, and one that leaves with more than its share finds that again if it comes
back soon. Nothing is counted while all requests are of one owner.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from heapq import merge

from dovetail.engine.request import EngineRequest

MIN_KNOWN = 64
"""So many owners are remembered before any is forgotten."""
CREDIT = 1024.0
"""Tokens, times its weight, by which an owner is ahead that begins to wait: who sends a request now and then, or a few
at once, does not wait behind one that always sends."""
BEHIND = 256.0
"""An owner takes rows and pages from one that was served so much more. Among owners that always wait hardly one is:
they come to their shares as requests end, and few are retracted for it."""
Turn = tuple[int, float, int, "Owner"]
"""Lowest first: the first request's priority, negated; `served`; that request's arrival; the owner."""


@dataclass(slots=True, eq=False)
class Owner:
    """Whose requests are queued and running.

    Attributes:
        name: As `Submit.owner`.
        weight: Its share of the tokens, relative to other owners' weights.
        served: Tokens computed for it, divided by its weight, from where the others were when it began to wait.
        num_live: Its queued and running requests.
        waiting: Its queued requests, by rank.
        turn: Its valid entry in the heap of turns.
    """

    name: str
    weight: float = 1.0
    served: float = -math.inf
    num_live: int = 0
    waiting: list[EngineRequest] = field(default_factory=list)
    turn: Turn | None = None


class Owners:
    """The owners of live requests, in the order of their turns. An operation costs the logarithm of their number."""

    def __init__(
        self, running: Collection[EngineRequest] = (), *, by_owner: bool = True, background: bool = False
    ) -> None:
        """Begin with none.

        Args:
            running: All requests with rows, as they come and go.
            by_owner: Else all requests count as those of one owner.
            background: These are the owners of the background's requests; else of all others.
        """
        self._running, self._by_owner, self._background = running, by_owner, background
        self._known: dict[str, Owner] = {}
        self._forget_at = MIN_KNOWN
        self._num_live = 0
        self._now = 0.0
        """What those were served at least that have waited long."""
        self._most = 0.0
        """The most that an owner was served. While no request waits, no owner is owed anything."""
        self._turns: list[Turn] | None = None

    @property
    def is_shared(self) -> bool:
        """Whether there are live requests of more than one owner."""
        return self._num_live > 1

    def join(self, request: EngineRequest) -> None:
        """Count a new request. A new weight of the owner holds from now on.

        What was computed while all were of one owner counts now, up to what others have had.
        """
        owner = self.of(request)
        owner.weight = request.weight
        owner.num_live += 1
        if owner.num_live > 1:
            return
        self._num_live += 1
        owner.served = max(owner.served, self._now - CREDIT)
        if self._num_live == 2:
            first = next(o for o in self._known.values() if o.num_live and o is not owner)
            served, most = max(first.served, self._now), self._most
            self.settle()
            first.served = min(first.served, served)
            self._most = max(most, first.served)

    def leave(self, request: EngineRequest) -> None:
        """Take a request out that has left queue and rows."""
        owner = self.of(request)
        owner.num_live -= 1
        if owner.num_live:
            return
        self._num_live -= 1
        if self._num_live < 2:
            self._turns = None
        if not self._num_live:
            self._known, self._now, self._most = {}, 0.0, 0.0
        elif len(self._known) > self._forget_at:  # those that would begin at the common start
            start = self._now - CREDIT
            self._known = {n: o for n, o in self._known.items() if o.num_live or o.served > start}
            self._forget_at = max(MIN_KNOWN, 2 * len(self._known))

    def of(self, request: EngineRequest) -> Owner:
        """Return the owner of a request."""
        name = request.owner if self._by_owner else ""
        owner = self._known.get(name)
        if owner is None:
            owner = self._known[name] = Owner(name)
        return owner

    def settle(self) -> dict[Owner, list[EngineRequest]]:
        """Charge for what was computed since the last step; returns the running requests of each owner."""
        found: dict[Owner, list[EngineRequest]] = {}
        for request in self._running:
            if request.is_background == self._background:
                self.charge(request)
                found.setdefault(self.of(request), []).append(request)
        return found

    def charge(self, request: EngineRequest, num_coming: int = 0) -> None:
        """Charge for a request's tokens so far and `num_coming` more, once: not for those computed again, or cached.

        One that has been sampled counts before it is computed, as the last one never is.
        """
        num_tokens = request.computed_len + request.on_device + num_coming
        if num_tokens > request.num_charged:
            owner = self.of(request)
            owner.served += (num_tokens - request.num_charged) / owner.weight
            self._most = max(self._most, owner.served)
            request.num_charged = num_tokens

    def queued(self, owner: Owner) -> None:
        """The first of an owner's queued requests is another one."""
        if len(owner.waiting) == 1 and self.is_shared:
            owner.served = max(owner.served, self._start(owner))
        if self._turns is not None:
            self.put_back(owner)

    def put_back(self, owner: Owner) -> None:
        """Let an owner have turns again, if it has queued requests."""
        if self._turns is not None and owner.waiting:
            first = owner.waiting[0]
            owner.turn = (-first.priority, owner.served, first.arrival, owner)
            heapq.heappush(self._turns, owner.turn)
            if len(self._turns) > 4 * self._num_live + MIN_KNOWN:
                self._turns = None  # mostly entries that are no longer valid

    def next(self) -> Owner | None:
        """Return the owner whose turn it is, of those with queued requests."""
        if self._turns is None:
            self._turns = []
            for owner in self._known.values():
                self.put_back(owner)
        while self._turns:
            turn = self._turns[0]
            owner = turn[3]
            if turn is owner.turn and owner.waiting:
                first = owner.waiting[0]
                if turn[:3] == (-first.priority, owner.served, first.arrival):
                    return owner
                owner.turn = (-first.priority, owner.served, first.arrival, owner)
                heapq.heapreplace(self._turns, owner.turn)  # it was served, or its first request is gone: later
            else:
                heapq.heappop(self._turns)
        return None

    def take(self, owner: Owner) -> None:
        """Let an owner that is `next` have no more turns until `put_back`."""
        owner.turn = None

    def _start(self, new: Owner) -> float:
        """Return where an owner is put that begins to wait: ahead of those that wait, else of all that were served."""
        first, others = self.next(), tuple[float, ...]()
        if first is not None and first is not new and first.waiting[0].priority == new.waiting[0].priority:
            others = (first.served,)
        elif first is not None:  # with priorities the next one is not the one that was served least
            others = tuple(owner.served for owner in self._known.values() if owner.waiting and owner is not new)
        if not others:
            self.settle()
        self._now = max(self._now, min(others, default=self._most))
        return self._now - CREDIT


# Queued requests, always in order: adding, finding and removing cost the same however many there are.


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
