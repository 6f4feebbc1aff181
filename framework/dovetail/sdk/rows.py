"""What the device has of the rows of running requests, as operations of a step take it.

S device rows, R rows of a batch, V vocabulary size, N slots of counted tokens. A row's request left them here when it
was admitted; `floats` are `[F, S]` float32 by `FLOATS`, `numbers` are `[N, S]` int64 by `NUMBERS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
NUMBERS = ("top_k", "seed", "num_prompt", "min_tokens", "slot", "num_top", "num_bias")
NOTHING = -1
"""A row's `slot` where its tokens are not counted, its `num_top` where no log probabilities are asked for, its mask
where it has none."""
MAX_STOPS = 16
"""Stop ids of a row that graphs ban before its minimum length; rows that have more are drawn outside until then."""
MAX_BIAS = 512
"""Tokens of a row whose biases stand on the device; rows that bias more are not drawn in a graph."""
MAX_TOP = 20
"""Log probabilities of rivals that a graph finds for each row."""
PACKED = 2 + 2 * MAX_TOP
"""Numbers that `draw_adjusted` says of a row: its token, that one's log probability, those of its rivals, their ids."""


class RowTable(NamedTuple):
    """Sampling parameters of each device row, beside masks and counts.

    Attributes:
        floats: `[F, S]` float32, by `FLOATS`.
        numbers: `[N, S]` int64, by `NUMBERS`.
        stops: `[S, MAX_STOPS]` int64, ids that end the row's text; below 0: none.
        bias_ids: `[S, MAX_BIAS]` int32, tokens of which the row biases the first `num_bias`.
        bias: `[S, MAX_BIAS]` float32, by how much.
    """

    floats: Tensor
    numbers: Tensor
    stops: Tensor
    bias_ids: Tensor
    bias: Tensor

    def number(self, name: str) -> Tensor:
        """Return one of `NUMBERS` of all rows, `[S]`."""
        return self.numbers[NUMBERS.index(name)]


@dataclass(slots=True, eq=False)
class DrawParams:
    """Parameters by row.

    `temperature` (0: the best token), `top_p` and `min_p` are `[R]` float32, `top_k` is `[R]` int64 (below 1: off).
    `seeds` and `positions` are `[R]` int64: the keys of this step's random numbers.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seeds: Tensor
    positions: Tensor

    @classmethod
    def uninitialised(cls, num: int, device: torch.device) -> DrawParams:
        """Of rows that are all written before they are read."""
        temperature, top_p, min_p = torch.empty(3, num, device=device)
        return cls(temperature, top_p, min_p, *torch.empty(3, num, dtype=torch.int64, device=device))

    @classmethod
    def of_rows(cls, rows: Tensor, positions: Tensor, floats: Tensor, numbers: Tensor) -> DrawParams:
        """Gather those of device rows `[R]`, whose next tokens have these `[R]` places."""
        temperature, top_p, min_p = floats[:3].index_select(1, rows)
        top_k, seeds = numbers[:2].index_select(1, rows)
        return cls(temperature, top_p, min_p, top_k, seeds, positions)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All tensors, in the order of the constructor."""
        return self.temperature, self.top_p, self.min_p, self.top_k, self.seeds, self.positions

    def rows(self, index: Tensor | slice) -> DrawParams:
        """Those of some rows."""
        temperature, top_p, min_p, top_k, seeds, positions = (tensor[index] for tensor in self.tensors())
        return DrawParams(temperature, top_p, min_p, top_k, seeds, positions)
