"""Pooled hidden states: what is told of a prompt in place of a token.

A prompt may be computed in several chunks, so a mean is summed up in its device row, in float64: how a prompt is cut
changes the last bits of a sum of float32 at most. What is pooled of a classifier are its scores. T tokens of a step,
H hidden size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dovetail.contracts.model import CausalLM, Classifier
from dovetail.messages.sampling import Pool
from dovetail.messages.step import POOL, StepInput


class Pooler:
    """Knows which device rows gather hidden states, and what they have gathered."""

    def __init__(self, model: CausalLM) -> None:
        self._classify = model.classify if isinstance(model, Classifier) else None
        self._kinds: dict[int, Pool] = {}
        self._sums: dict[int, Tensor] = {}

    def apply(self, step: StepInput) -> None:
        """Take what a step says of rows: they are cleared, then taken again."""
        if self._kinds:
            for row in step.cleared.tolist():
                self._kinds.pop(row, None)
                self._sums.pop(row, None)
        for admit in step.admit:
            if admit.pool is not None:
                self._kinds[admit.row] = admit.pool

    def take(self, step: StepInput, hidden: Tensor) -> list[tuple[int, Tensor]]:
        """Gather the final hidden states `[T, H]` of a step, by row.

        Returns:
            For each row whose task is `POOL`, its place in the step and `[H]` float32; of a classifier, its scores.
        """
        if not self._kinds:
            return []
        ends, found = np.cumsum(step.num_new), []
        for at in range(step.num_decode, len(step.rows)):
            row, stop = int(step.rows[at]), int(ends[at])
            kind, first = self._kinds.get(row), stop - int(step.num_new[at])
            if kind == "mean":
                self._add(row, hidden[first:stop], is_first=step.start[at] == 0)
            elif kind == "first" and step.start[at] == 0:
                self._sums[row] = hidden[first].clone()
            if step.task[at] == POOL:
                length = int(step.start[at] + step.num_new[at]) if kind == "mean" else 1
                found.append((at, hidden[stop - 1] if kind == "last" else self._sums[row] / length))
        if found and self._classify is not None:
            scores = self._classify(torch.stack([state for _, state in found]).to(hidden.dtype))
            found = [(at, own) for (at, _), own in zip(found, scores, strict=True)]
        return [(at, state.to(torch.float32)) for at, state in found]

    def _add(self, row: int, hidden: Tensor, *, is_first: bool) -> None:
        total = hidden.sum(0, dtype=torch.float64)
        self._sums[row] = total if is_first else self._sums[row] + total
