"""Gated DeltaNet over prompts in Triton: the convolution, and the fold in pieces of 64 tokens.

The changes `U` that a piece's tokens make solve `(I + L) U = b (V - e^c K S)`, L strictly lower. What does not depend
on the state, `(I + L)^-1` and the scores of queries and keys, is computed for all pieces at once; then a program for
each request, head and block of values goes through the pieces in order, with its part of the state in registers.
Products keep some 22 bits: queries and keys of bfloat16 are multiplied as they are, by float32 in three parts; what
else is float32 in three passes of tf32. Each piece is one fixed computation.

T tokens, C pieces, B requests, G key heads, each with J value heads, N = G J; D and W widths of a key and of a value;
P channels, K taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.device import is_interpreted
from dovetail.sdk.layers.ops.conv import PIECE
from dovetail_backends.kernels.triton.delta import EPS, gates, silu
from dovetail_backends.kernels.triton.exact import alike, exact, product
from dovetail_backends.kernels.triton.pdl import launch_options

SIZE: tl.constexpr = tl.constexpr(PIECE)
CHANNELS, TOKENS = 128, 16
"""Of a tile of the convolution."""
PREPARE_WARPS = 4


@triton.jit
def gated(source, by_token, gate, gate_token, own, place, mask):
    """Inputs of channels at places in the batch, times a gate if there is one, which has a row for each token."""
    value = tl.load(source + place * by_token, mask=mask, other=0.0)
    if gate is not None:
        by = tl.load(gate + place * gate_token + own, mask=mask, other=0.0)
        value = (value.to(tl.float32) * by.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def convolve(
    source, by_token, by_head, before, before_token, behind, behind_token, block, piece, num, weight, bias, lens, rows,
    starts, table, saves, conv, copies, out,
    FIRST: tl.constexpr, NUM: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A piece's convolution for a block of the NUM channels from FIRST on: those of one tensor, WIDE of each head."""
    own = block * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c, channel = own < NUM, FIRST + own
    source += own // WIDE * by_head + own % WIDE
    request, begin = tl.load(table + piece * 3), tl.load(table + piece * 3 + 1)
    start = tl.load(starts + request)
    ring = conv + tl.load(rows + request) * (K * P) + channel
    offset = tl.load(lens + request) - tl.load(starts + request + 1)  # of positions, from places in the batch
    for at in range(0, num, BLOCK_T):
        token = begin + at + tl.arange(0, BLOCK_T)
        live = (token < begin + num)[:, None] & in_c[None, :]
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for back in tl.static_range(0, K):
            place = (token - back)[:, None]
            value = gated(source[None, :], by_token, before, before_token, own[None, :], place, live & (place >= start))
            if begin + at < start + back:  # some of them stand before the request's first token here
                slot = (place + offset + K) % K
                value += tl.load(ring[None, :] + slot * P, mask=live & (place < start), other=0.0)
            taken = tl.load(weight + channel * K + K - 1 - back, mask=in_c, other=0.0).to(tl.float32)
            total += value.to(tl.float32) * taken[None, :]
        if bias is not None:
            total += tl.load(bias + channel, mask=in_c, other=0.0).to(tl.float32)[None, :]
        found = total.to(out.dtype.element_ty).to(tl.float32)
        if SILU:
            found = silu(found).to(out.dtype.element_ty).to(tl.float32)
        if behind is not None:
            by = tl.load(behind + token[:, None] * behind_token + own[None, :], mask=live, other=0.0)
            found = found * by.to(tl.float32)
        tl.store(out + token[:, None] * P + channel[None, :], found.to(out.dtype.element_ty), mask=live)
    copy = tl.load(saves + piece)
    if copy >= 0:
        for back in tl.static_range(0, K):
            place = begin + num - 1 - back
            slot = (place + offset + K) % K
            value = gated(source, by_token, before, before_token, own, place, in_c & (place >= start))
            value += tl.load(ring + slot * P, mask=in_c & (place < start), other=0.0)
            tl.store(copies + copy * (K * P) + slot * P + channel, value, mask=in_c)


