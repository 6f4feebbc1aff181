"""Gated DeltaNet token by token in Triton: the decode step in one kernel, requests in order, gated norm, sigmoid gate.

The state of a head, `[D, W]` float32, stands in registers: it is read once and written once. Sums are in float32. Where
states are kept in fewer bits, they are rounded behind each token.

T tokens, G key heads, each with J value heads, N = G J; D and W widths of a key and of a value; P channels, K taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.sdk.layers.ops.delta import GateAct
from dovetail_backends.kernels.triton.pdl import launch_options

EPS: tl.constexpr = tl.constexpr(1e-6)
"""Of the norm of queries and keys."""
NORM_TILE = 2048
"""Numbers that a program of the gated norm has: 16 a thread."""


@triton.jit
def silu(x):
    """`x * sigmoid(x)` of float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """`log(1 + e^x)` of float32."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def decays(a, a_log, dt_bias, BOUND: tl.constexpr):
    """Decays in log space of float32 numbers, at least BOUND if that is not 0."""
    if BOUND == 0.0:
        found = -tl.exp(a_log) * softplus(a + dt_bias)
    else:
        found = BOUND / (1.0 + tl.exp(tl.minimum(-tl.exp(a_log) * (a + dt_bias), 80.0)))
    return found


@triton.jit
def gates(b, a, a_log, dt_bias, RATE: tl.constexpr):
    """Decay in log space, and rate, at most RATE, of float32 numbers."""
    return decays(a, a_log, dt_bias, 0.0), RATE / (1.0 + tl.exp(-b))


@triton.jit
def fold_token(state, q, k, v, decay, rate):
    """Fold a token into `[D, W]`: what it reads `[W]`, and the state. `q` and `k` are `[D]`."""
    state = state * tl.exp(decay)
    change = (v - tl.sum(state * k[:, None], 0)) * rate
    state = state + k[:, None] * change[None, :]
    return tl.sum(state * q[:, None], 0), state


@triton.jit
def unit(x, divisor):
    """A query or a key of length 1, over the root of a divisor."""
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 0) + EPS)) * (1.0 / tl.sqrt(divisor))


@triton.jit
def normed(read, squares, gate, weight, eps, W, dtype: tl.constexpr, SIGMOID: tl.constexpr):
    """RMS norm of heads times SiLU or SIGMOID of gates, rounded as the meaning rounds. `squares`: each head's sum."""
    found = (read * (1.0 / tl.sqrt(squares / W + eps))).to(dtype).to(tl.float32)
    by = 1.0 / (1.0 + tl.exp(-gate)) if SIGMOID else silu(gate)
    return (weight * found).to(dtype).to(tl.float32) * by


@triton.jit
def convolved(
    source, ring, weight, bias, channel, inside, position, P: tl.constexpr, K: tl.constexpr, TAPS: tl.constexpr
):
    """A token's channels behind the convolution, float32: of its own inputs, and of those before it in the ring.

    All taps stand in one tile, so that each number is loaded by one thread.
    """
    tap = tl.arange(0, TAPS)[:, None]
    is_new = tap == K - 1
    new = tl.load(source[None, :] + tap * 0, mask=inside[None, :] & is_new, other=0.0)
    slot = (position + 1 + tap) % K
    old = tl.load(ring + slot * P + channel[None, :], mask=inside[None, :] & (tap < K - 1), other=0.0)
    taken = tl.load(weight + channel[None, :] * K + tap, mask=inside[None, :] & (tap < K), other=0.0)
    total = tl.sum((new + old).to(tl.float32) * taken.to(tl.float32), 0)
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return silu(total.to(new.dtype).to(tl.float32)).to(new.dtype).to(tl.float32)


