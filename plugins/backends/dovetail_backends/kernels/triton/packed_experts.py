"""Experts with packed weights: as `experts` for plain ones, both for a few tokens and for more.

For a few tokens, each choice is multiplied by itself, see `packed_slots`; for more, the choices are sorted by expert,
so that each expert is read once, by one kernel for either half of an expert; for many, experts are written out before.

T tokens, K experts chosen for each, S = T K choices ("slots"), E experts, H hidden size, I width between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.device import is_interpreted
from dovetail_backends.kernels.triton.experts import combine, sorted_down, sorted_gate_up, sorted_slots, sorted_tiles
from dovetail_backends.kernels.triton.packed_float8 import fits_float8, float8_half
from dovetail_backends.kernels.triton.packed_slots import (
    PackedExpertWeights,
    PackedSlotTiles,
    fits_slots,
    most_slots,
    of_slots,
    slot_tiles,
)
from dovetail_backends.kernels.triton.packed_tiles import first_tile, walk
from dovetail_backends.kernels.triton.packed_weight import as_one
from dovetail_backends.kernels.triton.packed_write import written
from dovetail_backends.kernels.triton.pdl import launch_options
from dovetail_backends.kernels.triton.silu import act_gated

WRITTEN_ROWS = 1024
"""Choices for each expert, if they are even, from which experts are written out. By arithmetic, not measured: kernels
for plain weights then run at the speed at which their tiles come from the second-level cache, 42 % of what the tensor
cores of an H200 do, and packed tiles are smaller."""
WRITTEN_BYTES = 256 << 20
"""Of experts that are written out at a time, at least one."""
Tile = tuple[int, int, int, int]
"""BLOCK_N, BLOCK_K, warps, stages."""


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """BLOCK_M of both kernels, then the tile of each; and whether they are those of `packed_float8`."""

    block_m: int
    gate_up: Tile
    down: Tile
    is_float8: bool = False


FLOAT8_TILES: tuple[tuple[Tile, Tile], tuple[Tile, Tile]] = (
    ((128, 128, 8, 4), (128, 128, 8, 4)),
    ((128, 128, 4, 3), (128, 128, 4, 4)),
)
"""Of both halves in float8: with up to four rows an expert, and with more. Measured on an H200 with gpt-oss-20b's."""


