"""What is kept within bytes for several owners: who brings much pushes out entries of its own, not those of others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class SharedSpace(Generic[K]):
    """Sizes of entries, each of the owner that brought it. Operations do not depend on how many entries there are.

    Attributes:
        total: Bytes of all entries.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.total = 0
        self._owner_of: dict[K, str] = {}
        self._entries: dict[str, OrderedDict[K, int]] = {}  # of each owner, least recently used first
        self._held: dict[str, int] = {}

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
        self._held[owner] = self._held.get(owner, 0) + size
        self.total += size

    def remove(self, key: K) -> None:
        """Forget an entry, if there is such a one."""
        if (owner := self._owner_of.pop(key, None)) is None:
            return
        size = self._entries[owner].pop(key)
        self.total -= size
        self._held[owner] -= size
        if not self._entries[owner]:
            del self._entries[owner], self._held[owner]

    def victim(self, owner: str, size: int, busy: Collection[K] = ()) -> K | None:
        """Return which entry goes first where an owner brings more: the least recently used of who has most then.

        Args:
            owner: Who brings something.
            size: Its bytes.
            busy: Entries that stay.
        """
        sizes = {**self._held, owner: self._held.get(owner, 0) + size}
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            found = next((key for key in self._entries.get(name, ()) if key not in busy), None)
            if found is not None:
                return found
        return None
