"""What a row of the device state has of its request's parameters, and how a step's changes of rows are sent.

E page table entries, C rows that are cleared, A requests that take rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]

FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
NUMBERS = ("top_k", "seed", "num_prompt", "min_tokens", "slot", "num_top", "num_bias")
NOTHING = -1
"""A row's `slot` where its tokens are not counted, its `num_top` where no log probabilities are asked for."""
MAX_STOPS = 16
"""Stop ids of a row that graphs ban before its minimum length; rows that have more are drawn outside until then."""
MAX_BIAS = 512
"""Tokens of a row whose biases stand on the device; rows that bias more are not drawn in a graph."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Some changes.

    Attributes:
        packed: `[2 E + C + A (1 + F + N)]` places in the page tables and their pages; rows that are cleared; rows that
            are taken, and by name the bits of their float32 `FLOATS` and their `NUMBERS`.
        num_entries: E.
        num_cleared: C.
        num_admits: A.
    """

    packed: Longs
    num_entries: int
    num_cleared: int
    num_admits: int