@triton.jit
def _conv_kernel(
    q, k, v, weight, bias, lens, rows, starts, table, saves, conv, copies, out,
    q_token, q_head, k_token, k_head, v_token, v_head,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per piece and block of one tensor's channels; rings are read only."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    P: tl.constexpr = 2 * G * D + G * V
    BLOCKS: tl.constexpr = (G * D + BLOCK_C - 1) // BLOCK_C
    piece, block = tl.program_id(0), tl.program_id(1)
    num = tl.load(table + piece * 3 + 2)
    if num > 0:
        if block < BLOCKS:
            convolve(
                q, q_token, q_head, None, 0, None, 0, block, piece, num, weight, bias, lens, rows, starts, table,
                saves, conv, copies, out, 0, G * D, D, P, K, BLOCK_T, BLOCK_C, True,
            )  # fmt: skip
        elif block < 2 * BLOCKS:
            convolve(
                k, k_token, k_head, None, 0, None, 0, block - BLOCKS, piece, num, weight, bias, lens, rows, starts,
                table, saves, conv, copies, out, G * D, G * D, D, P, K, BLOCK_T, BLOCK_C, True,
            )  # fmt: skip
        else:
            convolve(
                v, v_token, v_head, None, 0, None, 0, block - 2 * BLOCKS, piece, num, weight, bias, lens, rows, starts,
                table, saves, conv, copies, out, 2 * G * D, G * V, V, P, K, BLOCK_T, BLOCK_C, True,
            )  # fmt: skip


@triton.jit
def keep(
    source, by_token, by_head, before, before_token, block, request, lens, rows, starts, conv,
    FIRST: tl.constexpr, NUM: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr, K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write a request's last inputs of a block of channels into its ring."""
    own = block * BLOCK_C + tl.arange(0, BLOCK_C)
    source += own // WIDE * by_head + own % WIDE
    start, end = tl.load(starts + request), tl.load(starts + request + 1)
    ring = conv + tl.load(rows + request) * (K * P) + FIRST + own
    offset = tl.load(lens + request) - end
    for back in tl.static_range(0, K):
        place = end - 1 - back
        inside = (own < NUM) & (place >= start)
        value = gated(source, by_token, before, before_token, own, place, inside)
        tl.store(ring + ((place + offset + K) % K) * P, value, mask=inside)


@triton.jit
def _ring_kernel(
    q, k, v, lens, rows, starts, conv, q_token, q_head, k_token, k_head, v_token, v_head,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, K: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per request and block of one tensor's channels, when nobody reads the rings any more."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    P: tl.constexpr = 2 * G * D + G * V
    BLOCKS: tl.constexpr = (G * D + BLOCK_C - 1) // BLOCK_C
    request, block = tl.program_id(0), tl.program_id(1)
    if block < BLOCKS:
        keep(q, q_token, q_head, None, 0, block, request, lens, rows, starts, conv, 0, G * D, D, P, K, BLOCK_C)
    elif block < 2 * BLOCKS:
        block -= BLOCKS
        keep(k, k_token, k_head, None, 0, block, request, lens, rows, starts, conv, G * D, G * D, D, P, K, BLOCK_C)
    else:
        block -= 2 * BLOCKS
        keep(v, v_token, v_head, None, 0, block, request, lens, rows, starts, conv, 2 * G * D, G * V, V, P, K, BLOCK_C)


def conv_qkv(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, lens: Tensor, rows: Tensor, starts: Tensor,
    pieces: Tensor, table: Tensor, saves: Tensor, conv: Tensor, copies: Tensor,
) -> Tensor:  # fmt: skip
    """See `conv.conv_qkv`: one kernel for the tokens, and one for what rings keep."""
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))
    (_, keys, dim), (_, taps, channels) = q.shape, conv.shape
    out = torch.empty(len(q), channels, dtype=q.dtype, device=q.device)
    if len(rows) == 0:
        return out
    strides = [stride for one in (q, k, v) for stride in one.stride()[:2]]
    sizes = {"G": keys, "D": dim, "V": v.shape[2], "K": taps, "BLOCK_C": CHANNELS, "num_warps": 4}
    blocks = 2 * triton.cdiv(keys * dim, CHANNELS) + triton.cdiv(keys * v.shape[2], CHANNELS)
    _conv_kernel[(len(table), blocks)](
        q, k, v, weight, bias, lens, rows, starts, table, saves, conv, copies, out, *strides, BLOCK_T=TOKENS, **sizes,
        **launch_options(q),
    )  # fmt: skip
    _ring_kernel[(len(rows), blocks)](q, k, v, lens, rows, starts, conv, *strides, **sizes, **launch_options(q))
    return out


@triton.jit
def _rows(source, token, live, d, in_d, P: tl.constexpr):
    """Queries or keys `[64, D]` as they are, and what makes each of length 1, `[64]`."""
    found = tl.load(source + token[:, None] * P + d[None, :], mask=live[:, None] & in_d[None, :], other=0.0)
    wide = found.to(tl.float32)
    return found, 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + EPS)


