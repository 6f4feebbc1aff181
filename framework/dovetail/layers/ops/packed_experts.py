"""Experts with packed weights: as `experts` for plain ones, both for a few tokens and for more.

For a few tokens, each choice is multiplied by itself; for more, the choices are sorted by expert, so that each expert
is read once. One kernel does either, and either half of an expert.

T tokens, K experts chosen for each, S = T K choices ("slots"), E experts, H hidden size, I width between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.layers import Act
from dovetail.layers.ops.experts import combine, sorted_slots
from dovetail.layers.ops.packed_row import scaled_sum
from dovetail.layers.ops.packed_tiles import first_tile, walk
from dovetail.layers.ops.packed_weight import PackedWeight
from dovetail.layers.ops.pdl import interpreted, launch_options
from dovetail.layers.ops.silu import act_gated

MAX_SLOTS = 32
"""Choices of which each is multiplied by itself, although two may then read the same expert."""
Tile = tuple[int, int, int, int]
"""BLOCK_N, BLOCK_K, warps, stages."""


@dataclass(frozen=True, slots=True)
class PackedExpertWeights:
    """Matrices of this rank's experts, and what they do: see `experts.ExpertWeights`."""

    gate_up: PackedWeight
    down: PackedWeight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    first: int
    act: Act
    weigh_input: bool


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """BLOCK_M of both kernels, then the tile of each."""

    block_m: int
    gate_up: Tile
    down: Tile


