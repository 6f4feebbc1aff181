"""The router of a few tokens in one kernel: norm, logits, choice, and the tokens as experts take them.

Most programs make logits, as `gemv` does; the last of a token's to finish chooses among them, as `route` does. Others
make of the token meanwhile what experts multiply: its norm, or that as integers (`packed_integers`). So a layer has one
launch between the stream and its experts, where these steps one behind the other are three or four.

T tokens, E experts, H hidden size, K experts chosen for each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.layers import RMSScale
from dovetail.sdk.layers.routing import Routing
from dovetail_backends.kernels.triton.endings import ended_row
from dovetail_backends.kernels.triton.launch import counters
from dovetail_backends.kernels.triton.nibbles import BLOCK
from dovetail_backends.kernels.triton.packed_integers import (
    Integers,
    Words,
    normed_inputs,
    plane_stride,
    room_for,
    write_integers,
)
from dovetail_backends.kernels.triton.pdl import launch_options
from dovetail_backends.kernels.triton.route import choose, room_for_choice, routing_options

PART = 8
"""Blocks of 64 numbers of a token that a program makes of it."""
Tile = tuple[int, int, int]
"""BLOCK_N, BLOCK_K, warps."""


class Routed(NamedTuple):
    """What a router makes of tokens.

    Attributes:
        ids: `[T, K]` int64.
        shares: `[T, K]`.
        rows: The tokens, normed, `[T, H]` or as integers.
    """

    ids: Tensor
    shares: Tensor
    rows: Tensor | Integers


@triton.jit
def _logits(
    x, norm, w, bias, logits, arrived, token, eps,
    E: tl.constexpr, H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N logits of a token, whose numbers begin at `x`; returns whether all are written now."""
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    rows = w + n[:, None] * H
    weights = tl.load(rows + k[None, :], mask=(n[:, None] < E) & (k[None, :] < H), other=0.0)
    norms = weights
    if NORM:
        norms = tl.load(norm + k, mask=k < H, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    inputs = tl.load(x + k, mask=k < H, other=0.0).to(tl.float32)
    squares = inputs
    if NORM:
        squares = inputs * inputs
        inputs *= norms.to(tl.float32)
    total = tl.sum(weights.to(tl.float32) * inputs[None, :], 1)
    for start in tl.static_range(BLOCK_K, H, BLOCK_K):
        at = start + k
        inputs = tl.load(x + at, mask=at < H, other=0.0).to(tl.float32)
        if NORM:
            squares += inputs * inputs
            inputs *= tl.load(norm + at, mask=at < H, other=0.0).to(tl.float32)
        weights = tl.load(rows + at[None, :], mask=(n[:, None] < E) & (at[None, :] < H), other=0.0)
        total += tl.sum(weights.to(tl.float32) * inputs[None, :], 1)
    dtype: tl.constexpr = logits.dtype.element_ty
    total = ended_row(total, total, squares, bias, n, eps, E, H, NORM, BIAS, False, "silu_and_mul", dtype)
    tl.store(logits + token * E + n, total.to(dtype), mask=n < E)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived + token, 1, sem="acq_rel") == (E + BLOCK_N - 1) // BLOCK_N - 1
    if is_last:
        tl.store(arrived + token, 0)
    return is_last


@triton.jit
def _part_of_row(
    x, norm, made, sums, factors, token, part, blocks, eps,
    H: tl.constexpr, NORM: tl.constexpr, WORDS: tl.constexpr, STRIDE: tl.constexpr, HALVES: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write SIZE blocks of a token, normed or as integers."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    factor = 1.0
    if NORM:
        every = tl.arange(0, BLOCK_H)
        wide = tl.load(x + every, mask=every < H, other=0.0).to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / H + eps)
    block = part * SIZE + tl.arange(0, SIZE)
    at = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    numbers = normed_inputs(x, norm, factor, at, H, NORM)
    if WORDS:
        write_integers(numbers, made, sums, factors, token, block, blocks, SIZE, STRIDE, HALVES)
    else:
        tl.store(made + token * H + at, numbers.to(made.dtype.element_ty), mask=at < H)


