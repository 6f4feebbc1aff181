"""Kimi Delta Attention over prompts in Triton: the fold in pieces of 64 tokens.

As `delta_pieces.py`, with decays of each number of a key. Queries and keys of a piece are multiplied for each of its
four blocks of 16 tokens: within one number by number, and with the tokens before it in a matmul whose sides are decayed
to where the block begins. All exponents are sums of decays, which are at most 0. Each piece is one fixed computation.

T tokens, C pieces, B requests, G heads; D and W widths of a key and of a value; P channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.sdk.layers.ops.conv import PIECE
from dovetail_backends.kernels.triton.delta import EPS, decays
from dovetail_backends.kernels.triton.delta_pieces import SIZE, inverse
from dovetail_backends.kernels.triton.exact import PRECISION
from dovetail_backends.kernels.triton.pdl import launch_options

BLOCK = 16
"""Tokens that are multiplied number by number."""
ROWS: tl.constexpr = tl.constexpr(BLOCK)
LINES: tl.constexpr = tl.constexpr(3 * PIECE + 1)
"""What is kept of a piece and head, `[D]` each: decayed queries, keys twice, and the decay of the whole piece."""
WARPS = 4
TILE = 16, 4, 1
"""Values of a program of the fold, its warps, and how many pieces are loaded ahead.

