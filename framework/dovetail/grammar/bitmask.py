"""The masks of one step on the host: which rows have one, and their bits, in memory that the devices copy from.

R sampled rows, K of them with a mask, W = ceil(V / 32) words of int32 for V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dovetail.contracts.grammar import GrammarBackend, GrammarMatcher
from dovetail.grammar.constraint import Constraint

if TYPE_CHECKING:
    from dovetail.contracts.grammar import Mask

FREE = -1
"""In place of a row of the masks: anything is allowed."""


def fill_masks(
    constraints: Sequence[Constraint | None], wants: Sequence[bool], lend: Callable[[int], Mask]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Fill the masks of a step.

    Args:
        constraints: One per sampled row, None for a row that may say anything.
        wants: Rows of which it must be known whether they allow only ends.
        lend: Gives memory for so many masks, `[K, W]`; not called for none.

    Returns:
        `[R]` which mask each row has, ascending, or `FREE`; and `[R]` whether it allows only ends.
    """
    mask_of, ends_only = np.full(len(constraints), FREE, dtype=np.int32), np.zeros(len(constraints), dtype=np.bool_)
    asked = [(i, constraint) for i, constraint in enumerate(constraints) if constraint is not None]
    if not asked:
        return mask_of, ends_only
    lines = lend(len(asked))
    matched = _fill_matchers([constraint for _, constraint in asked], lines)
    num = 0
    for place, (i, constraint) in enumerate(asked):
        if not constraint.fill(lines[place], matched[place]):
            continue
        if num != place:
            lines[num] = lines[place]
        ends_only[i] = wants[i] and constraint.only_ends(lines[place])
        mask_of[i] = num
        num += 1
    return mask_of, ends_only


def _fill_matchers(constraints: Sequence[Constraint], lines: Mask) -> list[bool]:
    """Let each backend fill its rows in one call; returns for each constraint whether its row was written."""
    matched = [False] * len(constraints)
    groups: dict[int, tuple[GrammarBackend, list[GrammarMatcher], list[int]]] = {}
    for place, constraint in enumerate(constraints):
        matcher = constraint.matching
        if matcher is not None and constraint.backend is not None:
            group = groups.setdefault(id(constraint.backend), (constraint.backend, [], []))
            group[1].append(matcher)
            group[2].append(place)
    for backend, matchers, places in groups.values():
        for place, filled in zip(places, backend.fill_batch(matchers, lines, places), strict=True):
            matched[place] = filled
    return matched
