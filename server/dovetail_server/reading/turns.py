"""Who goes next where a few may go at a time: owner by owner, and background work behind everybody."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

Place = asyncio.Future[Any]


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

    def next(self, but: Collection[str] = ()) -> tuple[str, Place] | None:
        """Take the first of an owner who is not in `but`, and put that owner behind the others."""
        while (owner := next((each for each in self._owners if each not in but), None)) is not None:
            places = self._owners.pop(owner)
            while places:
                place = places.popleft()
                if not place.done():  # who left meanwhile was cancelled
                    if places:
                        self._owners[owner] = places
                    return owner, place
        return None

    def waiting(self) -> Counter[str]:
        """Count who waits, by owner."""
        return Counter(owner for owner, places in self._owners.items() for place in places if not place.done())


class Turns:
    """Lets up to `most` go at a time, and of background work one fewer, if there is another."""

    def __init__(self, most: int, spare: int = 0) -> None:
        """Begin with nobody.

        Args:
            most: See above.
            spare: So many more go whose owners have nothing going: they do not wait for what others do.
        """
        self._most = {False: most, True: max(1, most - 1)}
        self._spare = spare
        self._going = {False: 0, True: 0}
        self._owners: Counter[str] = Counter()
        self._lines = {False: TurnLine(), True: TurnLine()}

    @property
    def num_waiting(self) -> int:
        """Who waits."""
        return self._waiting().total()

    def has_room(self, owner: str, most: int) -> bool:
        """Whether another of an owner's may wait: of `most` places, each owner who waits has an equal share."""
        waiting = self._waiting()
        return waiting[owner] < max(1, most // len({*waiting, owner}))

    def _waiting(self) -> Counter[str]:
        return self._lines[False].waiting() + self._lines[True].waiting()

    @asynccontextmanager
    async def turn(self, owner: str, *, is_background: bool) -> AsyncIterator[ReadingTurn]:
        """Wait for a turn, and have it for the length of the block, but for where it is paused."""
        turn = ReadingTurn(self, owner, is_background)
        await turn.resume()
        try:
            yield turn
        finally:
            turn.pause()

    def join(self, owner: str, is_background: bool) -> Place:
        """Wait behind the owner's others, or go at once."""
        place = self._lines[is_background].join(owner)
        self._call()
        return place

    def leave(self, owner: str, is_background: bool) -> None:
        """Let the next one go."""
        self._going[is_background] -= 1
        self._owners -= Counter([owner])  # keeps those above 0
        self._call()

    def _call(self) -> None:
        for kind in (False, True):
            while self._num_going < self._most[False] and self._going[kind] < self._most[kind]:
                if not self._go(kind):
                    break
        while self._num_going < self._most[False] + self._spare and self._go(False, but=self._owners):
            pass

    @property
    def _num_going(self) -> int:
        return sum(self._going.values())

    def _go(self, kind: bool, but: Collection[str] = ()) -> bool:
        """Let one of a kind go, of an owner who is not in `but`; return whether there was one."""
        if (found := self._lines[kind].next(but)) is None:
            return False
        owner, place = found
        self._going[kind] += 1
        self._owners[owner] += 1
        place.set_result(None)
        return True


class ReadingTurn:
    """One turn, which may be paused while nothing is done."""

    def __init__(self, turns: Turns, owner: str, is_background: bool) -> None:
        """Have none yet."""
        self.owner = owner
        self._turns = turns
        self._is_background = is_background
        self._is_mine = False

    async def resume(self) -> None:
        """Wait for the turn."""
        place = self._turns.join(self.owner, self._is_background)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._turns.leave(self.owner, self._is_background)
            raise
        self._is_mine = True

    def pause(self) -> None:
        """Let others go, if it is one's turn."""
        if self._is_mine:
            self._is_mine = False
            self._turns.leave(self.owner, self._is_background)

    def beside(self, turns: Turns) -> ReadingTurn:
        """Return the same one's turn of something else, which has yet to be waited for."""
        return ReadingTurn(turns, self.owner, self._is_background)