@triton.jit
def _router_kernel(
    x, norm, w, bias, correction, logits, arrived, ids, shares, made, sums, factors, eps, scale, stride_x, blocks,
    H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    WORDS: tl.constexpr, STRIDE: tl.constexpr, HALVES: tl.constexpr, SIZE: tl.constexpr, BLOCK_H: tl.constexpr,
    E: tl.constexpr, TOP_K: tl.constexpr, SCORE: tl.constexpr, NORMALISE: tl.constexpr, LEAST: tl.constexpr,
    CORRECTION: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr,
    G_BLOCK: tl.constexpr, E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N logits of one token, and behind them the choice; programs beyond those make SIZE blocks of it."""
    PRODUCTS: tl.constexpr = (E + BLOCK_N - 1) // BLOCK_N
    token = tl.program_id(1).to(tl.int64)
    x += token * stride_x
    if tl.program_id(0) >= PRODUCTS:
        _part_of_row(
            x, norm, made, sums, factors, token, tl.program_id(0) - PRODUCTS, blocks, eps,
            H, NORM, WORDS, STRIDE, HALVES, SIZE, BLOCK_H, PDL,
        )  # fmt: skip
    else:
        is_last = _logits(x, norm, w, bias, logits, arrived, token, eps, E, H, BLOCK_N, BLOCK_K, NORM, BIAS, PDL)
        if is_last:
            choose(
                logits, correction, ids, shares, scale, token,
                E, TOP_K, SCORE, NORMALISE, LEAST, CORRECTION, GROUPS, TOP_GROUPS, BEST_TWO, G_BLOCK, E_BLOCK, K_BLOCK,
                ".cg",
            )  # fmt: skip


def usual_tile(num: int, hidden: int) -> Tile:
    """Return a tile: as many programs as there are, so that each waits for few numbers."""
    return (1 if num <= 256 else 2, min(4096, triton.next_power_of_2(hidden)), 4)


def routed(
    x: Tensor,
    rms: RMSScale | None,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    routing: Routing,
    *,
    scale: float,
    words: Words | None = None,
    tile: Tile | None = None,
) -> Routed:
    """Norm tokens, choose their experts, and make of them what these multiply.

    Args:
        x: `[T, H]`, rows contiguous.
        rms: The norm, or None.
        weight: `[E, H]`, contiguous.
        bias: `[E]`, or None.
        correction: `[E]` float32, or None.
        routing: How to choose.
        scale: Factor of the shares, beside the routing's.
        words: How experts want integers; None: they want the normed tokens.
        tile: Of logits.
    """
    num, hidden = x.shape
    block_n, block_k, warps = tile or usual_tile(*weight.shape)
    ids, shares = room_for_choice(routing, num, x.dtype, x.device)
    logits = torch.empty(num, routing.num, dtype=torch.float32 if routing.is_wide else x.dtype, device=x.device)
    rows: Tensor | Integers = x
    if words is not None:
        rows = room_for(num, hidden, x.device, is_halved=words.is_halved)
    elif rms is not None:
        rows = torch.empty(num, hidden, dtype=x.dtype, device=x.device)
    made = (rows, x, x) if isinstance(rows, Tensor) else rows
    blocks, arrived = triton.cdiv(hidden, BLOCK), counters(x.device, triton.next_power_of_2(num))
    parts = 0 if rows is x else triton.cdiv(blocks, PART)
    _router_kernel[(triton.cdiv(routing.num, block_n) + parts, num)](
        x, x if rms is None else rms.weight, weight, x if bias is None else bias,
        x if correction is None else correction, logits, arrived, ids, shares, *made,
        0.0 if rms is None else rms.eps, routing.scale * scale, x.stride(0), blocks,
        H=hidden, BLOCK_N=block_n, BLOCK_K=block_k, NORM=rms is not None, BIAS=bias is not None,
        WORDS=words is not None, STRIDE=1 if words is None else plane_stride(words.kind),
        HALVES=words is not None and words.is_halved, SIZE=PART, BLOCK_H=triton.next_power_of_2(hidden),
        **routing_options(routing, correction), num_warps=warps, num_stages=1, **launch_options(x),
    )  # fmt: skip
    return Routed(ids, shares, rows)