Of six, these need least local and shared memory, as compiled for an H200. There, 16,384 tokens of a layer of
Kimi-Linear take 16.9 ms with them, seven times as long as in Gated DeltaNet; the others were not measured.
"""


@triton.jit
def _unit_rows(source, token, live, d, in_d, scale, P: tl.constexpr):
    """Queries or keys `[n, D]` of length `scale`, float32."""
    found = tl.load(source + token[:, None] * P + d[None, :], mask=live[:, None] & in_d[None, :], other=0.0)
    found = found.to(tl.float32)
    return found * (scale / tl.sqrt(tl.sum(found * found, 1) + EPS))[:, None]


@triton.jit
def _decays(f, token, live, d, in_d, a, bias, f_token, BOUND: tl.constexpr):
    """Decays in log space of tokens `[n, D]`: 0 where there is none."""
    inside = live[:, None] & in_d[None, :]
    step = tl.load(f + token[:, None] * f_token + d[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, decays(step, a, bias[None, :], BOUND), 0.0)


@triton.jit
def _products_kernel(
    x, b, f, a_log, dt_bias, table, systems, scores, b_token, b_head, f_token, f_head,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BOUND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per block of 16 tokens, head and piece: 16 rows of what `(I + L)` and the scores are."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    P: tl.constexpr = G * (2 * D + W)
    piece, head, begin = tl.program_id(2), tl.program_id(1), tl.program_id(0) * ROWS
    num = tl.load(table + piece * 3 + 2)
    if num > 0:
        i, j, d = tl.arange(0, ROWS), tl.arange(0, SIZE), tl.arange(0, BLOCK_D)
        in_d, first = d < D, tl.load(table + piece * 3 + 1)
        products, score = tl.zeros([ROWS, SIZE], tl.float32), tl.zeros([ROWS, SIZE], tl.float32)
        if begin < num:
            a, bias = tl.load(a_log + head), tl.load(dt_bias + head * D + d, mask=in_d, other=0.0)
            one, dim = tl.full([], 1, tl.float32), tl.full([], D, tl.float32)
            own, live = first + begin + i, begin + i < num
            from_q, from_k, from_f = x + head * D, x + (G + head) * D, f + head * f_head
            queries = _unit_rows(from_q, own, live, d, in_d, 1.0 / tl.sqrt(dim), P)
            keys = _unit_rows(from_k, own, live, d, in_d, one, P)
            decay = _decays(from_f, own, live, d, in_d, a, bias, f_token, BOUND)
            if begin > 0:  # by all tokens before the block, as they are where it begins
                earlier = _unit_rows(from_k, first + j, j < begin, d, in_d, one, P)
                passed = _decays(from_f, first + j + 1, j + 1 < begin, d, in_d, a, bias, f_token, BOUND)
                earlier = tl.trans(earlier * tl.exp(tl.cumsum(passed, 0, reverse=True)))
                since = tl.exp(tl.cumsum(decay, 0))
                products = tl.dot(keys * since, earlier, input_precision=PRECISION)
                score = tl.dot(queries * since, earlier, input_precision=PRECISION)
            passed = tl.zeros([ROWS, BLOCK_D], tl.float32)
            for back in range(0, ROWS):
                at = ROWS - 1 - back
                key = tl.sum(tl.where((i == at)[:, None], keys, 0.0), 0)
                behind = tl.sum(tl.where((i == at + 1)[:, None], decay, 0.0), 0)
                passed = tl.where((i > at)[:, None], passed + behind[None, :], 0.0)
                by = tl.where((i >= at)[:, None], key[None, :] * tl.exp(passed), 0.0)
                is_own = (j == begin + at)[None, :]
                products = tl.where(is_own, tl.sum(keys * by, 1)[:, None], products)
                score = tl.where(is_own, tl.sum(queries * by, 1)[:, None], score)
            number = tl.load(b + own * b_token + head * b_head, mask=live, other=0.0).to(tl.float32)
            products *= (1.0 / (1.0 + tl.exp(-number)))[:, None]
        place = (piece.to(tl.int64) * G + head) * (SIZE * SIZE) + (begin + i)[:, None] * SIZE + j[None, :]
        tl.store(scores + place, score)
        tl.store(systems + place, tl.where(j[None, :] < (begin + i)[:, None], products, 0.0))


@triton.jit
def _inverse_kernel(
    x, b, f, a_log, dt_bias, table, systems, decayed, b_token, b_head, f_token, f_head,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BOUND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per head and piece: `(I + L)^-1`, and queries and keys as they meet the state."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    P: tl.constexpr = G * (2 * D + W)
    head, piece = tl.program_id(0), tl.program_id(1)
    num = tl.load(table + piece * 3 + 2)
    if num > 0:
        i, d = tl.arange(0, SIZE), tl.arange(0, BLOCK_D)
        token, live, in_d = tl.load(table + piece * 3 + 1) + i, i < num, d < D
        a, bias = tl.load(a_log + head), tl.load(dt_bias + head * D + d, mask=in_d, other=0.0)
        place = piece.to(tl.int64) * G + head
        square = systems + place * (SIZE * SIZE) + i[:, None] * SIZE + i[None, :]
        number = tl.load(b + token * b_token + head * b_head, mask=live, other=0.0).to(tl.float32)
        rate = tl.where(live, 1.0 / (1.0 + tl.exp(-number)), 0.0)  # no token, no change
        tl.store(square, inverse(tl.load(square)) * rate[None, :])
        from_f = f + head * f_head
        from_start = tl.exp(tl.cumsum(_decays(from_f, token, live, d, in_d, a, bias, f_token, BOUND), 0))
        behind = _decays(from_f, token + 1, i + 1 < num, d, in_d, a, bias, f_token, BOUND)
        one, dim = tl.full([], 1, tl.float32), tl.full([], D, tl.float32)
        queries = _unit_rows(x + head * D, token, live, d, in_d, 1.0 / tl.sqrt(dim), P)
        keys = _unit_rows(x + (G + head) * D, token, live, d, in_d, one, P)
        inside = (i < SIZE)[:, None] & in_d[None, :]
        at = decayed + place * (LINES * D) + i[:, None] * D + d[None, :]
        tl.store(at, queries * from_start, mask=inside)
        tl.store(at + SIZE * D, keys * from_start, mask=inside)
        tl.store(at + 2 * SIZE * D, keys * tl.exp(tl.cumsum(behind, 0, reverse=True)), mask=inside)
        tl.store(at + (2 * SIZE + 1) * D, from_start, mask=inside & (i == SIZE - 1)[:, None])


@triton.jit
def _fold_kernel(
    x, rows, pieces, table, saves, inverses, scores, decayed, out, state, copies,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
    NARROW: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per block of values, head and request: its pieces in order."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    P: tl.constexpr = G * (2 * D + W)
    head, request = tl.program_id(1), tl.program_id(2)
    i, d, w = tl.arange(0, SIZE), tl.arange(0, BLOCK_D), tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    in_d, in_w = d < D, w < W
    inside, at = in_d[:, None] & in_w[None, :], head * (D * W) + d[:, None] * W + w[None, :]
    first, last = tl.load(pieces + request), tl.load(pieces + request + 1)
    if first < last:
        own = state + tl.load(rows + request) * (G * D * W) + at
        now = tl.load(own, mask=inside, other=0.0).to(tl.float32)
        for piece in tl.range(first, last, num_stages=STAGES):
            token, live = tl.load(table + piece * 3 + 1) + i, i < tl.load(table + piece * 3 + 2)
            in_value = live[:, None] & in_w[None, :]
            value = tl.load(x + token[:, None] * P + 2 * G * D + head * W + w[None, :], mask=in_value, other=0.0)
            place = piece * G + head
            square = place * (SIZE * SIZE) + i[:, None] * SIZE + i[None, :]
            numbers = decayed + place * (LINES * D) + i[:, None] * D + d[None, :]
            queries = tl.load(numbers, mask=in_d[None, :], other=0.0)
            keys = tl.load(numbers + SIZE * D, mask=in_d[None, :], other=0.0)
            ending = tl.load(numbers + 2 * SIZE * D, mask=in_d[None, :], other=0.0)
            held = value.to(tl.float32) - tl.dot(keys, now, input_precision=PRECISION)
            change = tl.dot(tl.load(inverses + square), held, input_precision=PRECISION)
            read = tl.dot(queries, now, input_precision=PRECISION)
            # What is read is rounded to bfloat16: one pass of tf32 loses nothing of that.
            read += tl.dot(tl.load(scores + square), change, input_precision="tf32" if NARROW else PRECISION)
            target = out + (token[:, None] * G + head) * W + w[None, :]
            tl.store(target, read.to(out.dtype.element_ty), mask=in_value)
            kept = tl.load(decayed + place * (LINES * D) + 3 * SIZE * D + d, mask=in_d, other=0.0)
            now = now * kept[:, None] + tl.dot(tl.trans(ending), change, input_precision=PRECISION)
            now = now.to(state.dtype.element_ty).to(tl.float32)
            copy = tl.load(saves + piece)
            if copy >= 0:
                tl.store(copies + copy * (G * D * W) + at, now, mask=inside)
        tl.store(own, now, mask=inside)


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
    sizes = {"G": heads, "D": dim, "W": width, "BLOCK_D": max(16, triton.next_power_of_2(dim))}
    strides, made = (*b.stride(), *f.stride()[:2]), {"BOUND": bound, "num_warps": WARPS, **launch_options(x)}
    _products_kernel[(PIECE // BLOCK, heads, num)](x, b, f, a_log, dt_bias, table, *squares, *strides, **sizes, **made)
    _inverse_kernel[(heads, num)](x, b, f, a_log, dt_bias, table, squares[0], decayed, *strides, **sizes, **made)
    block, warps, stages = TILE
    _fold_kernel[(triton.cdiv(width, block), heads, len(rows))](
        x, rows, pieces, table, saves, *squares, decayed, out, state, copies, **sizes, BLOCK_W=block, STAGES=stages,
        NARROW=x.dtype == torch.bfloat16, num_warps=warps, **launch_options(x),
    )  # fmt: skip
    return out
