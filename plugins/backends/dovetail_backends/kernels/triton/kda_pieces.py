"""Kimi Delta Attention over prompts in Triton: the fold in pieces of 64 tokens.

As `delta_pieces.py`, with decays of each number of a key. What two tokens have in common is no factor of a product
then: a piece is halved again and again. Tokens of a second half and of the first one before it are decayed to where the
two meet, and a matmul multiplies them. So each pair of tokens meets in one of six matmuls. All exponents are sums of
decays, none above 0, and are made by matmuls, too. Each piece is one fixed computation.

T tokens, C pieces, B requests, G heads; D and W widths of a key and of a value; P channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.device import is_interpreted
from dovetail.sdk.layers.ops.conv import PIECE
from dovetail_backends.kernels.triton.delta import EPS, decays
from dovetail_backends.kernels.triton.delta_pieces import SIZE, inverse
from dovetail_backends.kernels.triton.exact import exact, product
from dovetail_backends.kernels.triton.launch import shared_bytes
from dovetail_backends.kernels.triton.pdl import launch_options

LEVELS: tl.constexpr = tl.constexpr(PIECE.bit_length() - 1)
"""How often a piece is halved until a half is one token."""
LOWEST: tl.constexpr = tl.constexpr(-1e30)
"""Of a decay: sums of them stay finite."""
LINES: tl.constexpr = tl.constexpr(3 * PIECE + 1)
"""What is kept of a piece and head, `[D]` each: decayed queries, keys twice, and the decay of the whole piece."""
SOME, WARPS, INVERSE_WARPS = 32, 4, 4
"""Numbers of a key that a program multiplies at a time, its warps, and those of a program that inverts.

With more numbers, or warps, registers do not suffice: 592 bytes of a thread would be spilled, or 280, not 48.
"""
TILE = 32, 4, 2
"""Values of a program of the fold, its warps, and 2 if a piece is loaded while the one before it is folded.

