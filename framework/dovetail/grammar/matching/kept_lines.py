"""Which masks the devices keep: the host's account of a table that it alone decides about, and names lines of.

What a mask is for is told by a key: masks of equal keys are equal. A device has a line copied to its slot before it
draws the step in which the host says so, and works in order: whatever was launched before has read what stood there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

MAX_NEW = 8
"""Masks that a step has kept at most: each is a copy of its own, and what is not kept this time is sent once more."""


def kept_number(slot: int) -> int:
    """Return what stands for a kept mask where another mask of a step is a number from 0 on."""
    return -2 - slot


class KeptLines:
    """S slots; those that were not asked for longest go to others, but for the ones that this step draws by."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()
        self._new: list[tuple[int, int]] = []
        self._step = 0

    def begin(self) -> None:
        """The masks of another step are filled."""
        self._step += 1
        self._new = []

    def find(self, key: Hashable) -> int | None:
        """Return the slot of a mask that is kept, for this step to draw by."""
        found = self._slots.get(key)
        if found is None:
            return None
        self._slots[key] = found[0], self._step
        self._slots.move_to_end(key)
        return found[0]

    def keep(self, key: Hashable, line: int) -> None:
        """Have a mask that stands in a line of this step kept, if there is room and it is not kept already."""
        if key in self._slots or len(self._new) == MAX_NEW:
            return
        slot = len(self._slots)
        if slot >= self._num_slots:
            oldest = next(iter(self._slots), None)
            if oldest is None or self._slots[oldest][1] == self._step:
                return
            slot, _ = self._slots.pop(oldest)
        self._slots[key] = slot, self._step
        self._new.append((line, slot))

    @property
    def new(self) -> npt.NDArray[np.int32]:
        """What this step has kept: `[N, 2]`, a line and its slot."""
        return np.array(self._new, dtype=np.int32).reshape(-1, 2)

    def forget(self) -> None:
        """Keep nothing: it is not known what the devices have."""
        self._slots.clear()
        self._new = []
