"""Masks of states that were met before, kept in one block of memory."""

from __future__ import annotations

import weakref

import numpy as np

from dovetail.sdk.masks import Words
from dovetail_grammar.json_states import SharedMask

MAX_BYTES = 32 * 1024 * 1024
"""Of all masks that are kept, with their owners; memory that was never needed takes none."""
OWNER_BYTES = 512
"""Of a mask's owner and the views that it has of the mask; measured."""


class _Owner(weakref.ref[SharedMask]):
    """Whose a slot is, while there is a grammar with that state."""

    __slots__ = ("slot",)
    slot: int


class KeptMasks:
    """S masks `[S, W]` of int32, which go with their grammars: an engine that has ever new ones keeps no more of them.

    Which are given up for others is chosen by CLOCK: those not asked for in a round. Source: F. J. Corbató, A Paging
    Experiment with the Multics System (1968).
    """

    def __init__(self, num_words: int) -> None:
        """`num_words`: W, of one mask."""
        self._rows = np.empty((max(1, MAX_BYTES // (4 * num_words + OWNER_BYTES)), num_words), dtype=np.int32)
        self._owners: list[_Owner] = []
        self._free: list[int] = []
        self._hand = 0

    def keep(self, shared: SharedMask, line: Words) -> None:
        """Keep a copy of a state's mask."""
        shared.slot = self._free_slot()
        owner = _Owner(shared, self._gone)
        owner.slot = shared.slot
        self._owners[owner.slot : owner.slot + 1] = [owner]
        shared.line = self._rows[shared.slot]
        shared.line[:] = line
        shared.bits = shared.line.data.cast("B")

    def _gone(self, owner: weakref.ref[SharedMask]) -> None:
        """A state is gone. This comes from any thread, at any time."""
        if isinstance(owner, _Owner):
            self._free.append(owner.slot)

    def _free_slot(self) -> int:
        """Return a slot whose state is gone, one that was never used, or the one that is given up."""
        owners = self._owners
        while self._free:
            slot = self._free.pop()
            if owners[slot]() is None:  # else it has an owner already: the hand came first
                return slot
        if len(owners) < len(self._rows):
            return len(owners)
        while (found := owners[self._hand]()) is not None and found.is_used:
            found.is_used = False
            self._hand = (self._hand + 1) % len(owners)
        if found is not None:
            found.slot, found.line, found.bits = -1, None, None
        slot, self._hand = self._hand, (self._hand + 1) % len(owners)
        return slot