Of ten, as compiled for an H200, it has hardly more local memory than the least, and half as many programs that load
what all need. None was measured.
"""
AHEAD = 128, 201 << 10
"""Widest keys that are loaded ahead, and the shared memory that this takes; without it, programs wait for pieces."""


@triton.jit
def _lengths(source, token, live, P: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """One over the lengths of queries or keys, `[64]`."""
    d = tl.arange(0, BLOCK_D)
    found = tl.load(source + token[:, None] * P + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    found = found.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(found * found, 1) + EPS)


@triton.jit
def _sums(chosen, decay, EMULATED: tl.constexpr):
    """Sums `[64, n]` of the decays that each token has chosen, `[64, 64]`: nothing cancels, as none is above 0."""
    return exact(tl.where(chosen, 1.0, 0.0).to(tl.bfloat16), decay, 3, True, EMULATED)


@triton.jit
def _prepare_kernel(
    x, b, f, a_log, dt_bias, table, inverses, scores, decayed, b_token, b_head, f_token, f_head,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, SOME: tl.constexpr,
    BOUND: tl.constexpr, EMULATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per head and piece: `(I + L)^-1`, scores, and queries and keys as they meet the state.

    It goes through SOME numbers of a key at a time, as many as registers have room for.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    P: tl.constexpr = G * (2 * D + W)
    head, piece = tl.program_id(0), tl.program_id(1)
    num = tl.load(table + piece * 3 + 2)
    if num > 0:
        i = tl.arange(0, SIZE)
        token, live = tl.load(table + piece * 3 + 1) + i, i < num
        row, column = i[:, None], i[None, :]
        from_q, from_k = x + head * D, x + (G + head) * D
        q_length = _lengths(from_q, token, live, P, D, BLOCK_D) * (1.0 / tl.sqrt(tl.full([], D, tl.float32)))
        k_length, a = _lengths(from_k, token, live, P, D, BLOCK_D), tl.load(a_log + head)
        products, score = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
        place = piece.to(tl.int64) * G + head
        for first in range(0, BLOCK_D, SOME):
            d = first + tl.arange(0, SOME)
            inside = live[:, None] & (d < D)[None, :]
            step = tl.load(f + token[:, None] * f_token + head * f_head + d[None, :], mask=inside, other=0.0)
            bias = tl.load(dt_bias + head * D + d, mask=d < D, other=0.0)[None, :]
            decay = tl.maximum(decays(step.to(tl.float32), a, bias, BOUND), LOWEST)
            decay = tl.where(inside, decay, 0.0)
            at = token[:, None] * P + d[None, :]
            queries = tl.load(from_q + at, mask=inside, other=0.0).to(tl.float32) * q_length[:, None]
            keys = tl.load(from_k + at, mask=inside, other=0.0).to(tl.float32) * k_length[:, None]
            score += tl.where(row == column, tl.sum(queries * keys, 1)[:, None], 0.0)
            half = SIZE
            for _ in tl.range(LEVELS, disable_licm=True):  # registers have no room for constants, here and below
                half = half // 2
                is_late, is_same = (row & half) != 0, (row ^ column) < half
                passed = tl.exp(_sums(is_same & ((column <= row) == is_late), decay, EMULATED))
                late, early = tl.where(is_late, passed, 0.0), tl.trans(tl.where(is_late, 0.0, keys * passed))
                is_pair = (row ^ column) < 2 * half
                products += tl.where(is_pair, product(keys * late, early), 0.0)
                score += tl.where(is_pair, product(queries * late, early), 0.0)
            target, wide = decayed + place * (LINES * D) + row * D + d[None, :], (row < SIZE) & (d < D)[None, :]
            passed = tl.exp(_sums(column <= row, decay, EMULATED))
            tl.store(target, queries * passed, mask=wide)
            tl.store(target + SIZE * D, keys * passed, mask=wide)
            tl.store(target + (2 * SIZE + 1) * D, passed, mask=wide & (row == SIZE - 1))
            tl.store(target + 2 * SIZE * D, keys * tl.exp(_sums(column > row, decay, EMULATED)), mask=wide)
        square = place * (SIZE * SIZE) + row * SIZE + column
        tl.store(scores + square, score)
        number = tl.load(b + token * b_token + head * b_head, mask=live, other=0.0).to(tl.float32)
        rate = tl.where(live, 1.0 / (1.0 + tl.exp(-number)), 0.0)  # no token, no change
        tl.store(inverses + square, products * rate[:, None])


@triton.jit
def _inverse_kernel(b, table, systems, b_token, b_head, G: tl.constexpr, PDL: tl.constexpr):
    """One program per head and piece: `(I + L)^-1` in the place of L, times the rates."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head, piece = tl.program_id(0), tl.program_id(1)
    num = tl.load(table + piece * 3 + 2)
    if num > 0:
        i = tl.arange(0, SIZE)
        token, live = tl.load(table + piece * 3 + 1) + i, i < num
        square = systems + (piece.to(tl.int64) * G + head) * (SIZE * SIZE) + i[:, None] * SIZE + i[None, :]
        number = tl.load(b + token * b_token + head * b_head, mask=live, other=0.0).to(tl.float32)
        rate = tl.where(live, 1.0 / (1.0 + tl.exp(-number)), 0.0)  # no token, no change
        tl.store(square, inverse(tl.load(square)) * rate[None, :])


@triton.jit
def _met(numbers, low, high, in_low, in_high, HALF: tl.constexpr):
    """Decayed queries or keys times a state whose numbers of keys stand in two halves."""
    first = tl.load(numbers, mask=in_low, other=0.0)
    return product(first, low) + product(tl.load(numbers + HALF, mask=in_high, other=0.0), high)


