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
from dovetail.layers.ops.experts import combine, sorted_down, sorted_gate_up, sorted_slots, sorted_tiles
from dovetail.layers.ops.packed_row import RowTile, scaled_sum
from dovetail.layers.ops.packed_tiles import first_tile, walk
from dovetail.layers.ops.packed_weight import PackedWeight, as_one
from dovetail.layers.ops.packed_write import written
from dovetail.layers.ops.pdl import interpreted, launch_options
from dovetail.layers.ops.silu import act_gated

MAX_SLOTS, MAX_BYTE_SLOTS = 32, 64
"""Choices of which each is multiplied by itself, although two may then read the same expert; more of 8-bit numbers."""
WRITTEN_ROWS = 1024
"""Choices for each expert, if they are even, from which experts are written out. By arithmetic, not measured: kernels
for plain weights then run at the speed at which their tiles come from the second-level cache, 42 % of what the tensor
cores of an H200 do, and packed tiles are smaller."""
WRITTEN_BYTES = 256 << 20
"""Of experts that are written out at a time, at least one."""
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
    x, ids, order, bounds, shares, w, scale, offset, row_scale, bias, out, first_expert,
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
        begin, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
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
    ACT: tl.constexpr, BIAS: tl.constexpr, WEIGH: tl.constexpr, ROW_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of the gated half of one slot, of numbers of 8 bits, without tensor cores: see `packed_row`."""
    dtype: tl.constexpr = out.dtype.element_ty
    ALL: tl.constexpr = 2 * N
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
        row = x + slot // TOP_K * K
        total = tl.zeros([BLOCK_N], tl.float32)
        up_total = tl.zeros([BLOCK_N], tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            at = start + k
            mask = inside[:, None] & (at[None, :] < K)
            weights = tl.load(rows + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            ups = tl.load(rows + N * K + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            given = tl.load(row + at, mask=at < K, other=0.0).to(tl.float32)
            total += scaled_sum(weights, given[None, :], scale, n, start, N, K, GROUP, GROUPS, BLOCK_N, BLOCK_K)
            up_total += scaled_sum(ups, given[None, :], scale, n + N, start, ALL, K, GROUP, GROUPS, BLOCK_N, BLOCK_K)
        if ROW_SCALE:
            total *= tl.load(row_scale + expert * ALL + n, mask=inside, other=0.0)
            up_total *= tl.load(row_scale + expert * ALL + N + n, mask=inside, other=0.0)
        if WEIGH:
            share = tl.load(shares + slot).to(tl.float32)
            total *= share
            up_total *= share
        if BIAS:
            total += tl.load(bias + expert * ALL + n, mask=inside, other=0.0).to(tl.float32)
            up_total += tl.load(bias + expert * ALL + N + n, mask=inside, other=0.0).to(tl.float32)
        total = act_gated(total, up_total, ACT, dtype)
        tl.store(out + slot * N + n, total.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["first_expert"])
def _slots_down_kernel(
    h, ids, shares, w, scale, row_scale, bias, residual, out, first_expert,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,
    BIAS: tl.constexpr, WEIGH_INPUT: tl.constexpr, RESIDUAL: tl.constexpr, ROW_SCALE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one token: what its experts make of `h` `[S, I]`, weighed and added up; numbers of 8 bits.

    A tile has a row for each choice and output, choices first.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(1).to(tl.int64)
    place, k = tl.arange(0, BLOCK_C * BLOCK_N), tl.arange(0, BLOCK_K)
    choice, n = place // BLOCK_N, tl.program_id(0) * BLOCK_N + place % BLOCK_N
    if PDL:
        gdc_launch_dependents()
    # The kernel before lets this one start only once the choice is made: it and weights can be read ahead of that one.
    slot = token * TOP_K + choice
    expert = (tl.load(ids + slot, mask=choice < TOP_K, other=-1) - first_expert).to(tl.int64)
    live = (choice < TOP_K) & (expert >= 0) & (expert < E) & (n < N)
    of_all = tl.where(live, expert * N + n, E * N)
    rows = w + of_all[:, None] * K
    share = tl.load(shares + slot, mask=live, other=0.0).to(tl.float32)
    mask = live[:, None] & (k[None, :] < K)
    weights = tl.load(rows + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    inputs = h + slot[:, None] * K
    given = tl.load(inputs + k[None, :], mask=mask, other=0.0).to(tl.float32)
    value = scaled_sum(weights, given, scale, of_all, 0, E * N, K, GROUP, GROUPS, BLOCK_C * BLOCK_N, BLOCK_K)
    for start in tl.range(BLOCK_K, K, BLOCK_K):
        at = start + k
        mask = live[:, None] & (at[None, :] < K)
        weights = tl.load(rows + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        given = tl.load(inputs + at[None, :], mask=mask, other=0.0).to(tl.float32)
        value += scaled_sum(weights, given, scale, of_all, start, E * N, K, GROUP, GROUPS, BLOCK_C * BLOCK_N, BLOCK_K)
    if ROW_SCALE:
        value *= tl.load(row_scale + of_all, mask=live, other=0.0)
    if BIAS:
        value += tl.load(bias + of_all, mask=live, other=0.0).to(tl.float32)
    value = value.to(dtype).to(tl.float32)
    if not WEIGH_INPUT:
        value = (value * share).to(dtype).to(tl.float32)
    total = tl.sum(tl.reshape(tl.where(live, value, 0.0), [BLOCK_C, BLOCK_N]), 0)
    at_out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if RESIDUAL:
        added = tl.load(residual + token * N + at_out, mask=at_out < N, other=0.0).to(tl.float32)
        total = total.to(dtype).to(tl.float32) + added
    tl.store(out + token * N + at_out, total.to(dtype), mask=at_out < N)


@dataclass(frozen=True, slots=True)
class SlotTiles:
    """Tiles of the two kernels without tensor cores."""

    gate_up: RowTile
    down: RowTile


def slot_tiles(weights: PackedExpertWeights, num_slots: int) -> SlotTiles:
    """Return tiles measured on an H200 with 8 and with 64 choices; a short row takes no more than itself."""
    h, i = weights.gate_up.num_in, weights.down.num_in
    down = (
        (4, min(256, triton.next_power_of_2(i)), 8)
        if num_slots <= MAX_SLOTS
        else (2, min(256, triton.next_power_of_2(i)), 4)
    )
    return SlotTiles((4, min(2048, triton.next_power_of_2(h)), 4), down)


def expert_tiles(weights: PackedExpertWeights, num_slots: int) -> ExpertTiles:
    """Return tiles by how many rows an expert has if choices are even: as a rule, all of them are in one tile.

    Every tile of rows reads an expert, and takes its numbers apart, once more. By arithmetic and what compiled kernels
    consist of (`tests/bench/quant_compiled.py`), not measured but for the first.
    """
    depth = 64 if weights.gate_up.kind == "scaled" else 128
    rows = num_slots // weights.gate_up.numbers.shape[0]
    if num_slots <= MAX_SLOTS or rows <= 12:
        return ExpertTiles(16, (64, depth, 4, 4), (64, depth, 4, 4))
    if rows <= 24:
        return ExpertTiles(32, (64, depth, 4, 4), (64, depth, 4, 4))
    if rows <= 48:
        return ExpertTiles(64, (64, depth, 4, 3), (64, depth, 4, 4))
    return ExpertTiles(128, (128, depth, 8, 3), (128, depth, 8, 4))


def packed_gated_experts(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    weights: PackedExpertWeights,
    residual: Tensor | None,
    *,
    tiles: ExpertTiles | SlotTiles | None = None,
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
        tiles: `SlotTiles` are of kernels without tensor cores, for choices that are not sorted and numbers of 8 bits;
            those get them if none are given, others what `expert_tiles` says.
        is_few: Whether choices are not sorted; by their number if not given.
        is_written: Whether experts are written out before; by the number of choices if not given.
    """
    num_slots = ids.numel()
    if not num_slots:
        return torch.zeros_like(x) if residual is None else residual
    if is_few is None:
        # 32 choices of 32 experts in mxfp4: 202 µs a layer of gpt-oss-20b on an H200, 140 when they are sorted
        is_few = num_slots <= (
            MAX_BYTE_SLOTS if _are_bytes(weights) else min(MAX_SLOTS, len(weights.gate_up.numbers) // 2)
        )
    if is_few and (isinstance(tiles, SlotTiles) or (tiles is None and _are_bytes(weights))):
        return _of_slots(x, ids, shares, weights, residual, tiles or slot_tiles(weights, num_slots))
    if isinstance(tiles, SlotTiles):
        raise ValueError("tiles of slots are for choices that are not sorted")
    if num_slots >= WRITTEN_ROWS * len(weights.gate_up.numbers) if is_written is None else is_written:
        return _written_out(x, ids, shares, weights, residual)
    tile = tiles or expert_tiles(weights, num_slots)
    num, h, i = weights.gate_up.numbers.shape[0], weights.gate_up.num_in, weights.down.num_in
    order, bounds = (ids, ids) if is_few else sorted_slots(ids, num, weights.first)
    made, y = x.new_empty(num_slots, i), x.new_empty(num_slots, h)
    halves = (
        (x, made, weights.gate_up, weights.gate_up_bias, tile.gate_up, i),
        (made, y, weights.down, weights.down_bias, tile.down, h),
    )
    for given, out, weight, bias, (block_n, block_k, warps, stages), n in halves:
        is_gate = given is x
        scales = (x if one is None else one for one in (weight.scale, weight.offset, weight.row_scale))
        _expert_kernel[(triton.cdiv(n, block_n), num_slots if is_few else num)](
            given, ids, order, bounds, shares, weight.numbers, *scales, x if bias is None else bias, out, weights.first,
            N=n, K=weight.num_in, ROW=weight.numbers.shape[-1], GROUP=weight.group, GROUPS=weight.groups,
            FORM=weight.kind, E=num, TOP_K=ids.shape[1], SLOTS=is_few, ACT=weights.act, GATE=is_gate,
            BIAS=bias is not None, WEIGH=weights.weigh_input == is_gate, ROW_SCALE=weight.row_scale is not None,
            ZERO=weight.offset is not None, ASM=x.dtype == torch.bfloat16 and not interpreted(), BLOCK_M=tile.block_m,
            BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, num_warps=warps, **launch_options(x),
        )  # fmt: skip
    return combine(y, ids, residual, num, weights.first)


def _are_bytes(weights: PackedExpertWeights) -> bool:
    """Whether both matrices have numbers of 8 bits."""
    return weights.gate_up.kind == "scaled" and weights.down.kind == "scaled"


def _of_slots(
    x: Tensor, ids: Tensor, shares: Tensor, weights: PackedExpertWeights, residual: Tensor | None, tiles: SlotTiles
) -> Tensor:
    """As `packed_gated_experts` for a few tokens and numbers of 8 bits."""
    num, h, i, top_k = len(weights.gate_up.numbers), weights.gate_up.num_in, weights.down.num_in, ids.shape[1]
    made, out = x.new_empty(ids.numel(), i), torch.empty_like(x)
    weight, bias = weights.gate_up, weights.gate_up_bias
    block_n, block_k, warps = tiles.gate_up
    scales = (x if one is None else one for one in (weight.scale, weight.row_scale))
    _slot_kernel[(triton.cdiv(i, block_n), ids.numel())](
        x, ids, shares, weight.numbers, *scales, x if bias is None else bias, made, weights.first,
        N=i, K=h, GROUP=weight.group, GROUPS=weight.groups, E=num, TOP_K=top_k, ACT=weights.act, BIAS=bias is not None,
        WEIGH=weights.weigh_input, ROW_SCALE=weight.row_scale is not None, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=1, **launch_options(x),
    )  # fmt: skip
    weight, bias = weights.down, weights.down_bias
    block_n, block_k, warps = tiles.down
    scales = (x if one is None else one for one in (weight.scale, weight.row_scale))
    _slots_down_kernel[(triton.cdiv(h, block_n), len(x))](
        made, ids, shares, weight.numbers, *scales, x if bias is None else bias, x if residual is None else residual,
        out, weights.first, N=h, K=i, GROUP=weight.group, GROUPS=weight.groups, E=num, TOP_K=top_k,
        BIAS=bias is not None, WEIGH_INPUT=weights.weigh_input, RESIDUAL=residual is not None,
        ROW_SCALE=weight.row_scale is not None, BLOCK_C=triton.next_power_of_2(top_k), BLOCK_N=block_n,
        BLOCK_K=block_k, num_warps=warps, **launch_options(x),
    )  # fmt: skip
    return out


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
