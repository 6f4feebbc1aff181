"""Who goes next where a few may go at a time: owner by owner, and background work behind everybody.

And how much work may hold up a round of the event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import perf_counter

Place = asyncio.Future[None]


class TurnLine:
    """Who waits, taken in turn."""

    def __init__(self) -> None:
        """Begin empty."""
        self._owners: OrderedDict[str, deque[Place]] = OrderedDict()

    def join(self, owner: str) -> Place:
        """Wait behind the owner's others."""
        place: Place = asyncio.get_running_loop().create_future()
        self._owners.setdefault(owner, deque()).append(place)
        return place

    def next(self) -> Place | None:
        """Take the first, and put its owner behind the others."""
        while self._owners:
            owner, places = self._owners.popitem(last=False)
            while places:
                place = places.popleft()
                if not place.done():  # who left meanwhile was cancelled
                    if places:
                        self._owners[owner] = places
                    return place
        return None

    def __len__(self) -> int:
        return sum(not place.done() for places in self._owners.values() for place in places)


class Turns:
    """Lets up to `most` go at a time, and of background work one fewer, if there is another."""

    def __init__(self, most: int) -> None:
        """Begin with nobody."""
        self._most = {False: most, True: max(1, most - 1)}
        self._going = {False: 0, True: 0}
        self._lines = {False: TurnLine(), True: TurnLine()}

    @property
    def num_waiting(self) -> int:
        """Who waits."""
        return sum(map(len, self._lines.values()))

    @asynccontextmanager
    async def turn(self, owner: str, *, is_background: bool) -> AsyncIterator[None]:
        """Wait for a turn, and have it for the length of the block."""
        place = self._lines[is_background].join(owner)
        self._call()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave(is_background)
            raise
        try:
            yield
        finally:
            self._leave(is_background)

    def _leave(self, is_background: bool) -> None:
        self._going[is_background] -= 1
        self._call()

    def _call(self) -> None:
        for kind in (False, True):
            while sum(self._going.values()) < self._most[False] and self._going[kind] < self._most[kind]:
                place = self._lines[kind].next()
                if place is None:
                    break
                self._going[kind] += 1
                place.set_result(None)


class RoundTime:
    """The time in a round of the event loop that short work may take: what comes beyond it waits for the next round.

    So streams get their tokens between the requests of a burst.
    """

    def __init__(self, most_s: float) -> None:
        """Allow `most_s` seconds in each round; the last work of a round may exceed them."""
        self._most_s = self._left_s = most_s

    async def free(self) -> None:
        """Wait for a round that has time left."""
        while self._left_s <= 0:
            await asyncio.sleep(0)

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Count the block's time, which must not await."""
        if self._left_s == self._most_s:
            asyncio.get_running_loop().call_soon(self._refill)
        began = perf_counter()
        try:
            yield
        finally:
            self._left_s -= perf_counter() - began

    def _refill(self) -> None:
        self._left_s = self._most_s
