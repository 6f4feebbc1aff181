"""Checkpoints: what a file says of its tensors before one is read. Does not import torch."""

from __future__ import annotations

from itertools import takewhile
from math import prod
from pathlib import Path
from typing import NamedTuple


class TensorHeader(NamedTuple):
    """What a checkpoint's file says of one tensor before it is read."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors calls it: `BF16`, `F8_E4M3`, `I64`, `BOOL`."""
    is_made: bool = False
    """It is not in the file: a conversion makes it."""
    start: int = 0
    """Of its bytes in a safetensors file."""

    @property
    def num_bits(self) -> int:
        """Size of an item."""
        digits = "".join(takewhile(str.isdecimal, self.dtype.lstrip("BFIU")))
        return int(digits) if digits else 8

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return prod(self.shape) * self.num_bits // 8

    @property
    def is_floating_point(self) -> bool:
        """Whether its numbers have a fraction."""
        return self.dtype.startswith(("F", "BF"))
