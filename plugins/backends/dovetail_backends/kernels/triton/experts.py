"""Experts in Triton: for a few tokens a program for each choice, for more the choices sorted by expert.

T tokens, K experts chosen for each, S = T K choices ("slots"), E experts, H hidden size, I width between. Which experts
are read is decided on the device; nothing here waits for it. `layers.experts` has the reference in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.layers import Act
from dovetail_backends.kernels.triton.pdl import launch_options
from dovetail_backends.kernels.triton.silu import act_gated

MAX_SLOTS = 64
"""Choices for which each gets programs of its own, although two may then read the same expert."""
SORT_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Matrices of this rank's experts, and what they do.

    Attributes:
        gate_up: `[E, 2 I, H]`.
        down: `[E, H, I]`.
        gate_up_bias: `[E, 2 I]`, or None.
        down_bias: `[E, H]`, or None.
        first: Number of the first one.
        act: Of the gate.
        weigh_input: Whether shares multiply an expert's input instead of its output.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    first: int
    act: Act
    weigh_input: bool


@triton.jit
def _slot_gate_up_kernel(
    x, ids, shares, w, bias, out, first,
    H: tl.constexpr, INNER: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    WEIGH_INPUT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of the gated half of one slot's expert, `out` [S, I]."""
    slot = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # not before: see `_slot_down_kernel`
    expert = tl.load(ids + slot) - first
    if (expert >= 0) & (expert < E):
        gates = w + expert * (2 * INNER * H) + n[:, None].to(tl.int64) * H
        row = x + slot // TOP_K * H
        gate = tl.zeros([BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_N], tl.float32)
        for start in tl.range(0, H, BLOCK_K):
            at = start + k
            mask = (n[:, None] < INNER) & (at[None, :] < H)
            inputs = tl.load(row + at, mask=at < H, other=0.0).to(tl.float32)[None, :]
            gate_w = tl.load(gates + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            up_w = tl.load(gates + INNER * H + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            gate += tl.sum(gate_w.to(tl.float32) * inputs, 1)
            up += tl.sum(up_w.to(tl.float32) * inputs, 1)
        if WEIGH_INPUT:
            share = tl.load(shares + slot).to(tl.float32)
            gate *= share
            up *= share
        if BIAS:
            gate += tl.load(bias + expert * 2 * INNER + n, mask=n < INNER, other=0.0).to(tl.float32)
            up += tl.load(bias + expert * 2 * INNER + INNER + n, mask=n < INNER, other=0.0).to(tl.float32)
        value = act_gated(gate, up, ACT, out.dtype.element_ty)
        tl.store(out + slot * INNER + n, value.to(out.dtype.element_ty), mask=n < INNER)


@triton.jit
def _slot_down_kernel(
    h, ids, shares, w, bias, residual, out, first,
    H: tl.constexpr, INNER: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, BIAS: tl.constexpr,
    WEIGH_INPUT: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one token: what its experts make of `h` [S, I], weighed and added up."""
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    choice = tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    dtype: tl.constexpr = out.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
    # The kernel before lets this one start only once the choice is made: it and weights can be read ahead of that one.
    slot = token * TOP_K + choice
    expert = tl.load(ids + slot, mask=choice < TOP_K, other=-1) - first
    is_here = (choice < TOP_K) & (expert >= 0) & (expert < E)
    share = tl.load(shares + slot, mask=is_here, other=0.0).to(tl.float32)[:, None]
    rows = w + expert[:, None, None] * (H * INNER) + n[None, :, None].to(tl.int64) * INNER
    mask = is_here[:, None, None] & (n[None, :, None] < H)
    weights = tl.load(
        rows + k[None, None, :], mask=mask & (k[None, None, :] < INNER), other=0.0, eviction_policy="evict_first"
    )
    if PDL:
        gdc_wait()
    inputs = h + slot[:, None] * INNER
    given = tl.load(inputs + k[None, :], mask=is_here[:, None] & (k[None, :] < INNER), other=0.0).to(tl.float32)
    value = tl.sum(weights.to(tl.float32) * given[:, None, :], 2)
    for start in tl.range(BLOCK_K, INNER, BLOCK_K):
        at = start + k
        inside = at < INNER
        weights = tl.load(
            rows + at[None, None, :], mask=mask & inside[None, None, :], other=0.0, eviction_policy="evict_first"
        )
        given = tl.load(inputs + at[None, :], mask=is_here[:, None] & inside[None, :], other=0.0).to(tl.float32)
        value += tl.sum(weights.to(tl.float32) * given[:, None, :], 2)
    if BIAS:
        of_row = bias + expert[:, None] * H + n[None, :]
        value += tl.load(of_row, mask=is_here[:, None] & (n < H)[None, :], other=0.0).to(tl.float32)
    value = value.to(dtype).to(tl.float32)
    if not WEIGH_INPUT:
        value = (value * share).to(dtype).to(tl.float32)
    total = tl.sum(tl.where(is_here[:, None], value, 0.0), 0)
    if RESIDUAL:
        total = total.to(dtype).to(tl.float32) + tl.load(residual + token * H + n, mask=n < H, other=0.0).to(tl.float32)
    tl.store(out + token * H + n, total.to(dtype), mask=n < H)


@triton.jit(do_not_specialize=["num_slots", "first"])
def _sort_kernel(ids, order, bounds, num_slots, first, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One expert's slots, in their order, behind those of the experts before it."""
    expert = tl.program_id(0) + first
    lane = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    before = 0
    for start in tl.range(0, num_slots, BLOCK):
        at = start + lane
        chosen = tl.load(ids + at, mask=at < num_slots, other=-1)
        before += tl.sum(((chosen >= first) & (chosen < expert)).to(tl.int32), 0)
    for start in tl.range(0, num_slots, BLOCK):
        at = start + lane
        mine = (tl.load(ids + at, mask=at < num_slots, other=-1) == expert).to(tl.int32)
        tl.store(order + before + tl.cumsum(mine, 0) - 1, at, mask=mine != 0)
        before += tl.sum(mine, 0)
    tl.store(bounds + tl.program_id(0) + 1, before)
    if tl.program_id(0) == 0:
        tl.store(bounds, 0)


@triton.jit
def _sorted_gate_up_kernel(
    x, order, bounds, shares, w, bias, out,
    H: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    WEIGH_INPUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of the gated half of all rows of one expert, `out` [S, I] in sorted order."""
    expert = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    begin, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    gates = w + expert * (2 * INNER * H) + n[None, :].to(tl.int64) * H
    for first in tl.range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        slot = tl.load(order + m, mask=m < end, other=0)
        rows = x + (slot // TOP_K).to(tl.int64)[:, None] * H
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, H, BLOCK_K):
            at = start + k
            mask = (at[:, None] < H) & (n[None, :] < INNER)
            inputs = tl.load(rows + at[None, :], mask=(m[:, None] < end) & (at[None, :] < H), other=0.0)
            gate_w = tl.load(gates + at[:, None], mask=mask, other=0.0)
            up_w = tl.load(gates + INNER * H + at[:, None], mask=mask, other=0.0)
            gate = tl.dot(inputs, gate_w, gate, input_precision="ieee")
            up = tl.dot(inputs, up_w, up, input_precision="ieee")
        if WEIGH_INPUT:
            share = tl.load(shares + slot, mask=m < end, other=0.0).to(tl.float32)[:, None]
            gate *= share
            up *= share
        if BIAS:
            gate += tl.load(bias + expert * 2 * INNER + n, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + expert * 2 * INNER + INNER + n, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
        value = act_gated(gate, up, ACT, out.dtype.element_ty)
        at = out + m[:, None].to(tl.int64) * INNER + n[None, :]
        tl.store(at, value.to(out.dtype.element_ty), mask=(m[:, None] < end) & (n[None, :] < INNER))


@triton.jit
def _sorted_down_kernel(
    h, order, bounds, shares, w, bias, out,
    H: tl.constexpr, INNER: tl.constexpr, BIAS: tl.constexpr, WEIGH_INPUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of all rows of one expert, weighed, `out` [S, H] in the slots' order."""
    expert = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    dtype: tl.constexpr = out.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    begin, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    columns = w + expert * (H * INNER) + n[None, :].to(tl.int64) * INNER
    for first in tl.range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        slot = tl.load(order + m, mask=m < end, other=0)
        value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, INNER, BLOCK_K):
            at = start + k
            inputs = tl.load(
                h + m[:, None].to(tl.int64) * INNER + at[None, :],
                mask=(m[:, None] < end) & (at[None, :] < INNER),
                other=0.0,
            )
            weights = tl.load(columns + at[:, None], mask=(at[:, None] < INNER) & (n[None, :] < H), other=0.0)
            value = tl.dot(inputs, weights, value, input_precision="ieee")
        if BIAS:
            value += tl.load(bias + expert * H + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
        value = value.to(dtype)
        if not WEIGH_INPUT:
            share = tl.load(shares + slot, mask=m < end, other=0.0).to(tl.float32)[:, None]
            value = (value.to(tl.float32) * share).to(dtype)
        at = out + slot[:, None].to(tl.int64) * H + n[None, :]
        tl.store(at, value, mask=(m[:, None] < end) & (n[None, :] < H))


@triton.jit
def _combine_kernel(
    y, ids, residual, out, first,
    H: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sum of a token's slots in their order, of those whose experts are here."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = token * TOP_K + choice
        expert = tl.load(ids + slot) - first
        if (expert >= 0) & (expert < E):
            total += tl.load(y + slot * H + n, mask=n < H, other=0.0).to(tl.float32)
    if RESIDUAL:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(residual + token * H + n, mask=n < H, other=0.0).to(tl.float32)
    tl.store(out + token * H + n, total.to(out.dtype.element_ty), mask=n < H)


@dataclass(frozen=True, slots=True)
class SlotTiles:
    """BLOCK_N, BLOCK_K and warps of the two kernels for few tokens."""

    gate_up: tuple[int, int, int]
    down: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class SortedTiles:
    """BLOCK_M of both kernels for more tokens, then of each BLOCK_N, BLOCK_K, warps, stages."""

    block_m: int
    gate_up: tuple[int, int, int, int]
    down: tuple[int, int, int, int]


def slot_tiles(weights: ExpertWeights) -> SlotTiles:
    """Return tiles by measurement on an H200; a short row takes no more than itself."""
    h, i = weights.gate_up.shape[2], weights.down.shape[2]
    return SlotTiles((4, min(1024, triton.next_power_of_2(h)), 2), (2, min(256, triton.next_power_of_2(i)), 8))


def sorted_tiles(num: int, num_slots: int) -> SortedTiles:
    """Return tiles by how many rows an expert, of `num`, has if choices are even."""
    rows = num_slots // num
    if rows <= 16:
        return SortedTiles(16, (32, 256, 4, 3), (128, 128, 4, 3))
    if rows <= 64:
        return SortedTiles(64, (64, 64, 4, 4), (128, 64, 4, 4))
    return SortedTiles(128, (64, 64, 8, 4), (128, 64, 8, 4))


def sorted_slots(ids: Tensor, num: int, first: int) -> tuple[Tensor, Tensor]:
    """Return the slots `[S]` of `num` experts from `first` on, by expert, and where those of each begin `[num + 1]`."""
    num_slots = ids.numel()
    order, bounds = (ids.new_empty(size, dtype=torch.int32) for size in (num_slots, num + 1))
    block = min(SORT_BLOCK, triton.next_power_of_2(num_slots))
    _sort_kernel[(num,)](ids, order, bounds, num_slots, first, BLOCK=block, num_warps=4, **launch_options(ids))
    return order, bounds


def few(x: Tensor, ids: Tensor, shares: Tensor, weights: ExpertWeights, residual: Tensor | None,
        tiles: SlotTiles | None = None) -> Tensor:  # fmt: skip
    """As `gated_experts`, for a few tokens: choices are not sorted."""
    (num_tokens, h), top_k = x.shape, ids.shape[1]
    num, _, i = weights.down.shape
    tiles = tiles or slot_tiles(weights)
    made = x.new_empty(num_tokens * top_k, i)
    options = launch_options(x)
    block_n, block_k, warps = tiles.gate_up
    bias = weights.gate_up_bias
    _slot_gate_up_kernel[(triton.cdiv(i, block_n), num_tokens * top_k)](
        x, ids, shares, weights.gate_up, x if bias is None else bias, made, weights.first,
        H=h, INNER=i, E=num, TOP_K=top_k, ACT=weights.act, BIAS=bias is not None, WEIGH_INPUT=weights.weigh_input,
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, **options,
    )  # fmt: skip
    out = torch.empty_like(x)
    block_n, block_k, warps = tiles.down
    bias = weights.down_bias
    _slot_down_kernel[(triton.cdiv(h, block_n), num_tokens)](
        made, ids, shares, weights.down, x if bias is None else bias, x if residual is None else residual, out,
        weights.first, H=h, INNER=i, E=num, TOP_K=top_k, BIAS=bias is not None, WEIGH_INPUT=weights.weigh_input,
        RESIDUAL=residual is not None, BLOCK_C=triton.next_power_of_2(top_k), BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, **options,
    )  # fmt: skip
    return out


def sorted_gate_up(
    x: Tensor, order: Tensor, bounds: Tensor, shares: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor,
    tiles: SortedTiles, *, act: Act, weigh_input: bool,
) -> None:  # fmt: skip
    """Fill the rows `out` `[S, I]`, in sorted order, of the experts whose gated halves `weight` `[E, 2 I, H]` are.

    `bounds` are those experts', `[E + 1]` or longer; the rest is as in `many`.
    """
    (num, _, h), i = weight.shape, out.shape[1]
    block_n, block_k, warps, stages = tiles.gate_up
    _sorted_gate_up_kernel[(triton.cdiv(i, block_n), num)](
        x, order, bounds, shares, weight, x if bias is None else bias, out,
        H=h, INNER=i, TOP_K=shares.shape[1], ACT=act, BIAS=bias is not None, WEIGH_INPUT=weigh_input,
        BLOCK_M=tiles.block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
        **launch_options(x),
    )  # fmt: skip


def sorted_down(
    h: Tensor, order: Tensor, bounds: Tensor, shares: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor,
    tiles: SortedTiles, *, weigh_input: bool,
) -> None:  # fmt: skip
    """As `sorted_gate_up` for the other halves `[E, H, I]`: `out` `[S, H]` is in the slots' order."""
    num, hidden, i = weight.shape
    block_n, block_k, warps, stages = tiles.down
    _sorted_down_kernel[(triton.cdiv(hidden, block_n), num)](
        h, order, bounds, shares, weight, h if bias is None else bias, out,
        H=hidden, INNER=i, BIAS=bias is not None, WEIGH_INPUT=weigh_input,
        BLOCK_M=tiles.block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
        **launch_options(h),
    )  # fmt: skip


def many(x: Tensor, ids: Tensor, shares: Tensor, weights: ExpertWeights, residual: Tensor | None,
         tiles: SortedTiles | None = None) -> Tensor:  # fmt: skip
    """As `gated_experts`, for more tokens: choices are sorted by expert, so that each expert is read once."""
    h, num_slots = x.shape[1], ids.numel()
    num, _, i = weights.down.shape
    tiles = tiles or sorted_tiles(num, num_slots)
    order, bounds = sorted_slots(ids, num, weights.first)
    made, y = x.new_empty(num_slots, i), x.new_empty(num_slots, h)
    weigh_input = weights.weigh_input
    sorted_gate_up(
        x, order, bounds, shares, weights.gate_up, weights.gate_up_bias, made, tiles,
        act=weights.act, weigh_input=weigh_input,
    )  # fmt: skip
    sorted_down(made, order, bounds, shares, weights.down, weights.down_bias, y, tiles, weigh_input=weigh_input)
    return combine(y, ids, residual, num, weights.first)


def combine(y: Tensor, ids: Tensor, residual: Tensor | None, num: int, first: int) -> Tensor:
    """Add up what each token's experts made, and `residual` if there is one.

    Args:
        y: `[S, H]`, in the slots' order.
        ids: `[T, K]`.
        residual: `[T, H]`, or None.
        num: Experts here; rows of others are not read.
        first: Number of the first one.
    """
    (num_tokens, top_k), h = ids.shape, y.shape[1]
    out = y.new_empty(num_tokens, h)
    block = min(1024, triton.next_power_of_2(h))
    _combine_kernel[(num_tokens, triton.cdiv(h, block))](
        y, ids, y if residual is None else residual, out, first,
        H=h, E=num, TOP_K=top_k, RESIDUAL=residual is not None, BLOCK=block, num_warps=4, **launch_options(y),
    )  # fmt: skip
    return out


def gated_experts(x: Tensor, ids: Tensor, shares: Tensor, weights: ExpertWeights, residual: Tensor | None) -> Tensor:
    """Add up what each token's experts make of it, times their shares, and `residual` if there is one.

    Args:
        x: `[T, H]`, contiguous.
        ids: `[T, K]`, numbers among all ranks' experts; those that are not here add nothing.
        shares: `[T, K]`.
        weights: Of the experts here.
        residual: `[T, H]`, or None.
    """
    return (few if ids.numel() <= MAX_SLOTS else many)(x, ids, shares, weights, residual)
