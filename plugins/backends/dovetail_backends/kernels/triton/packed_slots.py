"""Experts with packed weights for a few tokens: each choice is multiplied by itself, without tensor cores.

Numbers of 8 bits meet inputs in floating point, as in `packed_row`; words of 4 bits meet them as integers, as in
`packed_integers`. Two kernels of either: the gated half of an expert, and the other one with the sum over a token's
choices.

T tokens, K experts chosen for each, S = T K choices ("slots"), E experts, H hidden size, I width between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.device import is_interpreted
from dovetail.contracts.layers import Act
from dovetail_backends.kernels.triton.nibbles import BLOCK
from dovetail_backends.kernels.triton.packed_integers import (
    Integers,
    Words,
    by_words,
    fits_integers,
    integers,
    is_halved,
    load_integers,
    load_words,
    summed,
)
from dovetail_backends.kernels.triton.packed_row import RowTile, scaled_sum
from dovetail_backends.kernels.triton.packed_weight import PackedWeight
from dovetail_backends.kernels.triton.pdl import launch_options
from dovetail_backends.kernels.triton.silu import act_gated

MAX_SLOTS, MAX_WORD_SLOTS = 64, 32
"""Choices of which each is multiplied by itself, although two may then read the same expert; fewer of 4-bit numbers."""
SLOTS_OF_LONG_TURNS = 8
"""Up to so many choices, rows take the fewest turns: two tokens of gpt-oss. Measured for one, where turns of 512 of
1,440 inputs are slower than of 1,024 (24.0 µs a layer against 22.8), and 8, where they are faster (85.4, 92.3)."""


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


@triton.jit
def _gated(
    total, up_total, shares, bias, slot, n, inside,
    N: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, WEIGH: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Outputs `n` of the gated half of a slot, from sums; `bias` is of its expert."""
    if WEIGH:
        share = tl.load(shares + slot).to(tl.float32)
        total *= share
        up_total *= share
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        up_total += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)
    return act_gated(total, up_total, ACT, dtype)