@triton.jit
def _expert_rows(
    weights, x, order, shares, w, scale, offset, row_scale, bias, out, n, first, end,
    N: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    FORM: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, WEIGH: tl.constexpr, ROW_SCALE: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of rows `first` to `end` of one expert, whose matrix begins at `w`."""
    dtype: tl.constexpr = out.dtype.element_ty
    m = first + tl.arange(0, BLOCK_M)
    live = m < end
    slot = tl.load(order + m, mask=live, other=0)
    given = slot // TOP_K if GATE else m
    rows = x + given.to(tl.int64) * K
    total, up_total, _ = walk(
        weights, w, scale, offset, rows, live, x, n, 0, ROW,
        N, K, ROW, GROUP, GROUPS, FORM, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, False, GATE, ZERO, ASM,
    )  # fmt: skip
    inside = n < N
    if ROW_SCALE:
        total *= tl.load(row_scale + n, mask=inside, other=0.0)[:, None]
        if GATE:
            up_total *= tl.load(row_scale + N + n, mask=inside, other=0.0)[:, None]
    if WEIGH:
        share = tl.load(shares + slot, mask=live, other=0.0).to(tl.float32)[None, :]
        if GATE:
            total *= share
            up_total *= share
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATE:
            up_total += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATE:
        total = act_gated(total, up_total, ACT, dtype)
    elif WEIGH:
        total = total.to(dtype).to(tl.float32) * share
    place = m if GATE else slot
    at = out + place[None, :].to(tl.int64) * N + n[:, None]
    tl.store(at, total.to(dtype), mask=live[None, :] & inside[:, None])


@triton.jit
def _expert_kernel(
    x, order, bounds, shares, w, scale, offset, row_scale, bias, out,
    N: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    FORM: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    WEIGH: tl.constexpr, ROW_SCALE: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of all rows of one expert: of its gated half, or of the other."""
    dtype: tl.constexpr = out.dtype.element_ty
    ALL: tl.constexpr = N * (1 + GATE)
    STEP: tl.constexpr = BLOCK_K if FORM == "scaled" else BLOCK_K // 8
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(1).to(tl.int64)
    begin, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    w += expert * ALL * ROW
    scale += expert * ALL * GROUPS
    offset += expert * ALL * GROUPS
    row_scale += expert * ALL
    bias += expert * ALL
    for first in tl.range(begin, end, BLOCK_M):
        weights = first_tile(w, scale, offset, n, 0, N, ROW, GROUP, GROUPS, FORM, STEP, GATE, ZERO, dtype)
        _expert_rows(
            weights, x, order, shares, w, scale, offset, row_scale, bias, out, n, first, end,
            N, K, ROW, GROUP, GROUPS, FORM, TOP_K, ACT, GATE, BIAS, WEIGH, ROW_SCALE, ZERO, ASM,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip


def expert_tiles(weights: PackedExpertWeights, num_slots: int, dtype: torch.dtype = torch.bfloat16) -> ExpertTiles:
    """Return tiles by how many rows an expert has if choices are even: as a rule, all of them are in one tile.

    Every tile of rows reads and unpacks its expert again. By arithmetic and what compiled kernels
    consist of (`tests/benchmarks/quant_compiled.py`), not measured but for the first.
    """
    if dtype == torch.float32:  # which no tensor core multiplies: what matters is that it fits into shared memory
        return ExpertTiles(16, (64, 64, 4, 2), (64, 64, 4, 2))
    depth = 64 if weights.gate_up.kind == "scaled" else 128
    # Where groups divide no tile, it has a scale for each of its numbers, which takes four times their memory.
    is_large = any(each.kind == "scaled" and each.group & (each.group - 1) for each in (weights.gate_up, weights.down))
    rows = num_slots // weights.gate_up.numbers.shape[0]
    if rows <= 12:
        if dtype == torch.bfloat16 and fits_float8(weights.gate_up) and fits_float8(weights.down):
            gate_up, down = FLOAT8_TILES[rows > 4]
            return ExpertTiles(16, gate_up, down, is_float8=True)
        return ExpertTiles(16, (64, depth, 4, 4), (64, depth, 4, 4))
    if rows <= 24:
        return ExpertTiles(32, (64, depth, 4, 4), (64, depth, 4, 4))
    if rows <= 48:
        return ExpertTiles(64, (64, depth, 4, 3), (64, depth, 4, 4))
    return ExpertTiles(128, (128, depth, 8, 2 if is_large else 3), (128, depth, 8, 2 if is_large else 4))


def packed_gated_experts(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    weights: PackedExpertWeights,
    residual: Tensor | None,
    *,
    tiles: ExpertTiles | PackedSlotTiles | None = None,
    is_few: bool | None = None,
    is_written: bool | None = None,
) -> Tensor:
    """As `experts.gated_experts`.

    Args:
        x: `[T, H]`, contiguous.
        ids: `[T, K]`, numbers among all ranks' experts; those that are not here add nothing.
        shares: `[T, K]`.
        weights: Of the experts here.
        residual: `[T, H]`, or None.
        tiles: `PackedSlotTiles` are for choices that are not sorted, `ExpertTiles` for those that are; measured ones if
            not given.
        is_few: Whether choices are not sorted, which not all weights and dtypes have kernels for; by their number if
            not given.
        is_written: Whether experts are dequantized first. Default: by the number of choices.
    """
    num_slots = ids.numel()
    if not num_slots:
        return torch.zeros_like(x) if residual is None else residual
    if is_few is None:
        is_few = isinstance(tiles, PackedSlotTiles) or (
            not isinstance(tiles, ExpertTiles) and num_slots <= most_slots(weights) and fits_slots(weights, x.dtype)
        )
    if is_few:
        if isinstance(tiles, ExpertTiles) or not fits_slots(weights, x.dtype):
            raise ValueError("choices of these weights, dtype or tiles are sorted")
        return of_slots(x, ids, shares, weights, residual, tiles or slot_tiles(weights, num_slots))
    if isinstance(tiles, PackedSlotTiles):
        raise ValueError("tiles of slots are for choices that are not sorted")
    if num_slots >= WRITTEN_ROWS * len(weights.gate_up.numbers) if is_written is None else is_written:
        return _written_out(x, ids, shares, weights, residual)
    tile = tiles or expert_tiles(weights, num_slots, x.dtype)
    if tile.is_float8 and not (fits_float8(weights.gate_up) and fits_float8(weights.down)):
        raise ValueError("tiles of float8 are for e2m1 whose scales are near each other")
    num, h, i = weights.gate_up.numbers.shape[0], weights.gate_up.num_in, weights.down.num_in
    order, bounds = sorted_slots(ids, num, weights.first)
    made, y = x.new_empty(num_slots, i), x.new_empty(num_slots, h)
    halves = (
        (x, made, weights.gate_up, weights.gate_up_bias, tile.gate_up, i),
        (made, y, weights.down, weights.down_bias, tile.down, h),
    )
    for given, out, weight, bias, (block_n, block_k, warps, stages), n in halves:
        is_gate = given is x
        if tile.is_float8:
            float8_half(
                given, order, bounds, shares, weight, bias, out, tile.block_m, (block_n, block_k, warps, stages),
                act=weights.act, top_k=ids.shape[1], gate=is_gate, weigh=weights.weigh_input == is_gate,
            )  # fmt: skip
            continue
        scales = (x if one is None else one for one in (weight.scale, weight.offset, weight.row_scale))
        _expert_kernel[(triton.cdiv(n, block_n), num)](
            given, order, bounds, shares, weight.numbers, *scales, x if bias is None else bias, out,
            N=n, K=weight.num_in, ROW=weight.numbers.shape[-1], GROUP=weight.group, GROUPS=weight.groups,
            FORM=weight.kind, TOP_K=ids.shape[1], ACT=weights.act, GATE=is_gate,
            BIAS=bias is not None, WEIGH=weights.weigh_input == is_gate, ROW_SCALE=weight.row_scale is not None,
            ZERO=weight.offset is not None, ASM=x.dtype == torch.bfloat16 and not is_interpreted(),
            BLOCK_M=tile.block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, num_warps=warps, **launch_options(x),
        )  # fmt: skip
    return combine(y, ids, residual, num, weights.first)


def _written_out(
    x: Tensor, ids: Tensor, shares: Tensor, weights: PackedExpertWeights, residual: Tensor | None
) -> Tensor:
    """As `packed_gated_experts` for many tokens: some experts at a time are written out, and multiplied as plain."""
    num, h, i = len(weights.gate_up.numbers), weights.gate_up.num_in, weights.down.num_in
    num_slots = ids.numel()
    order, bounds = sorted_slots(ids, num, weights.first)
    made, y = x.new_empty(num_slots, i), x.new_empty(num_slots, h)
    tiles = sorted_tiles(num, num_slots)
    for weight, bias in ((weights.gate_up, weights.gate_up_bias), (weights.down, weights.down_bias)):
        n, k = weight.num_out, weight.num_in
        step, whole = max(1, WRITTEN_BYTES // (n * k * x.element_size())), as_one(weight)
        for first in range(0, num, step):
            here = slice(first, min(first + step, num))
            plain = written(whole, x.dtype, first * n, (here.stop - first) * n).view(-1, n, k)
            some = None if bias is None else bias[here]
            if weight is weights.gate_up:
                sorted_gate_up(
                    x, order, bounds[first:], shares, plain, some, made, tiles,
                    act=weights.act, weigh_input=weights.weigh_input,
                )  # fmt: skip
            else:
                sorted_down(made, order, bounds[first:], shares, plain, some, y, tiles, weigh_input=weights.weigh_input)
    return combine(y, ids, residual, num, weights.first)
