"""Mamba 2 token by token in Triton: the decode step in one kernel, requests in order, and the gated norm of groups.

The state of a head, `[D, W]` float32, stands in registers: it is read once and written once. Sums are in float32.

T tokens, G groups, each with a key, a query and J heads, N = G J; D and W widths of a key and of a head; P channels, K
taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail_backends.kernels.triton.delta import convolved, silu, softplus
from dovetail_backends.kernels.triton.pdl import launch_options


@triton.jit
def steps(dt, dt_bias, low, high):
    """Steps of float32 numbers."""
    return tl.minimum(tl.maximum(softplus(dt + dt_bias), low), high)


@triton.jit
def fold_token(state, q, k, v, step, a):
    """Fold a token into `[D, W]`: what it reads `[W]`, and the state. `q` and `k` are `[D]`."""
    state = state * tl.exp(a * step) + k[:, None] * (v * step)[None, :]
    return tl.sum(state * q[:, None], 0), state


@triton.jit
def _decode_kernel(
    q, k, v, dt, rows, positions, weight, bias, a_log, dt_bias, skip, out, conv, state, low, high,
    q_token, q_head, k_token, k_head, v_token, v_head, d_token, d_head,
    G: tl.constexpr, J: tl.constexpr, D: tl.constexpr, W: tl.constexpr, K: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per token and head, which goes through blocks of values: the next one is loaded meanwhile."""
    if PDL:
        gdc_launch_dependents()
    P: tl.constexpr = 2 * G * D + G * J * W
    ALL_W: tl.constexpr = BLOCKS * BLOCK_W
    NUM: tl.constexpr = (W + BLOCK_W - 1) // BLOCK_W
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group, which = head // J, head % J
    d, w, every = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W), tl.arange(0, ALL_W)
    in_d, in_all = d < D, every < W
    row = tl.load(rows + token)  # as the state, it was there before this step began
    own = state + (row * (G * J) + head) * (D * W) + d[:, None] * W + w[None, :]
    ahead = tl.load(own, mask=in_d[:, None] & (w < W)[None, :], other=0.0)
    a, own_bias, own_skip = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head), tl.load(skip + head)
    if PDL:
        gdc_wait()
    position = tl.load(positions + token)
    ring = conv + row * (K * P)
    at_q, at_k, at_v = group * D + d, G * D + group * D + d, 2 * G * D + head * W + every
    from_q, from_k = q + token * q_token + group * q_head + d, k + token * k_token + group * k_head + d
    from_v = v + token * v_token + group * v_head + which * W + every
    q_now = convolved(from_q, ring, weight, bias, at_q, in_d, position, P, K, TAPS)
    k_now = convolved(from_k, ring, weight, bias, at_k, in_d, position, P, K, TAPS)
    values = convolved(from_v, ring, weight, bias, at_v, in_all, position, P, K, TAPS)
    # Nobody reads the slot that is written: a ring has one more than what is read.
    slot, is_first = ring + (position % K) * P, which == 0
    tl.store(slot + at_v, tl.load(from_v, mask=in_all, other=0.0), mask=in_all)
    tl.store(slot + at_q, tl.load(from_q, mask=in_d & is_first, other=0.0), mask=in_d & is_first)
    tl.store(slot + at_k, tl.load(from_k, mask=in_d & is_first, other=0.0), mask=in_d & is_first)
    step = steps(tl.load(dt + token * d_token + group * d_head + which).to(tl.float32), own_bias, low, high)
    block, target = tl.arange(0, BLOCKS)[:, None], out + (token * (G * J) + head) * W + w
    by_block = tl.reshape(values, [BLOCKS, BLOCK_W])
    # Two rounds, as in `delta`.
    for number in tl.range(0, NUM, loop_unroll_factor=1 if NUM % 2 else NUM // 2):
        now, from_w = ahead.to(tl.float32), number * BLOCK_W
        inside, following = in_d[:, None] & (from_w + w < W)[None, :], from_w + BLOCK_W + w < W
        ahead = tl.load(own + from_w + BLOCK_W, mask=in_d[:, None] & following[None, :], other=0.0)
        value = tl.sum(tl.where(block == number, by_block, 0.0), 0)
        read, now = fold_token(now, q_now, k_now, value, step, a)
        tl.store(own + from_w, now, mask=inside)
        read = (read + own_skip * value).to(out.dtype.element_ty)
        tl.store(target + from_w, read, mask=from_w + w < W)


def ssd_decode(
    q: Tensor, k: Tensor, v: Tensor, dt: Tensor, rows: Tensor, positions: Tensor, weight: Tensor, bias: Tensor | None,
    a_log: Tensor, dt_bias: Tensor, skip: Tensor, low: float, high: float, conv: Tensor, state: Tensor,
) -> Tensor:  # fmt: skip
    """See `ssd.ssd_decode`: one kernel."""
    q, k, v, dt = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v, dt))
    (num, groups, dim), per_group, width = q.shape, dt.shape[2], state.shape[3]
    heads = groups * per_group
    out = torch.empty(num, heads, width, dtype=q.dtype, device=q.device)
    if num == 0:
        return out
    strides = [stride for one in (q, k, v, dt) for stride in one.stride()[:2]]
    block_d, block_w, warps = tile(dim, width)
    _decode_kernel[(num, heads)](
        q, k, v, dt, rows, positions, weight, bias, a_log, dt_bias, skip, out, conv, state, low, high, *strides,
        G=groups, J=per_group, D=dim, W=width, K=conv.shape[1], TAPS=triton.next_power_of_2(conv.shape[1]),
        BLOCK_D=block_d, BLOCK_W=block_w, BLOCKS=triton.next_power_of_2(triton.cdiv(width, block_w)), num_warps=warps,
        **launch_options(q),
    )  # fmt: skip
    return out


