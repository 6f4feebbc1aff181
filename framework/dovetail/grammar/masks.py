"""`MaskBuffer`: the masks of one step, filled on the host while the device computes, applied in one call.

K constrained rows of the R that are sampled, V tokens, W = ceil(V / 32) words of int32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dovetail.contracts.grammar import GrammarBackend, GrammarMatcher
from dovetail.grammar.constraint import Constraint
from dovetail.grammar.mask_ops import apply_mask

if TYPE_CHECKING:
    from dovetail.contracts.grammar import Mask


@dataclass(frozen=True, slots=True)
class TokenMask:
    """What `sample` needs.

    Attributes:
        words: `[K, W]` int32 on the device of the logits.
        rows: `[K]` int64, ascending.
        only_ends: Rows that allow nothing but ends of the reply: a minimum length must give way.
    """

    words: Tensor
    rows: Tensor
    only_ends: frozenset[int]

    def apply(self, logits: Tensor) -> None:
        """Mask `logits` `[R, V]` float32 in place."""
        apply_mask(logits, self.words, self.rows)


class MaskBuffer:
    """Host memory for masks, pinned where the device is a GPU; it grows to the most rows seen."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self._device = device
        self._num_words = num_words
        self._words = self._allocate(8)

    def fill(self, constraints: Sequence[Constraint | None], wants: Sequence[bool]) -> TokenMask | None:
        """Fill the masks of a step.

        Args:
            constraints: One per sampled row, None for a row that may say anything.
            wants: Rows of which it must be known whether they allow only ends.

        Returns:
            None where nothing is masked.
        """
        asked = [(i, constraint) for i, constraint in enumerate(constraints) if constraint is not None]
        if not asked:
            return None
        if len(asked) > self._words.shape[0]:
            self._words = self._allocate(2 * len(asked))
        lines = self._words.numpy()
        matched = _fill_matchers([constraint for _, constraint in asked], lines)
        kept: list[int] = []
        ends: list[int] = []
        for place, (i, constraint) in enumerate(asked):
            if not constraint.fill(lines[place], matched[place]):
                continue
            if len(kept) != place:
                lines[len(kept)] = lines[place]
            if wants[i] and constraint.only_ends(lines[place]):
                ends.append(i)
            kept.append(i)
        return self._mask(kept, ends) if kept else None

    def warm_up(self, vocab_size: int) -> None:
        """Mask a made-up row of logits: where that is a kernel, it is compiled now."""
        self._mask([0], []).apply(torch.zeros(1, vocab_size, device=self._device))

    def _mask(self, kept: list[int], ends: list[int]) -> TokenMask:
        words, rows = self._words[: len(kept)], torch.tensor(kept)
        if self._device.type != "cpu":
            words = words.to(self._device, non_blocking=True)
            rows = rows.pin_memory().to(self._device, non_blocking=True)
        return TokenMask(words, rows, frozenset(ends))

    def _allocate(self, num_rows: int) -> Tensor:
        return torch.zeros(num_rows, self._num_words, dtype=torch.int32, pin_memory=self._device.type == "cuda")


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