@triton.jit
def _fold_kernel(
    x, rows, pieces, table, saves, inverses, scores, decayed, out, state, copies,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr, BLOCK_W: tl.constexpr,
    NARROW: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per block of values, head and request: its pieces in order.

    The HALF numbers of keys that come first, and the others, are multiplied one after the other: registers have room
    for half of a piece's.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    P: tl.constexpr = G * (2 * D + W)
    head, request = tl.program_id(1), tl.program_id(2)
    i, d, w = tl.arange(0, SIZE), tl.arange(0, HALF), tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    in_low, in_high, in_w = d < D, HALF + d < D, w < W
    at_low, at_high = in_low[:, None] & in_w[None, :], in_high[:, None] & in_w[None, :]
    at = head * (D * W) + d[:, None] * W + w[None, :]
    first, last = tl.load(pieces + request), tl.load(pieces + request + 1)
    if first < last:
        own = state + tl.load(rows + request) * (G * D * W) + at
        low = tl.load(own, mask=at_low, other=0.0).to(tl.float32)
        high = tl.load(own + HALF * W, mask=at_high, other=0.0).to(tl.float32)
        for piece in tl.range(first, last, num_stages=STAGES, disable_licm=True):
            token, live = tl.load(table + piece * 3 + 1) + i, i < tl.load(table + piece * 3 + 2)
            in_value = live[:, None] & in_w[None, :]
            value = tl.load(x + token[:, None] * P + 2 * G * D + head * W + w[None, :], mask=in_value, other=0.0)
            place = piece * G + head
            square = place * (SIZE * SIZE) + i[:, None] * SIZE + i[None, :]
            numbers = decayed + place * (LINES * D) + i[:, None] * D + d[None, :]
            held = _met(numbers + SIZE * D, low, high, in_low[None, :], in_high[None, :], HALF)
            change = product(tl.load(inverses + square), value.to(tl.float32) - held)
            read = _met(numbers, low, high, in_low[None, :], in_high[None, :], HALF)
            # What is read is rounded to bfloat16: one pass of tf32 loses nothing of that.
            score = tl.load(scores + square)
            read += tl.dot(score, change, input_precision="tf32") if NARROW else product(score, change)
            target = out + (token[:, None] * G + head) * W + w[None, :]
            tl.store(target, read.to(out.dtype.element_ty), mask=in_value)
            kept = decayed + place * (LINES * D) + 3 * SIZE * D + d
            low *= tl.load(kept, mask=in_low, other=0.0)[:, None]
            high *= tl.load(kept + HALF, mask=in_high, other=0.0)[:, None]
            ending = numbers + 2 * SIZE * D
            early = tl.trans(tl.load(ending, mask=in_low[None, :], other=0.0))
            low = (low + product(early, change)).to(state.dtype.element_ty).to(tl.float32)
            late = tl.trans(tl.load(ending + HALF, mask=in_high[None, :], other=0.0))
            high = (high + product(late, change)).to(state.dtype.element_ty).to(tl.float32)
            copy = tl.load(saves + piece)
            if copy >= 0:
                kept_at = copies + copy * (G * D * W) + at
                tl.store(kept_at, low, mask=at_low)
                tl.store(kept_at + HALF * W, high, mask=at_high)
        tl.store(own, low, mask=at_low)
        tl.store(own + HALF * W, high, mask=at_high)


def kda_prefill(
    x: Tensor, b: Tensor, f: Tensor, a_log: Tensor, dt_bias: Tensor, rows: Tensor, starts: Tensor, pieces: Tensor,
    table: Tensor, saves: Tensor, state: Tensor, copies: Tensor, *, bound: float = 0.0,
) -> Tensor:  # fmt: skip
    """See `kda.kda_prefill`: three kernels."""
    x, f = x.contiguous(), f if f.stride(-1) == 1 else f.contiguous()
    heads, dim, width = state.shape[1:]
    out, num = x.new_zeros(len(x), heads, width), len(table)
    if len(rows) == 0:
        return out
    squares = torch.empty(2, num, heads, PIECE, PIECE, dtype=torch.float32, device=x.device)
    decayed = torch.empty(num, heads, LINES.value, dim, dtype=torch.float32, device=x.device)
    sizes, block_d = {"G": heads, "D": dim, "W": width}, max(32, triton.next_power_of_2(dim))
    _prepare_kernel[(heads, num)](
        x, b, f, a_log, dt_bias, table, *squares, decayed, *b.stride(), *f.stride()[:2], **sizes,
        BLOCK_D=block_d, SOME=min(SOME, block_d), BOUND=bound, EMULATED=is_interpreted(), num_warps=WARPS,
        **launch_options(x),
    )  # fmt: skip
    _inverse_kernel[(heads, num)](
        b, table, squares[0], *b.stride(), G=heads, num_warps=INVERSE_WARPS, **launch_options(x)
    )
    block, warps, stages = TILE
    stages = stages if block_d <= AHEAD[0] and shared_bytes(x.device) >= AHEAD[1] else 1
    _fold_kernel[(triton.cdiv(width, block), heads, len(rows))](
        x, rows, pieces, table, saves, *squares, decayed, out, state, copies, **sizes, HALF=block_d // 2, BLOCK_W=block,
        STAGES=stages, NARROW=x.dtype == torch.bfloat16, num_warps=warps, **launch_options(x),
    )  # fmt: skip
    return out