def tile(dim: int, width: int) -> tuple[int, int, int]:
    """Return the block of a state that a program has in registers, `[D, some of W]`, and its warps: 64 a thread.

    Of nine tiles of 64 rows on an H200, 32 values by 2 warps took least: 0.76 of the rate of copies. Where heads are
    narrow, what spills is the convolution of D numbers: so a warp has 128 of them at most.
    """
    block_d = triton.next_power_of_2(dim)
    block_w = min(32, triton.next_power_of_2(width))
    return block_d, block_w, max(1, block_d // 128, min(8, block_d * block_w // 2048))


@triton.jit
def _by_token_kernel(
    x, dt, a_log, dt_bias, skip, rows, pieces, table, saves, out, state, copies, low, high, d_token, d_head,
    G: tl.constexpr, J: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per block of values, head and request: all of its tokens, one by one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    P: tl.constexpr = 2 * G * D + G * J * W
    head, request = tl.program_id(1), tl.program_id(2)
    group, which = head // J, head % J
    d, w = tl.arange(0, BLOCK_D), tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    in_d, in_w = d < D, w < W
    inside = in_d[:, None] & in_w[None, :]
    at = head * (D * W) + d[:, None] * W + w[None, :]
    first, last = tl.load(pieces + request), tl.load(pieces + request + 1)
    if first < last:
        own = state + tl.load(rows + request) * (G * J * D * W) + at
        now = tl.load(own, mask=inside, other=0.0).to(tl.float32)
        a, own_bias, own_skip = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head), tl.load(skip + head)
        for piece in range(first, last):
            begin = tl.load(table + piece * 3 + 1)
            end = begin + tl.load(table + piece * 3 + 2)
            for token in range(begin, end):
                source = x + token * P
                q = tl.load(source + group * D + d, mask=in_d, other=0.0).to(tl.float32)
                k = tl.load(source + G * D + group * D + d, mask=in_d, other=0.0).to(tl.float32)
                v = tl.load(source + 2 * G * D + head * W + w, mask=in_w, other=0.0).to(tl.float32)
                number = tl.load(dt + token * d_token + group * d_head + which).to(tl.float32)
                read, now = fold_token(now, q, k, v, steps(number, own_bias, low, high), a)
                now = now.to(state.dtype.element_ty).to(tl.float32)
                read += own_skip * v
                tl.store(out + (token * (G * J) + head) * W + w, read.to(out.dtype.element_ty), mask=in_w)
            copy = tl.load(saves + piece)
            if copy >= 0:
                tl.store(copies + copy * (G * J * D * W) + at, now, mask=inside)
        tl.store(own, now, mask=inside)


def ssd_prefill_by_token(
    x: Tensor, dt: Tensor, a_log: Tensor, dt_bias: Tensor, skip: Tensor, low: float, high: float, rows: Tensor,
    starts: Tensor, pieces: Tensor, table: Tensor, saves: Tensor, state: Tensor, copies: Tensor,
) -> Tensor:  # fmt: skip
    """See `ssd.ssd_prefill_by_token`: one kernel, the same for requests of one token and of many."""
    dt = dt if dt.stride(-1) == 1 else dt.contiguous()
    (_, groups, per_group), (_, heads, dim, width) = dt.shape, state.shape
    out = x.new_zeros(len(x), heads, width)
    if len(rows) == 0:
        return out
    block_d, block_w, warps = tile(dim, width)
    _by_token_kernel[(triton.cdiv(width, block_w), heads, len(rows))](
        x.contiguous(), dt, a_log, dt_bias, skip, rows, pieces, table, saves, out, state, copies, low, high,
        *dt.stride()[:2], G=groups, J=per_group, D=dim, W=width, BLOCK_D=block_d, BLOCK_W=block_w,
        num_warps=warps, **launch_options(x),
    )  # fmt: skip
    return out


@triton.jit
def _group_norm_kernel(
    x, gate, weight, out, eps, x_token, x_group, g_token, g_group,
    N: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per token and group."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, group, w = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside = w < W
    found = tl.load(x + token * x_token + group * x_group + w, mask=inside, other=0.0).to(tl.float32)
    by = silu(tl.load(gate + token * g_token + group * g_group + w, mask=inside, other=0.0).to(tl.float32))
    if weight is None:
        found = found * by
    else:
        if not FIRST:
            found = found * by
        scale = tl.load(weight + group * W + w, mask=inside, other=0.0).to(tl.float32)
        found = (found * (1.0 / tl.sqrt(tl.sum(found * found, 0) / W + eps))).to(out.dtype.element_ty).to(
            tl.float32
        ) * scale
        if FIRST:
            found = found.to(out.dtype.element_ty).to(tl.float32) * by
    tl.store(out + (token * N + group) * W + w, found.to(out.dtype.element_ty), mask=inside)


def gated_group_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, *, norm_first: bool) -> Tensor:
    """See `ssd.gated_group_norm`: one kernel."""
    x, gate = (one if one.stride(-1) == 1 else one.contiguous() for one in (x, gate))
    num, groups, width = x.shape
    out = torch.empty(num, groups * width, dtype=x.dtype, device=x.device)
    if num:
        block = triton.next_power_of_2(width)
        _group_norm_kernel[(num, groups)](
            x, gate, weight, out, eps, *x.stride()[:2], *gate.stride()[:2],
            N=groups, W=width, BLOCK=block, FIRST=norm_first, num_warps=min(16, max(1, block // 512)),
            **launch_options(x),
        )  # fmt: skip
    return out
