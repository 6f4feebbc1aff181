"""Kimi Delta Attention in Triton: the decode step in one kernel, and requests token by token.

T tokens, G heads; D and W widths of a key and of a value; P channels, K taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail_backends.kernels.triton.delta import by_token, convolved, decays, fold_token, tile, unit
from dovetail_backends.kernels.triton.pdl import launch_options


@triton.jit
def _decode_kernel(
    q, k, v, b, f, rows, positions, weight, a_log, dt_bias, out, conv, state,
    q_token, q_head, k_token, k_head, v_token, v_head, f_token, f_head, b_token, b_head,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, K: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCKS: tl.constexpr, BOUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per token and head, which goes through blocks of values: the next one is loaded meanwhile."""
    if PDL:
        gdc_launch_dependents()
    P: tl.constexpr = G * (2 * D + W)
    ALL_W: tl.constexpr = BLOCKS * BLOCK_W
    NUM: tl.constexpr = (W + BLOCK_W - 1) // BLOCK_W
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, w, every = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W), tl.arange(0, ALL_W)
    in_d, in_all = d < D, every < W
    row = tl.load(rows + token)  # as the state, it was there before this step began
    own = state + (row * G + head) * (D * W) + d[:, None] * W + w[None, :]
    ahead = tl.load(own, mask=in_d[:, None] & (w < W)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    position = tl.load(positions + token)
    ring = conv + row * (K * P)
    at_q, at_k, at_v = head * D + d, G * D + head * D + d, 2 * G * D + head * W + every
    from_q, from_k = q + token * q_token + head * q_head + d, k + token * k_token + head * k_head + d
    from_v = v + token * v_token + head * v_head + every
    q_now = convolved(from_q, ring, weight, None, at_q, in_d, position, P, K, TAPS)
    k_now = convolved(from_k, ring, weight, None, at_k, in_d, position, P, K, TAPS)
    values = convolved(from_v, ring, weight, None, at_v, in_all, position, P, K, TAPS)
    # Nobody reads the slot that is written: a ring has one more than what is read.
    slot = ring + (position % K) * P
    tl.store(slot + at_v, tl.load(from_v, mask=in_all, other=0.0), mask=in_all)
    tl.store(slot + at_q, tl.load(from_q, mask=in_d, other=0.0), mask=in_d)
    tl.store(slot + at_k, tl.load(from_k, mask=in_d, other=0.0), mask=in_d)
    step = tl.load(f + token * f_token + head * f_head + d, mask=in_d, other=0.0).to(tl.float32)
    gate = tl.load(b + token * b_token + head * b_head).to(tl.float32)
    bias = tl.load(dt_bias + head * D + d, mask=in_d, other=0.0)
    decay, rate = decays(step, tl.load(a_log + head), bias, BOUND), 1.0 / (1.0 + tl.exp(-gate))
    q_now, k_now = unit(q_now, tl.full([], D, tl.float32)), unit(k_now, tl.full([], 1, tl.float32))
    block, values = tl.arange(0, BLOCKS)[:, None], tl.reshape(values, [BLOCKS, BLOCK_W])
    target = out + (token * G + head) * W + w
    # Two rounds, as in `delta`.
    for number in tl.range(0, NUM, loop_unroll_factor=1 if NUM % 2 else NUM // 2):
        now, from_w = ahead.to(tl.float32), number * BLOCK_W
        in_w, following = from_w + w < W, from_w + BLOCK_W + w < W
        ahead = tl.load(own + from_w + BLOCK_W, mask=in_d[:, None] & following[None, :], other=0.0)
        value = tl.sum(tl.where(block == number, values, 0.0), 0)
        read, now = fold_token(now, q_now, k_now, value, decay[:, None], rate)
        tl.store(own + from_w, now, mask=in_d[:, None] & in_w[None, :])
        tl.store(target + from_w, read.to(out.dtype.element_ty), mask=in_w)


def kda_prefill_by_token(
    x: Tensor, b: Tensor, f: Tensor, a_log: Tensor, dt_bias: Tensor, rows: Tensor, starts: Tensor, pieces: Tensor,
    table: Tensor, saves: Tensor, state: Tensor, copies: Tensor, *, bound: float = 0.0,
) -> Tensor:  # fmt: skip
    """See `kda.kda_prefill_by_token`: one kernel, the same for requests of one token and of many."""
    rest = rows, pieces, table, saves, state, copies
    return by_token(x, b[..., None], f, a_log, dt_bias, *rest, 1.0, each=True, bound=bound)


def kda_decode(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, f: Tensor, rows: Tensor, positions: Tensor, weight: Tensor,
    a_log: Tensor, dt_bias: Tensor, conv: Tensor, state: Tensor, *, bound: float = 0.0,
) -> Tensor:  # fmt: skip
    """See `kda.kda_decode`: one kernel."""
    q, k, v, f = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v, f))
    (num, heads, dim), width = q.shape, v.shape[2]
    out = torch.empty(num, heads, width, dtype=q.dtype, device=q.device)
    if num:
        strides = [stride for one in (q, k, v, f, b) for stride in one.stride()[:2]]
        block_d, block_w, warps = tile(dim, width)
        _decode_kernel[(num, heads)](
            q, k, v, b, f, rows, positions, weight, a_log, dt_bias, out, conv, state, *strides,
            G=heads, D=dim, W=width, K=conv.shape[1], TAPS=triton.next_power_of_2(conv.shape[1]),
            BLOCK_D=block_d, BLOCK_W=block_w, BLOCKS=triton.next_power_of_2(triton.cdiv(width, block_w)), BOUND=bound,
            num_warps=warps, **launch_options(q),
        )  # fmt: skip
    return out