@triton.jit
def _expert_rows(
    weights, x, order, shares, w, scale, offset, row_scale, bias, out, n, first, end,
    N: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    FORM: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, WEIGH: tl.constexpr, ROW_SCALE: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of rows `first` to `end` of one expert, whose matrix begins at `w`."""
    dtype: tl.constexpr = out.dtype.element_ty
    m = first + tl.arange(0, BLOCK_M)
    live = m < end
    slot = m
    if not SLOTS:
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


@triton.jit(do_not_specialize=["first_expert"])
def _expert_kernel(
    x, ids, order, ends, shares, w, scale, offset, row_scale, bias, out, first_expert,
    N: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    FORM: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, ACT: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, WEIGH: tl.constexpr, ROW_SCALE: tl.constexpr, ZERO: tl.constexpr,
    ASM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one slot (`SLOTS`) or of all rows of one expert: of its gated half, or of the other."""
    dtype: tl.constexpr = out.dtype.element_ty
    ALL: tl.constexpr = N * (1 + GATE)
    STEP: tl.constexpr = BLOCK_K if FORM == "scaled" else BLOCK_K // 8
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = 0, 0
    if SLOTS:
        # The gated half lets the other one start only once the choice is made: that can be read, and weights, before.
        if PDL:
            if GATE:
                gdc_wait()
            gdc_launch_dependents()
        begin = tl.program_id(1)
        expert = (tl.load(ids + begin) - first_expert).to(tl.int64)
        if (expert >= 0) & (expert < E):
            end = begin + 1
        expert = tl.minimum(tl.maximum(expert, 0), E - 1)
    else:
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        expert = tl.program_id(1).to(tl.int64)
        if expert > 0:
            begin = tl.load(ends + expert - 1)
        end = tl.load(ends + expert)
    w += expert * ALL * ROW
    scale += expert * ALL * GROUPS
    offset += expert * ALL * GROUPS
    row_scale += expert * ALL
    bias += expert * ALL
    if SLOTS:  # one row at most; the expert was made one of those here, so there is something to read
        weights = first_tile(w, scale, offset, n, 0, N, ROW, GROUP, GROUPS, FORM, STEP, GATE, ZERO, dtype)
        if PDL and not GATE:
            gdc_wait()
        if begin < end:
            _expert_rows(
                weights, x, order, shares, w, scale, offset, row_scale, bias, out, n, begin, end,
                N, K, ROW, GROUP, GROUPS, FORM, TOP_K, SLOTS, ACT, GATE, BIAS, WEIGH, ROW_SCALE, ZERO, ASM,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
    else:
        for first in tl.range(begin, end, BLOCK_M):
            weights = first_tile(w, scale, offset, n, 0, N, ROW, GROUP, GROUPS, FORM, STEP, GATE, ZERO, dtype)
            _expert_rows(
                weights, x, order, shares, w, scale, offset, row_scale, bias, out, n, first, end,
                N, K, ROW, GROUP, GROUPS, FORM, TOP_K, SLOTS, ACT, GATE, BIAS, WEIGH, ROW_SCALE, ZERO, ASM,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["first_expert"])
def _slot_kernel(
    x, ids, shares, w, scale, row_scale, bias, out, first_expert,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,
    ACT: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, WEIGH: tl.constexpr, ROW_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_expert_kernel` for one slot and numbers of 8 bits, without tensor cores: see `packed_row`."""
    dtype: tl.constexpr = out.dtype.element_ty
    ALL: tl.constexpr = N * (1 + GATE)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(1).to(tl.int64)
    expert = (tl.load(ids + slot) - first_expert).to(tl.int64)
    if (expert >= 0) & (expert < E):
        inside = n < N
        scale += expert * ALL * GROUPS
        rows = w + expert * ALL * K + n[:, None].to(tl.int64) * K
        row = x + (slot // TOP_K if GATE else slot) * K
        total = tl.zeros([BLOCK_N], tl.float32)
        up_total = tl.zeros([BLOCK_N], tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            at = start + k
            mask = inside[:, None] & (at[None, :] < K)
            weights = tl.load(rows + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            if GATE:
                ups = tl.load(rows + N * K + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            given = tl.load(row + at, mask=at < K, other=0.0).to(tl.float32)
            total += scaled_sum(weights, given, scale, n, start, N, K, GROUP, GROUPS, BLOCK_N, BLOCK_K)
            if GATE:
                up_total += scaled_sum(ups, given, scale, n + N, start, ALL, K, GROUP, GROUPS, BLOCK_N, BLOCK_K)
        if ROW_SCALE:
            total *= tl.load(row_scale + expert * ALL + n, mask=inside, other=0.0)
            if GATE:
                up_total *= tl.load(row_scale + expert * ALL + N + n, mask=inside, other=0.0)
        if WEIGH:
            share = tl.load(shares + slot).to(tl.float32)
            if GATE:
                total *= share
                up_total *= share
        if BIAS:
            total += tl.load(bias + expert * ALL + n, mask=inside, other=0.0).to(tl.float32)
            if GATE:
                up_total += tl.load(bias + expert * ALL + N + n, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            total = act_gated(total, up_total, ACT, dtype)
        elif WEIGH:
            total = total.to(dtype).to(tl.float32) * share
        tl.store(out + slot * N + n, total.to(dtype), mask=inside)


def expert_tiles(weights: PackedExpertWeights, num_slots: int) -> ExpertTiles:
    """Return tiles by how many rows an expert has if choices are even."""
    depth = 128 if weights.gate_up.kind == "scaled" else 256
    rows = num_slots // weights.gate_up.numbers.shape[0]
    if num_slots <= MAX_SLOTS or rows <= 12:
        return ExpertTiles(16, (64, depth, 4, 3), (64, depth, 4, 4))
    if rows <= 64:
        return ExpertTiles(32, (64, depth, 4, 3), (64, depth, 4, 3))
    return ExpertTiles(64, (64, depth, 4, 3), (64, depth, 4, 3))


def packed_gated_experts(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    weights: PackedExpertWeights,
    residual: Tensor | None,
    *,
    tiles: ExpertTiles | None = None,
    is_few: bool | None = None,
) -> Tensor:
    """As `experts.gated_experts`.

    Args:
        x: `[T, H]`, contiguous.
        ids: `[T, K]`, numbers among all ranks' experts; those that are not here add nothing.
        shares: `[T, K]`.
        weights: Of the experts here.
        residual: `[T, H]`, or None.
        tiles: From `expert_tiles` if not given; then choices that are not sorted multiply numbers of 8 bits in a kernel
            without tensor cores.
        is_few: Whether choices are not sorted; by their number if not given.
    """
    num_slots = ids.numel()
    if not num_slots:
        return torch.zeros_like(x) if residual is None else residual
    is_few = num_slots <= MAX_SLOTS if is_few is None else is_few
    tile = tiles or expert_tiles(weights, num_slots)
    num, h, i = weights.gate_up.numbers.shape[0], weights.gate_up.num_in, weights.down.num_in
    order, ends = (ids, ids) if is_few else sorted_slots(ids, num, weights.first)
    made, y = x.new_empty(num_slots, i), x.new_empty(num_slots, h)
    halves = (
        (x, made, weights.gate_up, weights.gate_up_bias, tile.gate_up, i),
        (made, y, weights.down, weights.down_bias, tile.down, h),
    )
    for given, out, weight, bias, (block_n, block_k, warps, stages), n in halves:
        is_gate = given is x
        if is_few and tiles is None and weight.kind == "scaled":
            _of_slots(given, ids, shares, weight, bias, out, weights, is_gate=is_gate)
            continue
        scales = (x if one is None else one for one in (weight.scale, weight.offset, weight.row_scale))
        _expert_kernel[(triton.cdiv(n, block_n), num_slots if is_few else num)](
            given, ids, order, ends, shares, weight.numbers, *scales, x if bias is None else bias, out, weights.first,
            N=n, K=weight.num_in, ROW=weight.numbers.shape[-1], GROUP=weight.group, GROUPS=weight.groups,
            FORM=weight.kind, E=num, TOP_K=ids.shape[1], SLOTS=is_few, ACT=weights.act, GATE=is_gate,
            BIAS=bias is not None, WEIGH=weights.weigh_input == is_gate, ROW_SCALE=weight.row_scale is not None,
            ZERO=weight.offset is not None, ASM=x.dtype == torch.bfloat16 and not interpreted(), BLOCK_M=tile.block_m,
            BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, num_warps=warps, **launch_options(x),
        )  # fmt: skip
    return combine(y, ids, residual, num, weights.first)


def _of_slots(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    out: Tensor,
    experts: PackedExpertWeights,
    *,
    is_gate: bool,
) -> None:
    """Fill `out` `[S, N]` with one half of each slot's expert, of numbers of 8 bits."""
    n, k = out.shape[1], weight.num_in
    block_k = min(2048, triton.next_power_of_2(k))
    block_n = 4 if block_k > 1024 or is_gate else 8
    scales = (x if one is None else one for one in (weight.scale, weight.row_scale))
    _slot_kernel[(triton.cdiv(n, block_n), ids.numel())](
        x, ids, shares, weight.numbers, *scales, x if bias is None else bias, out, experts.first,
        N=n, K=k, GROUP=weight.group, GROUPS=weight.groups, E=weight.numbers.shape[0], TOP_K=ids.shape[1],
        ACT=experts.act, GATE=is_gate, BIAS=bias is not None, WEIGH=experts.weigh_input == is_gate,
        ROW_SCALE=weight.row_scale is not None, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=1,
        **launch_options(x),
    )  # fmt: skip
