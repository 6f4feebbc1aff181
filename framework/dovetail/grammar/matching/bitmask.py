"""The masks of one step on the host: which rows have one, and their bits, in memory that the devices copy from.

P places at which a token is drawn, K of them with a mask, W = ceil(V / 32) words of int32 for V tokens. A row has one
place, and one more behind each of its drafts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dovetail.contracts.grammar import GrammarBackend, GrammarMatcher
from dovetail.grammar.matching.constraint import Constraint
from dovetail.sdk.masks import has_bit, the_only

if TYPE_CHECKING:
    from dovetail.contracts.grammar import Mask

FREE = -1
"""In place of a row of the masks: anything is allowed."""


def fill_masks(
    constraints: Sequence[Constraint | None],
    wants: Sequence[bool],
    lend: Callable[[int], Mask],
    drafts: Sequence[Sequence[int]] = (),
    kept: KeptLines | None = None,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Fill the masks of a step.

    Args:
        constraints: One per sampled row, None for a row that may say anything.
        wants: Rows of which it must be known whether they allow only ends.
        lend: Gives memory for so many masks, `[K, W]`; not called for none.
        drafts: Of each row; none has any if not given. A constraint follows its row's drafts as far as it allows them,
            and is taken back. Behind that nothing is masked: what is drawn there does not count.
        kept: The masks that devices keep, for rows without drafts; what has become known now is added.

    Returns:
        `[P]` which mask each place has, ascending, or `FREE`, or the number of one that is kept; and `[P]` whether it
        allows only ends.
    """
    if kept is not None:
        kept.begin()
    if not any(drafts):
        return _fill_places(constraints, wants, lend, kept)
    lens = [1 + len(ids) for ids in drafts]
    mask_of, ends_only = np.full(sum(lens), FREE, dtype=np.int32), np.zeros(sum(lens), dtype=np.bool_)
    walks, place, num_lines = [], 0, 0
    for i, (constraint, length) in enumerate(zip(constraints, lens, strict=True)):
        if constraint is not None:
            walks.append(_Walk(constraint, drafts[i], place, num_lines, wants[i]))
            num_lines += length
        place += length
    if not walks:
        return mask_of, ends_only
    lines = lend(num_lines)
    _follow_drafts(walks, lines, mask_of, ends_only)
    _close_up(mask_of, lines)
    return mask_of, ends_only


def _fill_places(
    constraints: Sequence[Constraint | None],
    wants: Sequence[bool],
    lend: Callable[[int], Mask],
    kept: KeptLines | None,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """As `fill_masks`, where each row has one place."""
    numbers, ends_only = [FREE] * len(constraints), np.zeros(len(constraints), dtype=np.bool_)
    places, bound = [], []
    for place, constraint in enumerate(constraints):
        if constraint is None:
            continue
        known = None if kept is None else constraint.known()
        line = None if kept is None or known is None else kept.find(known[0])
        if known is None or line is None:
            places.append(place)
            bound.append(constraint)
            continue
        constraint.take_known(line.only)
        numbers[place] = line.number
        if wants[place]:
            ends_only[place] = constraint.only_ends(known[1])
    mask_of = np.array(numbers, dtype=np.int32)
    if not places:
        return mask_of, ends_only
    lines = lend(len(places))
    matched, written = _fill_matchers(bound, lines, range(len(bound))), []
    for at, constraint in enumerate(bound):
        row = lines[at]
        has_mask = constraint.fill(row, matched[at])
        written.append(at if has_mask else FREE)
        if has_mask and wants[places[at]]:
            ends_only[places[at]] = constraint.only_ends(row)
    mask_of[places] = written
    if FREE in written:
        _close_up(mask_of, lines)
    if kept is not None:
        for place, constraint in zip(places, bound, strict=True):
            if kept.is_full:
                break
            if mask_of[place] != FREE and (known := constraint.known()) is not None:
                kept.keep(known[0], int(mask_of[place]), the_only(known[1]))
    return mask_of, ends_only


def _close_up(mask_of: npt.NDArray[np.int32], lines: Mask) -> None:
    """Move masks to the front, over lines that hold none."""
    for num, at in enumerate(np.flatnonzero(mask_of >= 0).tolist()):
        if num != mask_of[at]:
            lines[num] = lines[mask_of[at]]
        mask_of[at] = num


@dataclass(slots=True)
class _Walk:
    """One row's way along its drafts.

    Attributes:
        place: Its first place.
        line: The first of its masks.
        wants: It must be known whether its masks allow only ends.
    """

    constraint: Constraint
    drafts: Sequence[int]
    place: int
    line: int
    wants: bool


def _follow_drafts(
    walks: list[_Walk], lines: Mask, mask_of: npt.NDArray[np.int32], ends_only: npt.NDArray[np.bool_]
) -> None:
    """Fill the masks of every row's first place, then of those behind their drafts: each round in one call."""
    begun = [(walk.constraint, walk.constraint.mark()) for walk in walks if walk.drafts]
    try:
        going, depth = walks, 0
        while going:
            matched = _fill_matchers([walk.constraint for walk in going], lines, [walk.line + depth for walk in going])
            still = []
            for walk, is_matched in zip(going, matched, strict=True):
                constraint, place, line = walk.constraint, walk.place + depth, walk.line + depth
                written = constraint.fill(lines[line], is_matched)
                if written:
                    mask_of[place] = line
                    ends_only[place] = walk.wants and constraint.only_ends(lines[line])
                if depth == len(walk.drafts):
                    continue
                token = walk.drafts[depth]
                # Only what the mask allows is tried: a matcher that has refused a token may not go on.
                fits = (not written or has_bit(lines[line], token)) and constraint.accept(token) is None
                if fits and not constraint.terminated:
                    still.append(walk)
            going, depth = still, depth + 1
    finally:
        for constraint, mark in begun:
            constraint.back_to(mark)


def _fill_matchers(constraints: Sequence[Constraint], lines: Mask, places: Sequence[int]) -> list[bool]:
    """Let each backend fill its lines in one call; returns for each constraint whether its line was written."""
    matched = [False] * len(constraints)
    groups: dict[int, tuple[GrammarBackend, list[GrammarMatcher], list[int]]] = {}
    for at, constraint in enumerate(constraints):
        matcher = constraint.matching
        if matcher is not None and constraint.backend is not None:
            group = groups.setdefault(id(constraint.backend), (constraint.backend, [], []))
            group[1].append(matcher)
            group[2].append(at)
    for backend, matchers, group_at in groups.values():
        filled = backend.fill_batch(matchers, lines, [places[at] for at in group_at])
        for at, is_filled in zip(group_at, filled, strict=True):
            matched[at] = is_filled
    return matched


# Which masks the devices keep: the host's account of a table that it alone decides about, and names lines of.
#
# What a mask is for is told by a key: masks of equal keys are equal. A device has a line copied to its slot before it
# draws the step in which the host says so, and works in order: whatever was launched before has read what stood there.

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