@triton.jit
def _decode_kernel(
    q, k, v, z, b, a, rows, positions, weight, a_log, dt_bias, norm, out, conv, state, eps,
    q_token, q_head, k_token, k_head, v_token, v_head, z_token, z_head, b_token, b_head, a_token, a_head,
    G: tl.constexpr, J: tl.constexpr, D: tl.constexpr, W: tl.constexpr, K: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCKS: tl.constexpr, RATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per token and value head, which goes through blocks of values: the next one is loaded meanwhile."""
    if PDL:
        gdc_launch_dependents()
    P: tl.constexpr = 2 * G * D + G * J * W
    ALL_W: tl.constexpr = BLOCKS * BLOCK_W
    NUM: tl.constexpr = (W + BLOCK_W - 1) // BLOCK_W
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, which = head // J, head % J
    d, w, every = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W), tl.arange(0, ALL_W)
    in_d, in_all = d < D, every < W
    row = tl.load(rows + token)  # as the state, it was there before this step began
    own = state + (row * (G * J) + head) * (D * W) + d[:, None] * W + w[None, :]
    ahead = tl.load(own, mask=in_d[:, None] & (w < W)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    position = tl.load(positions + token)
    ring = conv + row * (K * P)
    at_q, at_k, at_v = key * D + d, G * D + key * D + d, 2 * G * D + head * W + every
    from_q, from_k = q + token * q_token + key * q_head + d, k + token * k_token + key * k_head + d
    from_v = v + token * v_token + key * v_head + which * W + every
    q_now = convolved(from_q, ring, weight, None, at_q, in_d, position, P, K, TAPS)
    k_now = convolved(from_k, ring, weight, None, at_k, in_d, position, P, K, TAPS)
    values = convolved(from_v, ring, weight, None, at_v, in_all, position, P, K, TAPS)
    # Nobody reads the slot that is written: a ring has one more than what is read.
    slot, is_first = ring + (position % K) * P, which == 0
    tl.store(slot + at_v, tl.load(from_v, mask=in_all, other=0.0), mask=in_all)
    tl.store(slot + at_q, tl.load(from_q, mask=in_d & is_first, other=0.0), mask=in_d & is_first)
    tl.store(slot + at_k, tl.load(from_k, mask=in_d & is_first, other=0.0), mask=in_d & is_first)
    decay, rate = gates(
        tl.load(b + token * b_token + key * b_head + which).to(tl.float32),
        tl.load(a + token * a_token + key * a_head + which).to(tl.float32),
        tl.load(a_log + head), tl.load(dt_bias + head), RATE,
    )  # fmt: skip
    q_now, k_now = unit(q_now, tl.full([], D, tl.float32)), unit(k_now, tl.full([], 1, tl.float32))
    block = tl.arange(0, BLOCKS)[:, None]
    values, reads = tl.reshape(values, [BLOCKS, BLOCK_W]), tl.zeros([BLOCKS, BLOCK_W], tl.float32)
    # Two rounds: of code without a loop, Triton folds the first block twice, once in a layout that it converts all to.
    for number in tl.range(0, NUM, loop_unroll_factor=1 if NUM % 2 else NUM // 2):
        now, from_w = ahead.to(tl.float32), number * BLOCK_W
        inside, following = in_d[:, None] & (from_w + w < W)[None, :], from_w + BLOCK_W + w < W
        ahead = tl.load(own + from_w + BLOCK_W, mask=in_d[:, None] & following[None, :], other=0.0)
        value = tl.sum(tl.where(block == number, values, 0.0), 0)
        read, now = fold_token(now, q_now, k_now, value, decay, rate)
        tl.store(own + from_w, now, mask=inside)
        reads = tl.where(block == number, read[None, :], reads)
    read = tl.reshape(reads, [ALL_W])
    gate = tl.load(z + token * z_token + key * z_head + which * W + every, mask=in_all, other=0.0).to(tl.float32)
    scale = tl.load(norm + every, mask=in_all, other=0.0).to(tl.float32)
    read = read.to(out.dtype.element_ty).to(tl.float32)
    found = normed(read, tl.sum(read * read, 0), gate, scale, eps, W, out.dtype.element_ty, False)
    tl.store(out + (token * (G * J) + head) * W + every, found.to(out.dtype.element_ty), mask=in_all)


def gdn_decode(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor, a: Tensor, rows: Tensor, positions: Tensor, weight: Tensor,
    a_log: Tensor, dt_bias: Tensor, norm: Tensor, eps: float, conv: Tensor, state: Tensor, *, rate: float = 1.0,
) -> Tensor:  # fmt: skip
    """See `delta.gdn_decode`: one kernel."""
    (num, keys, dim), per_key, width = q.shape, b.shape[2], state.shape[3]
    q, k, v, z, b, a = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v, z, b, a))
    heads = keys * per_key
    out = torch.empty(num, heads * width, dtype=q.dtype, device=q.device)
    if num == 0:
        return out
    strides = [stride for one in (q, k, v, z, b, a) for stride in one.stride()[:2]]
    block_d, block_w, warps = tile(dim, width)
    _decode_kernel[(num, heads)](
        q, k, v, z, b, a, rows, positions, weight, a_log, dt_bias, norm, out, conv, state, eps, *strides,
        G=keys, J=per_key, D=dim, W=width, K=conv.shape[1], TAPS=triton.next_power_of_2(conv.shape[1]),
        BLOCK_D=block_d, BLOCK_W=block_w, BLOCKS=triton.next_power_of_2(triton.cdiv(width, block_w)), RATE=rate,
        num_warps=warps, **launch_options(q),
    )  # fmt: skip
    return out


def tile(dim: int, width: int) -> tuple[int, int, int]:
    """Return the block of a state that a program has in registers, `[D, some of W]`, and its warps: 32 a thread."""
    block_d = triton.next_power_of_2(dim)
    block_w = min(32, triton.next_power_of_2(width))
    return block_d, block_w, max(1, min(8, block_d * block_w // 1024))


@triton.jit
def _by_token_kernel(
    x, b, a, a_log, dt_bias, rows, pieces, table, saves, out, state, copies,
    b_token, b_head, a_token, a_head,
    G: tl.constexpr, J: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, RATE: tl.constexpr, EACH: tl.constexpr, BOUND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per block of values, value head and request: all of its tokens, one by one.

    EACH number of a key has a decay, or each head.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    P: tl.constexpr = 2 * G * D + G * J * W
    head, request = tl.program_id(1), tl.program_id(2)
    key, which = head // J, head % J
    d, w = tl.arange(0, BLOCK_D), tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    in_d, in_w = d < D, w < W
    inside = in_d[:, None] & in_w[None, :]
    at = head * (D * W) + d[:, None] * W + w[None, :]
    first, last = tl.load(pieces + request), tl.load(pieces + request + 1)
    if first < last:
        own = state + tl.load(rows + request) * (G * J * D * W) + at
        now = tl.load(own, mask=inside, other=0.0).to(tl.float32)
        a_own = tl.load(a_log + head)
        bias = tl.load(dt_bias + head * D + d, mask=in_d, other=0.0) if EACH else tl.load(dt_bias + head)
        dim, one = tl.full([], D, tl.float32), tl.full([], 1, tl.float32)
        for piece in range(first, last):
            begin = tl.load(table + piece * 3 + 1)
            end = begin + tl.load(table + piece * 3 + 2)
            for token in range(begin, end):
                source = x + token * P
                q = tl.load(source + key * D + d, mask=in_d, other=0.0).to(tl.float32)
                k = tl.load(source + G * D + key * D + d, mask=in_d, other=0.0).to(tl.float32)
                v = tl.load(source + 2 * G * D + head * W + w, mask=in_w, other=0.0).to(tl.float32)
                from_a = a + token * a_token + key * a_head
                step = tl.load(from_a + d, mask=in_d, other=0.0) if EACH else tl.load(from_a + which)
                number = tl.load(b + token * b_token + key * b_head + which).to(tl.float32)
                decay, rate = decays(step.to(tl.float32), a_own, bias, BOUND), RATE / (1.0 + tl.exp(-number))
                decay = decay[:, None] if EACH else decay
                read, now = fold_token(now, unit(q, dim), unit(k, one), v, decay, rate)
                now = now.to(state.dtype.element_ty).to(tl.float32)
                tl.store(out + (token * (G * J) + head) * W + w, read.to(out.dtype.element_ty), mask=in_w)
            copy = tl.load(saves + piece)
            if copy >= 0:
                tl.store(copies + copy * (G * J * D * W) + at, now, mask=inside)
        tl.store(own, now, mask=inside)


def gdn_prefill_by_token(
    x: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, rows: Tensor, starts: Tensor, pieces: Tensor,
    table: Tensor, saves: Tensor, state: Tensor, copies: Tensor, *, rate: float = 1.0,
) -> Tensor:  # fmt: skip
    """See `delta.gdn_prefill_by_token`: one kernel, the same for requests of one token and of many."""
    return by_token(x, b, a, a_log, dt_bias, rows, pieces, table, saves, state, copies, rate)


def by_token(
    x: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, rows: Tensor, pieces: Tensor, table: Tensor,
    saves: Tensor, state: Tensor, copies: Tensor, rate: float, *, each: bool = False, bound: float = 0.0,
) -> Tensor:  # fmt: skip
    """Fold tokens in order; `each` number of a key has a decay, of `a` `[T, G, D]`, or each head, of `[T, G, J]`."""
    x, b, a = (one if one.stride(-1) == 1 else one.contiguous() for one in (x, b, a))
    (_, keys, per_key), (_, heads, dim, width) = b.shape, state.shape
    out = x.new_zeros(len(x), heads, width)
    if len(rows) == 0:
        return out
    block_d, block_w, warps = tile(dim, width)
    _by_token_kernel[(triton.cdiv(width, block_w), heads, len(rows))](
        x.contiguous(), b, a, a_log, dt_bias, rows, pieces, table, saves, out, state, copies,
        *b.stride()[:2], *a.stride()[:2], G=keys, J=per_key, D=dim, W=width, BLOCK_D=block_d, BLOCK_W=block_w,
        RATE=rate, EACH=each, BOUND=bound, num_warps=warps, **launch_options(x),
    )  # fmt: skip
    return out


@triton.jit
def _gated_norm_kernel(
    x, gate, weight, out, eps, num, x_token, x_head, g_token, g_head,
    N: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr, SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per some heads of tokens, counted through."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, w = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_W)[None, :]
    token, head = (row // N)[:, None], (row % N)[:, None]
    in_w = w < W
    inside = (row < num)[:, None] & in_w
    read = tl.load(x + token * x_token + head * x_head + w, mask=inside, other=0.0).to(tl.float32)
    by = tl.load(gate + token * g_token + head * g_head + w, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + w, mask=in_w, other=0.0).to(tl.float32)
    found = normed(read, tl.sum(read * read, 1)[:, None], by, scale, eps, W, out.dtype.element_ty, SIGMOID)
    tl.store(out + row[:, None] * W + w, found.to(out.dtype.element_ty), mask=inside)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, act: GateAct = "silu") -> Tensor:
    """See `delta.gated_rms_norm`: one kernel."""
    x, gate = (one if one.stride(-1) == 1 else one.contiguous() for one in (x, gate))
    num, heads, width = x.shape
    out = torch.empty(num, heads * width, dtype=x.dtype, device=x.device)
    if num:
        block_w = triton.next_power_of_2(width)
        block = max(1, NORM_TILE // block_w)
        _gated_norm_kernel[(triton.cdiv(num * heads, block),)](
            x, gate, weight, out, eps, num * heads, *x.stride()[:2], *gate.stride()[:2],
            N=heads, W=width, BLOCK=block, BLOCK_W=block_w, SIGMOID=act == "sigmoid", num_warps=4, **launch_options(x),
        )  # fmt: skip
    return out


@triton.jit
def _sigmoid_gate_kernel(
    x, gate, out, x_token, x_head, g_token, g_head,
    N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, head, d = at < N * D, at // D, at % D
    by = tl.load(gate + token * g_token + head * g_head + d, mask=inside, other=0.0)
    value = tl.load(x + token * x_token + head * x_head + d, mask=inside, other=0.0)
    share = (1.0 / (1.0 + tl.exp(-by.to(tl.float32)))).to(by.dtype).to(tl.float32)
    tl.store(out + token * N * D + at, (value.to(tl.float32) * share).to(value.dtype), mask=inside)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See `delta.sigmoid_gate`: one kernel."""
    x, gate = (one if one.stride(-1) == 1 else one.contiguous() for one in (x, gate))
    num, heads, dim = x.shape
    out = torch.empty(num, heads * dim, dtype=x.dtype, device=x.device)
    if num:
        _sigmoid_gate_kernel[(num, triton.cdiv(heads * dim, 1024))](
            x, gate, out, *x.stride()[:2], *gate.stride()[:2], N=heads, D=dim, BLOCK=1024, num_warps=4,
            **launch_options(x),
        )  # fmt: skip
    return out
