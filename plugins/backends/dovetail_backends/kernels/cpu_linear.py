"""Products of plain matrices in bfloat16 on CPU: oneDNN's, over a layout of its own, twice as fast at few rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts.kernels import Ask, meaning
from dovetail.sdk.layers.ops import invariant

LONG_ROW = 1024
"""A row of more inputs is summed in parts."""


def make(ask: Ask) -> Any:
    """Return the operation `packed_linear` of plain matrices; torch's, where oneDNN has no such product here."""
    has_mkldnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return Repacked(ask.invariant) if has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported() else meaning(ask)


class Repacked:
    """The operation `packed_linear` over a matrix `[N, K]` bfloat16 in oneDNN's layout."""

    def __init__(self, batch_invariant: bool) -> None:
        self._is_invariant = batch_invariant

    def keeps(self, half: str = "") -> bool:
        """See `PackedKernel.keeps`."""
        return False

    def pack(self, tensors: Mapping[str, Tensor], half: str = "") -> Tensor:
        """See `PackedKernel.pack`; the op is the one that torch.compile emits on CPU."""
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(tensors["weight"].detach().contiguous())
        return packed

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x Wᵀ + b`."""
        if self._is_invariant:
            return invariant.in_blocks(x, lambda rows: product(rows, weight, bias))
        return product(x, weight, bias)


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x Wᵀ + b`, `[T, K]` to `[T, N]`, of a matrix in oneDNN's layout. A row's result does not depend on T.

    oneDNN sums a long lone row in another order. It is computed twice, which costs little: reading the weight is what
    takes time.
    """
    is_alone = x.shape[0] == 1 and x.shape[-1] > LONG_ROW
    rows = torch.cat((x, x)) if is_alone else x  # a third of what repeat takes
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return out[:1] if is_alone else out
