"""What tokens are drawn by, row by row: R rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class DrawParams:
    """Parameters by row.

    `temperature` (0: the best token), `top_p` and `min_p` are `[R]` float32, `top_k` is `[R]` int64 (below 1: off),
    `seeds` and `positions` are `[R]` int64: what the draws of this step are keyed by. `apart`: a row's draw must not
    depend on how many rows there are, down to how its probabilities are summed.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seeds: Tensor
    positions: Tensor
    apart: bool = False

    @classmethod
    def uninitialised(cls, num: int, device: torch.device) -> DrawParams:
        """Of rows that are all written before they are read."""
        temperature, top_p, min_p = torch.empty(3, num, device=device)
        return cls(temperature, top_p, min_p, *torch.empty(3, num, dtype=torch.int64, device=device))

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of the constructor."""
        return self.temperature, self.top_p, self.min_p, self.top_k, self.seeds, self.positions

    def rows(self, index: Tensor | slice) -> DrawParams:
        """Those of some rows."""
        temperature, top_p, min_p, top_k, seeds, positions = (tensor[index] for tensor in self.tensors())
        return DrawParams(temperature, top_p, min_p, top_k, seeds, positions, self.apart)