@triton.jit
def inverse(system):
    """`(I + L)^-1` of a strictly lower `[64, 64]`.

    Its four blocks of 16 on the diagonal are solved row by row, all at once: powers of L may be huge where the inverse
    is not. Of what is left, N = (blocks)^-1 (rest), the fourth power is zero: (I + N)^-1 = (I - N)(I + N N).
    """
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    is_block, eye = row // 16 == column // 16, tl.where(row == column, 1.0, 0.0)
    blocks = tl.sum(tl.reshape(tl.where(is_block, system, 0.0), [4, 16, 4, 16]), 2)  # the others are zeros
    place = tl.arange(0, 16)[None, :, None]
    done = tl.where(place == tl.arange(0, 16)[None, None, :], 1.0, 0.0) + tl.zeros_like(blocks)
    for i in range(1, 16):
        line = tl.sum(tl.where(place == i, blocks, 0.0), 1)  # [4, 16]
        change = tl.sum(line[:, :, None] * tl.where(place < i, done, 0.0), 1)
        done = tl.where(place == i, done - change[:, None, :], done)
    wide = tl.reshape(tl.broadcast_to(done[:, :, None, :], [4, 16, 4, 16]), [64, 64])
    solved = tl.where(is_block, wide, 0.0)
    rest = product(solved, tl.where(is_block, 0.0, system))
    series = product(eye - rest, eye + product(rest, rest))
    return product(series, solved)


