"""Products with packed weights, and experts, whose rows have the same bits however many there are.

As `fixed`: one tile, which follows from the weight alone, and one order of sums. What a tile does for one of its rows
depends neither on the others nor on its place among them. Rows of experts are always sorted: which tile a row is in
depends on the others, and tells nothing. Routers are put together of the kernels of their parts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dovetail.contracts.layers import Act, RMSScale
from dovetail_backends.kernels.triton import mixture
from dovetail_backends.kernels.triton.experts import SortedTiles
from dovetail_backends.kernels.triton.fixed import FEW, TILE_M
from dovetail_backends.kernels.triton.norms import rms_norm
from dovetail_backends.kernels.triton.packed import TritonNormedPacked, TritonPacked, few_tile
from dovetail_backends.kernels.triton.packed_experts import expert_tiles, packed_gated_experts
from dovetail_backends.kernels.triton.packed_few import few
from dovetail_backends.kernels.triton.packed_slots import PackedExpertWeights
from dovetail_backends.kernels.triton.packed_weight import PackedWeight

TILES = SortedTiles(TILE_M, (64, 64, 4, 4), (128, 64, 4, 4))
"""Of plain experts: those for 17 to 64 rows of one. Prompts read an expert once for every 64 of its rows."""
ROWS = 48
"""Rows of one packed expert whose tiles are taken for any number: the most that fit into a tile of 64."""


def linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, *, norm: RMSScale | None = None, act: Act | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `packed.linear`; every row has the bits that it has alone."""
    x = x if norm is None else rms_norm(x, norm.weight, norm.eps)
    x = x if x.stride(-1) == 1 else x.contiguous()
    if not len(x):
        return x.new_empty(0, weight.num_out // (1 if act is None else 2))
    tile = few_tile(weight, TILE_M, gate=act is not None, dtype=x.dtype)
    return few(x, weight, bias, tile, act=act, residual=residual, most_split=FEW)


def experts(*operands: Any, **options: Any) -> Tensor:
    """As `mixture.experts`; every row has the bits that it has alone."""
    return mixture.experts(*operands, **options, tiles=TILES)


def gated_experts(
    x: Tensor, ids: Tensor, shares: Tensor, weights: PackedExpertWeights, residual: Tensor | None
) -> Tensor:
    """As `packed_experts.packed_gated_experts`; every row has the bits that it has alone."""
    tiles = expert_tiles(weights, ROWS * len(weights.gate_up.numbers), x.dtype)
    return packed_gated_experts(x, ids, shares, weights, residual, tiles=tiles, is_few=False, is_written=False)


class FixedPacked(TritonPacked):
    """The operation `packed_linear`."""

    product = staticmethod(linear)


class FixedNormedPacked(TritonNormedPacked):
    """The operations `packed_norm_linear` and `packed_norm_gate`."""

    product = staticmethod(linear)


class FixedPackedExperts(mixture.TritonPackedExperts):
    """The operation `packed_experts`."""

    product = staticmethod(gated_experts)