@triton.jit
def _store_token(
    value, share, live, bias, of_all, residual, out, token,
    N: tl.constexpr, BIAS: tl.constexpr, WEIGH_INPUT: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store outputs of a token, from sums `[BLOCK_C * BLOCK_N]` of its choices, weighed and added up."""
    dtype: tl.constexpr = out.dtype.element_ty
    if BIAS:
        value += tl.load(bias + of_all, mask=live, other=0.0).to(tl.float32)
    value = value.to(dtype).to(tl.float32)
    if not WEIGH_INPUT:
        value = (value * share).to(dtype).to(tl.float32)
    total = tl.sum(tl.reshape(tl.where(live, value, 0.0), [BLOCK_C, BLOCK_N]), 0)
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if RESIDUAL:
        added = tl.load(residual + token * N + at, mask=at < N, other=0.0).to(tl.float32)
        total = total.to(dtype).to(tl.float32) + added
    tl.store(out + token * N + at, total.to(dtype), mask=at < N)


@triton.jit(do_not_specialize=["first_expert"])
def _bytes_kernel(
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
        bias += expert * ALL
        total = _gated(total, up_total, shares, bias, slot, n, inside, N, ACT, BIAS, WEIGH, dtype)
        tl.store(out + slot * N + n, total.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["first_expert"])
def _bytes_down_kernel(
    h, ids, shares, w, scale, row_scale, bias, residual, out, first_expert,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,
    BIAS: tl.constexpr, WEIGH_INPUT: tl.constexpr, RESIDUAL: tl.constexpr, ROW_SCALE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one token: what its experts make of `h` `[S, I]`, weighed and added up; numbers of 8 bits.

    A tile has a row for each choice and output, choices first.
    """
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
    _store_token(
        value, share, live, bias, of_all, residual, out, token, N, BIAS, WEIGH_INPUT, RESIDUAL, BLOCK_C, BLOCK_N
    )


@triton.jit(do_not_specialize=["first_expert"])
def _words_kernel(
    pairs, sums, factors, ids, shares, w, scale, offset, row_scale, bias, out, first_expert,
    N: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, FORM: tl.constexpr,
    E: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, WEIGH: tl.constexpr,
    ZERO: tl.constexpr, ASM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_bytes_kernel` for words, with tokens as `integers`; `bias` and scales are of all experts."""
    dtype: tl.constexpr = out.dtype.element_ty
    ALL: tl.constexpr = 2 * N
    HALVES: tl.constexpr = GROUP % 64 != 0
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_W)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(1).to(tl.int64)
    expert = (tl.load(ids + slot) - first_expert).to(tl.int64)
    if (expert >= 0) & (expert < E):
        inside = n < N
        scale += expert * ALL * GROUPS
        offset += expert * ALL * GROUPS
        row_scale += expert * ALL
        bias += expert * ALL
        rows = w + expert * ALL * ROW + n[:, None].to(tl.int64) * ROW
        token = slot // TOP_K
        pairs += token * 4 * ROW
        sums += token * (1 + HALVES) * (ROW // 8)
        factors += token * (ROW // 8)
        total = tl.zeros([BLOCK_N, BLOCK_W // 8], tl.float32)
        up_total = total
        for start in tl.static_range(0, ROW, BLOCK_W):
            words = load_words(rows, start + k, inside, ROW, True)
            ups = load_words(rows + N * ROW, start + k, inside, ROW, True)
            inputs = load_integers(pairs, sums, factors, start, ROW, HALVES, BLOCK_W)
            total += by_words(
                words, inputs, scale, offset, n, start, N, FORM, GROUP, GROUPS, ZERO, BLOCK_N, BLOCK_W, ASM
            )
            up_total += by_words(
                ups, inputs, scale, offset, n + N, start, ALL, FORM, GROUP, GROUPS, ZERO, BLOCK_N, BLOCK_W, ASM
            )
        gate, up = summed(total, row_scale, n, inside, FORM), summed(up_total, row_scale, n + N, inside, FORM)
        made = _gated(gate, up, shares, bias, slot, n, inside, N, ACT, BIAS, WEIGH, dtype)
        tl.store(out + slot * N + n, made.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["first_expert"])
def _words_down_kernel(
    pairs, sums, factors, ids, shares, w, scale, offset, row_scale, bias, residual, out, first_expert,
    N: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, FORM: tl.constexpr,
    E: tl.constexpr, TOP_K: tl.constexpr, BIAS: tl.constexpr, WEIGH_INPUT: tl.constexpr, RESIDUAL: tl.constexpr,
    ZERO: tl.constexpr, ASM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `_bytes_down_kernel` for words, with `h` as integers."""
    HALVES: tl.constexpr = GROUP % 64 != 0
    ROWS: tl.constexpr = BLOCK_C * BLOCK_N
    token = tl.program_id(1).to(tl.int64)
    place, k = tl.arange(0, ROWS), tl.arange(0, BLOCK_W)
    choice, n = place // BLOCK_N, tl.program_id(0) * BLOCK_N + place % BLOCK_N
    if PDL:
        gdc_launch_dependents()
    # Choice and weights are read ahead of the kernels before, of which the first waits for the choice.
    slot = token * TOP_K + choice
    expert = (tl.load(ids + slot, mask=choice < TOP_K, other=-1) - first_expert).to(tl.int64)
    live = (choice < TOP_K) & (expert >= 0) & (expert < E) & (n < N)
    of_all = tl.where(live, expert * N + n, E * N)
    share = tl.load(shares + slot, mask=live, other=0.0).to(tl.float32)
    rows = w + of_all[:, None] * ROW
    words = load_words(rows, k, live, ROW, True)
    if PDL:
        gdc_wait()
    slot = tl.where(live, slot, token * TOP_K)[:, None]  # there is something to read, of which nothing is kept
    pairs += slot * 4 * ROW
    sums += slot * (1 + HALVES) * (ROW // 8)
    factors += slot * (ROW // 8)
    total = tl.zeros([ROWS, BLOCK_W // 8], tl.float32)
    for start in tl.static_range(0, ROW, BLOCK_W):
        if start > 0:
            words = load_words(rows, start + k, live, ROW, True)
        inputs = load_integers(pairs, sums, factors, start, ROW, HALVES, BLOCK_W)
        total += by_words(
            words, inputs, scale, offset, of_all, start, E * N, FORM, GROUP, GROUPS, ZERO, ROWS, BLOCK_W, ASM
        )
    value = summed(total, row_scale, of_all, live, FORM)
    _store_token(
        value, share, live, bias, of_all, residual, out, token, N, BIAS, WEIGH_INPUT, RESIDUAL, BLOCK_C, BLOCK_N
    )


@dataclass(frozen=True, slots=True)
class PackedSlotTiles:
    """Tiles of the two kernels; BLOCK_K counts inputs."""

    gate_up: RowTile
    down: RowTile


def fits_slots(weights: PackedExpertWeights, dtype: torch.dtype) -> bool:
    """Whether there are kernels here for tokens of a dtype."""
    return _are_bytes(weights) or (
        dtype != torch.float32 and fits_integers(weights.gate_up) and fits_integers(weights.down)
    )


def most_slots(weights: PackedExpertWeights) -> int:
    """Return up to how many choices these kernels are the fastest."""
    return MAX_SLOTS if _are_bytes(weights) else MAX_WORD_SLOTS


def wanted_words(weights: PackedExpertWeights, num_slots: int, dtype: torch.dtype) -> Words | None:
    """Return how `of_slots` multiplies tokens with `num_slots` choices as integers, None where it does not."""
    if _are_bytes(weights) or not 0 < num_slots <= most_slots(weights) or not fits_slots(weights, dtype):
        return None
    return Words(weights.gate_up.kind, is_halved(weights.gate_up))


def slot_tiles(weights: PackedExpertWeights, num_slots: int) -> PackedSlotTiles:
    """Return tiles measured on an H200; a short row takes no more than itself."""
    h, i = (max(BLOCK, triton.next_power_of_2(one.num_in)) for one in (weights.gate_up, weights.down))
    if not _are_bytes(weights):
        return PackedSlotTiles((4, min(1024, h), 1), (2, _turn(weights.down.num_in, min(1024, i), num_slots), 1))
    return PackedSlotTiles((4, min(2048, h), 4), (4, min(256, i), 8) if num_slots <= 32 else (2, min(256, i), 4))


def _turn(num_in: int, most: int, num_slots: int) -> int:
    """Return how many inputs a row of words takes at a time: `most`, or half of it to have few behind the row's end."""
    if num_slots <= SLOTS_OF_LONG_TURNS or most < 1024:
        return most
    return min((most, most // 2), key=lambda size: triton.cdiv(num_in, size) * size)


def _are_bytes(weights: PackedExpertWeights) -> bool:
    """Whether both matrices have numbers of 8 bits."""
    return weights.gate_up.kind == "scaled" and weights.down.kind == "scaled"


def of_slots(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    weights: PackedExpertWeights,
    residual: Tensor | None,
    tiles: PackedSlotTiles,
    *,
    given: Integers | None = None,
) -> Tensor:
    """As `packed_experts.packed_gated_experts` for weights that `fits_slots`.

    Args:
        x: See there; with `given`, nothing of it is read.
        ids: See there.
        shares: See there.
        weights: See there.
        residual: See there.
        tiles: Of both kernels.
        given: The tokens as integers, where words are multiplied and a caller has made them already.
    """
    if _are_bytes(weights):
        return _of_bytes(x, ids, shares, weights, residual, tiles)
    up, down = weights.gate_up, weights.down
    num, i = ids.numel(), down.num_in
    made, out = x.new_empty(num, i), torch.empty_like(x)
    given = integers(x, up.kind, is_halved=is_halved(up)) if given is None else given
    _words_kernel[(triton.cdiv(i, tiles.gate_up[0]), num)](
        *given, ids, shares, *_parts_of(x, up, weights.gate_up_bias), made, weights.first, N=i,
        TOP_K=ids.shape[1], ACT=weights.act, BIAS=weights.gate_up_bias is not None, WEIGH=weights.weigh_input,
        num_stages=1, **_weight_options(weights, up, tiles.gate_up), **launch_options(x),
    )  # fmt: skip
    between = integers(made, down.kind, is_halved=is_halved(down))
    h, block_n = down.num_out, tiles.down[0]
    _words_down_kernel[(triton.cdiv(h, block_n), len(x))](
        *between, ids, shares, *_parts_of(x, down, weights.down_bias), x if residual is None else residual, out,
        weights.first, N=h, TOP_K=ids.shape[1], BIAS=weights.down_bias is not None, WEIGH_INPUT=weights.weigh_input,
        RESIDUAL=residual is not None, BLOCK_C=triton.next_power_of_2(ids.shape[1]),
        **_weight_options(weights, down, tiles.down), **launch_options(x),
    )  # fmt: skip
    return out


def _of_bytes(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    weights: PackedExpertWeights,
    residual: Tensor | None,
    tiles: PackedSlotTiles,
) -> Tensor:
    """As `of_slots` for numbers of 8 bits."""
    up, down, i = weights.gate_up, weights.down, weights.down.num_in
    made, out = x.new_empty(ids.numel(), i), torch.empty_like(x)
    _bytes_kernel[(triton.cdiv(i, tiles.gate_up[0]), ids.numel())](
        x, ids, shares, *_parts_of(x, up, weights.gate_up_bias), made, weights.first, N=i, TOP_K=ids.shape[1],
        ACT=weights.act, BIAS=weights.gate_up_bias is not None, WEIGH=weights.weigh_input, num_stages=1,
        **_weight_options(weights, up, tiles.gate_up), **launch_options(x),
    )  # fmt: skip
    _bytes_down_kernel[(triton.cdiv(down.num_out, tiles.down[0]), len(x))](
        made, ids, shares, *_parts_of(x, down, weights.down_bias), x if residual is None else residual, out,
        weights.first, N=down.num_out, TOP_K=ids.shape[1], BIAS=weights.down_bias is not None,
        WEIGH_INPUT=weights.weigh_input, RESIDUAL=residual is not None,
        BLOCK_C=triton.next_power_of_2(ids.shape[1]), **_weight_options(weights, down, tiles.down), **launch_options(x),
    )  # fmt: skip
    return out


def _parts_of(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Return the tensors of a weight that kernels take, and its bias; `x` for those that there are not."""
    parts: tuple[Tensor | None, ...] = (weight.scale, weight.row_scale)
    if weight.kind != "scaled":
        parts = (weight.scale, weight.offset, weight.row_scale)
    return weight.numbers, *(x if part is None else part for part in (*parts, bias))


def _weight_options(weights: PackedExpertWeights, weight: PackedWeight, tile: RowTile) -> dict[str, Any]:
    """Return what a kernel is told of a weight, and of its tile."""
    block_n, block_k, warps = tile
    options: dict[str, Any] = {
        "E": len(weights.gate_up.numbers), "GROUP": weight.group, "GROUPS": weight.groups, "BLOCK_N": block_n,
        "num_warps": warps,
    }  # fmt: skip
    if weight.kind == "scaled":
        return options | {"K": weight.num_in, "ROW_SCALE": weight.row_scale is not None, "BLOCK_K": block_k}
    options |= {"ROW": weight.numbers.shape[-1], "FORM": weight.kind, "ZERO": weight.offset is not None}
    return options | {"ASM": not is_interpreted(), "BLOCK_W": block_k // 8}
