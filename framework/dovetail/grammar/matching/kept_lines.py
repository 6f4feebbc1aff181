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


MAX_LOOKED = 64
"""Masks that are looked at for one to be given up: nearly always the first few will do."""


class KeptLine:
    """A mask that the devices keep.

    Attributes:
        slot: Where.
        number: What stands for it in a step.
        only: The one token that it allows; -1 for more.
        step: The last that drew by it, …
        queued_at: … as far as it was known when it took its turn to be given up.
    """

    __slots__ = ("number", "only", "queued_at", "slot", "step")

    def __init__(self, slot: int, only: int, step: int) -> None:
        self.slot, self.number, self.only = slot, kept_number(slot), only
        self.step = self.queued_at = step


class KeptLines:
    """S slots; those that were not asked for in a while go to others, but for the ones that this step draws by.

    What was asked for moves back in the queue only when its turn comes to be given up, as asking is what each row does.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._lines: OrderedDict[Hashable, KeptLine] = OrderedDict()
        self._new: list[tuple[int, int]] = []
        self._step = 0

    def begin(self) -> None:
        """The masks of another step are filled."""
        self._step += 1
        self._new = []

    def find(self, key: Hashable) -> KeptLine | None:
        """Return a mask that is kept, for this step to draw by."""
        found = self._lines.get(key)
        if found is not None:
            found.step = self._step
        return found

    @property
    def is_full(self) -> bool:
        """Whether this step keeps nothing more."""
        return len(self._new) == MAX_NEW

    def keep(self, key: Hashable, line: int, only: int = -1) -> None:
        """Have a mask that stands in a line of this step kept, if there is room and it is not kept already.

        Args:
            key: What it is of.
            line: Its line.
            only: The one token that it allows; -1 for more.
        """
        if key in self._lines or self.is_full:
            return
        slot = len(self._lines)
        if slot >= self._num_slots:
            given_up = self._give_up()
            if given_up is None:
                return
            slot = given_up
        self._lines[key] = KeptLine(slot, only, self._step)
        self._new.append((line, slot))

    def _give_up(self) -> int | None:
        """Return the slot of one that goes; None where those whose turn it is are in use."""
        for _ in range(min(MAX_LOOKED, len(self._lines))):
            key, line = next(iter(self._lines.items()))
            if line.step == line.queued_at != self._step:
                del self._lines[key]
                return line.slot
            line.queued_at = line.step
            self._lines.move_to_end(key)
        return None

    @property
    def new(self) -> npt.NDArray[np.int32]:
        """What this step has kept: `[N, 2]`, a line and its slot."""
        return np.array(self._new, dtype=np.int32).reshape(-1, 2)

    def forget(self) -> None:
        """Keep nothing: it is not known what the devices have."""
        self._lines.clear()
        self._new = []