@triton.jit
def _prepare_kernel(
    x, b, a, a_log, dt_bias, table, inverses, scores, scales, b_token, b_head, a_token, a_head,
    G: tl.constexpr, J: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr,
    NARROW: tl.constexpr, EMULATED: tl.constexpr, RATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per piece and value head: what of it does not depend on the state."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    P: tl.constexpr = 2 * G * D + G * J * W
    piece, head = tl.program_id(0), tl.program_id(1)
    key, which = head // J, head % J
    num = tl.load(table + piece * 3 + 2)
    if num > 0:
        i, d = tl.arange(0, SIZE), tl.arange(0, BLOCK_D)
        token, live = tl.load(table + piece * 3 + 1) + i, i < num
        decay, rate = gates(
            tl.load(b + token * b_token + key * b_head + which, mask=live, other=0.0).to(tl.float32),
            tl.load(a + token * a_token + key * a_head + which, mask=live, other=0.0).to(tl.float32),
            tl.load(a_log + head), tl.load(dt_bias + head), RATE,
        )  # fmt: skip
        total, rate = tl.cumsum(tl.where(live, decay, 0.0), 0), tl.where(live, rate, 0.0)  # no token, no change
        own_k, k_scale = _rows(x + G * D + key * D, token, live, d, d < D, P)
        own_q, q_scale = _rows(x + key * D, token, live, d, d < D, P)
        q_scale *= 1.0 / tl.sqrt(tl.full([], D, tl.float32))
        is_before = i[:, None] >= i[None, :]
        since = tl.where(is_before, tl.exp(tl.where(is_before, total[:, None] - total[None, :], 0.0)), 0.0)
        since *= k_scale[None, :]
        place = piece.to(tl.int64) * (G * J) + head
        at = place * (SIZE * SIZE) + i[:, None] * SIZE + i[None, :]
        tl.store(scores + at, alike(own_q, own_k, NARROW, EMULATED) * since * q_scale[:, None])
        system = alike(own_k, own_k, NARROW, EMULATED) * since * (rate * k_scale)[:, None]
        solved = inverse(tl.where(i[:, None] > i[None, :], system, 0.0))
        tl.store(inverses + at, solved * rate[None, :])
        whole, at_scale = tl.sum(tl.where(i == SIZE - 1, total, 0.0), 0), scales + place * (4 * SIZE) + i
        tl.store(at_scale, tl.exp(total) * k_scale)
        tl.store(at_scale + SIZE, tl.exp(total) * q_scale)
        tl.store(at_scale + 2 * SIZE, tl.exp(whole - total) * k_scale)
        tl.store(at_scale + 3 * SIZE, tl.exp(whole) + tl.zeros_like(total))


@triton.jit
def _fold_kernel(
    x, rows, pieces, table, saves, inverses, scores, scales, out, state, copies,
    G: tl.constexpr, J: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
    NARROW: tl.constexpr, EMULATED: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per block of values, value head and request: its pieces in order."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    P: tl.constexpr = 2 * G * D + G * J * W
    head, request = tl.program_id(1), tl.program_id(2)
    key = head // J
    i, d, w = tl.arange(0, SIZE), tl.arange(0, BLOCK_D), tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    in_d, in_w = d < D, w < W
    inside, at = in_d[:, None] & in_w[None, :], head * (D * W) + d[:, None] * W + w[None, :]
    first, last = tl.load(pieces + request), tl.load(pieces + request + 1)
    if first < last:
        own = state + tl.load(rows + request) * (G * J * D * W) + at
        now = tl.load(own, mask=inside, other=0.0).to(tl.float32)
        # Of wide keys, addresses of shared memory that are kept across pieces take more registers than there are.
        for piece in tl.range(first, last, num_stages=STAGES, disable_licm=BLOCK_D > 64):
            token, live = tl.load(table + piece * 3 + 1) + i, i < tl.load(table + piece * 3 + 2)
            in_key, in_value = live[:, None] & in_d[None, :], live[:, None] & in_w[None, :]
            source = x + token[:, None] * P
            queries = tl.load(source + key * D + d[None, :], mask=in_key, other=0.0)
            keys = tl.load(source + G * D + key * D + d[None, :], mask=in_key, other=0.0)
            value = tl.load(source + 2 * G * D + head * W + w[None, :], mask=in_value, other=0.0).to(tl.float32)
            place = piece * (G * J) + head
            square, scale = place * (SIZE * SIZE) + i[:, None] * SIZE + i[None, :], scales + place * (4 * SIZE) + i
            held = exact(keys, now, 3, NARROW, EMULATED) * tl.load(scale)[:, None]
            change = product(tl.load(inverses + square), value - held)
            read = exact(queries, now, 2, NARROW, EMULATED) * tl.load(scale + SIZE)[:, None]
            # What is read is rounded to bfloat16: one pass of tf32 loses nothing of that.
            score = tl.load(scores + square)
            read += tl.dot(score, change, input_precision="tf32") if NARROW else product(score, change)
            target = out + (token[:, None] * (G * J) + head) * W + w[None, :]
            tl.store(target, read.to(out.dtype.element_ty), mask=in_value)
            late = change * tl.load(scale + 2 * SIZE)[:, None]
            kept = tl.load(scales + place * (4 * SIZE) + 3 * SIZE)
            now = now * kept + exact(tl.trans(keys), late, 3, NARROW, EMULATED)
            now = now.to(state.dtype.element_ty).to(tl.float32)
            copy = tl.load(saves + piece)
            if copy >= 0:
                tl.store(copies + copy * (G * J * D * W) + at, now, mask=inside)
        tl.store(own, now, mask=inside)


def gdn_prefill(
    x: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, rows: Tensor, starts: Tensor, pieces: Tensor,
    table: Tensor, saves: Tensor, state: Tensor, copies: Tensor, *, rate: float = 1.0,
) -> Tensor:  # fmt: skip
    """See `delta.gdn_prefill`: two kernels."""
    b, a = (one if one.stride(-1) == 1 else one.contiguous() for one in (b, a))
    x = x.contiguous()
    (_, keys, per_key), (_, heads, dim, width) = b.shape, state.shape
    out = x.new_zeros(len(x), heads, width)
    if len(rows) == 0:
        return out
    squares = torch.empty(2, len(table), heads, PIECE, PIECE, dtype=torch.float32, device=x.device)
    scales = torch.empty(len(table), heads, 4, PIECE, dtype=torch.float32, device=x.device)
    sizes = {"G": keys, "J": per_key, "D": dim, "W": width, "BLOCK_D": max(16, triton.next_power_of_2(dim))}
    sizes |= {"NARROW": x.dtype == torch.bfloat16, "EMULATED": is_interpreted()}
    _prepare_kernel[(len(table), heads)](
        x, b, a, a_log, dt_bias, table, *squares, scales, *b.stride()[:2], *a.stride()[:2], **sizes,
        RATE=rate, num_warps=PREPARE_WARPS, **launch_options(x),
    )  # fmt: skip
    block, warps, stages = tile(width)
    _fold_kernel[(triton.cdiv(width, block), heads, len(rows))](
        x, rows, pieces, table, saves, *squares, scales, out, state, copies, **sizes, BLOCK_W=block, STAGES=stages,
        num_warps=warps, **launch_options(x),
    )  # fmt: skip
    return out


def tile(width: int) -> tuple[int, int, int]:
    """Return values of a program of the fold, its warps, and how many pieces are loaded ahead."""
    return min(32, max(16, triton.next_power_of_2(width))), 4, 2
