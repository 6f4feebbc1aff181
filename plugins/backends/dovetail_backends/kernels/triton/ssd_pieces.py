"""Mamba 2 over prompts in Triton: the fold in pieces of 64 tokens.

What does not depend on the state, the products of queries and keys of each group and the decays of each head, is
computed for all pieces at once; then a program for each request, head and block of values goes through the pieces in
order, with its part of the state in registers. Products keep some 22 bits of the state: queries and keys of bfloat16
are multiplied as they are, by float32 in two or three parts. Each piece is one fixed computation.

T tokens, C pieces, B requests, G groups, each with a key, a query and J heads, N = G J; D and W widths of a key and of
a head; P channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.device import is_interpreted
from dovetail.sdk.layers.ops.conv import PIECE
from dovetail_backends.kernels.triton.exact import alike, exact, product
from dovetail_backends.kernels.triton.pdl import launch_options
from dovetail_backends.kernels.triton.ssd import steps

SIZE: tl.constexpr = tl.constexpr(PIECE)
PREPARE_WARPS = 4


@triton.jit
def _prepare_kernel(
    x, dt, a_log, dt_bias, table, products, scales, low, high, d_token, d_head,
    G: tl.constexpr, J: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr,
    NARROW: tl.constexpr, EMULATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per piece and head: its decays; that of a group's first head multiplies queries by keys, too."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    P: tl.constexpr = 2 * G * D + G * J * W
    piece, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group, which = head // J, head % J
    num = tl.load(table + piece * 3 + 2)
    if num > 0:
        i, d = tl.arange(0, SIZE), tl.arange(0, BLOCK_D)
        token, live = tl.load(table + piece * 3 + 1) + i, i < num
        number = tl.load(dt + token * d_token + group * d_head + which, mask=live, other=0.0).to(tl.float32)
        step = tl.where(live, steps(number, tl.load(dt_bias + head), low, high), 0.0)  # no token, no change
        total = tl.cumsum(-tl.exp(tl.load(a_log + head)) * step, 0)
        whole = tl.sum(tl.where(i == SIZE - 1, total, 0.0), 0)
        at = scales + (piece * (G * J) + head) * (4 * SIZE) + i
        tl.store(at, total)
        tl.store(at + SIZE, step)
        tl.store(at + 2 * SIZE, tl.exp(whole - total) * step)
        tl.store(at + 3 * SIZE, tl.exp(whole) + tl.zeros_like(total))
        if which == 0:
            inside = live[:, None] & (d < D)[None, :]
            source = x + token[:, None] * P + group * D + d[None, :]
            queries = tl.load(source, mask=inside, other=0.0)
            keys = tl.load(source + G * D, mask=inside, other=0.0)
            square = products + (piece * G + group) * (SIZE * SIZE) + i[:, None] * SIZE + i[None, :]
            tl.store(square, alike(queries, keys, NARROW, EMULATED))


@triton.jit
def _fold_kernel(
    x, skip, rows, pieces, table, saves, products, scales, out, state, copies,
    G: tl.constexpr, J: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
    NARROW: tl.constexpr, EMULATED: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per block of values, head and request: its pieces in order."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    P: tl.constexpr = 2 * G * D + G * J * W
    head, request = tl.program_id(1), tl.program_id(2)
    group = head // J
    i, d, w = tl.arange(0, SIZE), tl.arange(0, BLOCK_D), tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    in_d, in_w = d < D, w < W
    inside, at = in_d[:, None] & in_w[None, :], head * (D * W) + d[:, None] * W + w[None, :]
    first, last = tl.load(pieces + request), tl.load(pieces + request + 1)
    is_before = i[:, None] >= i[None, :]
    if first < last:
        own = state + tl.load(rows + request) * (G * J * D * W) + at
        now = tl.load(own, mask=inside, other=0.0).to(tl.float32)
        own_skip = tl.load(skip + head)
        # Of wide keys, addresses of shared memory that are kept across pieces take more registers than there are.
        for piece in tl.range(first, last, num_stages=STAGES, disable_licm=BLOCK_D > 64):
            token, live = tl.load(table + piece * 3 + 1) + i, i < tl.load(table + piece * 3 + 2)
            in_key, in_value = live[:, None] & in_d[None, :], live[:, None] & in_w[None, :]
            source = x + token[:, None] * P
            queries = tl.load(source + group * D + d[None, :], mask=in_key, other=0.0)
            keys = tl.load(source + G * D + group * D + d[None, :], mask=in_key, other=0.0)
            value = tl.load(source + 2 * G * D + head * W + w[None, :], mask=in_value, other=0.0).to(tl.float32)
            square = products + (piece * G + group) * (SIZE * SIZE) + i[:, None] * SIZE + i[None, :]
            from_scale = scales + (piece * (G * J) + head) * (4 * SIZE)
            scale = from_scale + i
            total, step = tl.load(scale), tl.load(scale + SIZE)
            since = tl.where(is_before, tl.exp(tl.where(is_before, total[:, None] - total[None, :], 0.0)), 0.0)
            read = exact(queries, now, 2, NARROW, EMULATED) * tl.exp(total)[:, None]
            # What is read is rounded to bfloat16: one pass of tf32 loses nothing of that.
            score = tl.load(square) * since * step[None, :]
            read += tl.dot(score, value, input_precision="tf32") if NARROW else product(score, value)
            read += own_skip * value
            target = out + (token[:, None] * (G * J) + head) * W + w[None, :]
            tl.store(target, read.to(out.dtype.element_ty), mask=in_value)
            late, kept = value * tl.load(scale + 2 * SIZE)[:, None], tl.load(from_scale + 3 * SIZE)
            now = now * kept + exact(tl.trans(keys), late, 3, NARROW, EMULATED)
            now = now.to(state.dtype.element_ty).to(tl.float32)
            copy = tl.load(saves + piece)
            if copy >= 0:
                tl.store(copies + copy * (G * J * D * W) + at, now, mask=inside)
        tl.store(own, now, mask=inside)


def ssd_prefill(
    x: Tensor, dt: Tensor, a_log: Tensor, dt_bias: Tensor, skip: Tensor, low: float, high: float, rows: Tensor,
    starts: Tensor, pieces: Tensor, table: Tensor, saves: Tensor, state: Tensor, copies: Tensor,
) -> Tensor:  # fmt: skip
    """See `ssd.ssd_prefill`: two kernels."""
    dt, x = dt if dt.stride(-1) == 1 else dt.contiguous(), x.contiguous()
    (_, groups, per_group), (_, heads, dim, width) = dt.shape, state.shape
    out = x.new_zeros(len(x), heads, width)
    if len(rows) == 0:
        return out
    products = torch.empty(len(table), groups, PIECE, PIECE, dtype=torch.float32, device=x.device)
    scales = torch.empty(len(table), heads, 4, PIECE, dtype=torch.float32, device=x.device)
    sizes = {"G": groups, "J": per_group, "D": dim, "W": width, "BLOCK_D": max(16, triton.next_power_of_2(dim))}
    sizes |= {"NARROW": x.dtype == torch.bfloat16, "EMULATED": is_interpreted()}
    _prepare_kernel[(len(table), heads)](
        x, dt, a_log, dt_bias, table, products, scales, low, high, *dt.stride()[:2], **sizes,
        num_warps=PREPARE_WARPS, **launch_options(x),
    )  # fmt: skip
    block, warps, stages = tile(width)
    _fold_kernel[(triton.cdiv(width, block), heads, len(rows))](
        x, skip, rows, pieces, table, saves, products, scales, out, state, copies, **sizes, BLOCK_W=block,
        STAGES=stages, num_warps=warps, **launch_options(x),
    )  # fmt: skip
    return out


def tile(width: int) -> tuple[int, int, int]:
    """Return values of a program of the fold, its warps, and how many pieces are loaded ahead.

    Only these were tried on a GPU: with another tile, a run ended with an illegal memory access of unknown cause. What
    kernels compute of addresses is not it: with any tile they are within the operands (`tests/layers/test_bounds.py`).
    """
    return min(32, max(16, triton.next_power_of_2(width))), 4, 2
