"""What is kept within bytes for several owners: who brings much pushes out entries of its own, not those of others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
SPARE = 64
"""Places of owners that have changed since, beyond one for each owner, before they are swept."""


class SharedSpace(Generic[K]):
    """Sizes of entries, each of the owner that brought it.

    Operations do not depend on how many entries there are, and on the number of owners as its logarithm.

    Attributes:
        total: Bytes of all entries.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.total = 0
        self._owner_of: dict[K, str] = {}
        self._entries: dict[str, OrderedDict[K, int]] = {}  # of each owner, least recently used first
        self._num_owners = 0  # so far
        self._places: dict[str, tuple[int, int]] = {}  # of each owner: its bytes below zero, and its number
        self._heap: list[tuple[int, int, str]] = []  # places with the owner's name, those that were before, too

    def __contains__(self, key: K) -> bool:
        return key in self._owner_of

    def __len__(self) -> int:
        return len(self._owner_of)

    def size(self, key: K) -> int:
        """Return the bytes of an entry."""
        return self._entries[self._owner_of[key]][key]

    def use(self, key: K) -> None:
        """Note that an entry was used, by whomever."""
        self._entries[self._owner_of[key]].move_to_end(key)

    def add(self, key: K, owner: str, size: int) -> None:
        """Take a new entry."""
        self._owner_of[key] = owner
        self._entries.setdefault(owner, OrderedDict())[key] = size
        if owner not in self._places:
            self._places[owner] = 0, self._num_owners
            self._num_owners += 1
        self._move(owner, size)

    def remove(self, key: K) -> None:
        """Forget an entry, if there is such a one."""
        if (owner := self._owner_of.pop(key, None)) is None:
            return
        self._move(owner, -self._entries[owner].pop(key))
        if not self._entries[owner]:
            del self._entries[owner], self._places[owner]

    def _move(self, owner: str, size: int) -> None:
        """Give an owner its place with more bytes, or less."""
        self.total += size
        less, number = self._places[owner]
        self._places[owner] = less - size, number
        heappush(self._heap, (less - size, number, owner))
        if len(self._heap) > 2 * len(self._places) + SPARE:
            self._heap = [(*place, name) for name, place in self._places.items()]
            heapify(self._heap)

    def victim(self, owner: str, size: int, busy: Collection[K] = ()) -> K | None:
        """Return which entry goes first where an owner brings more: the least recently used of who has most then.

        Of owners that have as much, the one comes first whose entries have been here longest without a gap.

        Args:
            owner: Who brings something.
            size: Its bytes.
            busy: Entries that stay.
        """
        less, number = self._places.get(owner, (0, self._num_owners))
        bringing = [(less - size, number, owner)]
        seen, found = [], None
        while found is None and (self._heap or bringing):
            if bringing and (not self._heap or bringing[0] < self._heap[0]):
                name = bringing.pop()[2]
            else:
                place = heappop(self._heap)
                name = place[2]
                if self._places.get(name) != place[:2]:
                    continue  # it has another place now
                seen.append(place)
                if name == owner:
                    continue
            found = next((key for key in self._entries.get(name, ()) if key not in busy), None)
        for place in seen:
            heappush(self._heap, place)
        return found
