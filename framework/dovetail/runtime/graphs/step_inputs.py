"""What a decode step's model is given: B rows of the batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Of a decode step, one token per row.

    Attributes:
        ids: `[B]` int64, input tokens.
        positions: `[B]` int64, their places.
        slots: `[B]` int64, where their keys and values go; -1 for the spare row, and where there is no page.
        lens: `[B]` int64, KV lengths once these are written.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    lens: Tensor
