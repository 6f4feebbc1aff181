"""Products and activations whose rows do not depend on how many there are, to the last bit: plain torch on the CPU.

What a library computes for a row may depend on the number of rows: it chooses its loops, its splits and its threads by
that. So products are given one shape only, and activations one row at a time: the end of a vectorised loop, and the
share of a thread, are computed by other instructions, which round otherwise.

T rows, F width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16
"""Rows of every product."""


def in_blocks(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute a product over `x` `[T, in]` for `ROWS` rows at a time, the last ones filled up with zeros.

    Args:
        x: Of any number of rows, none included.
        product: Maps `[ROWS, in]` to `[ROWS, out]`, each row by itself.
    """
    num, over = x.shape[0], -x.shape[0] % ROWS
    if num == 0:
        return product(x)
    padded = F.pad(x, (0, 0, 0, over)) if over else x.contiguous()
    blocks = [product(block) for block in torch.split(padded, ROWS)]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[:num]


def by_rows(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute a function of the elements of `x` `[T, F]` for each row by itself."""
    return (
        torch.cat([function(row) for row in torch.split(x.contiguous(), 1)]) if len(x) > 1 else function(x.contiguous())
    )


def at_once(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute a function of the elements of `x` `[T, F]` as any library does."""
    return function(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x Wᵀ + b` for `x` `[T, in]` and `weight` `[out, in]`."""
    return in_blocks(x, lambda rows: F.linear(rows, weight, bias))
