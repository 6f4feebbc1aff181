"""What stands around latent attention, in Triton: one kernel for two rotations, a norm and what puts them together."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail_backends.kernels.triton.pdl import launch_options

HEADS = 16
"""Heads that a program rotates."""


@triton.jit
def _turned(x, cos, sin, heads, live, stride_head, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rotated heads `[R, BLOCK_D]` of a token, as `ops.norm_rotate` turns them."""
    d = tl.arange(0, BLOCK_D)
    partner = tl.where(d < D // 2, d + D // 2, d - D // 2)
    mask = live[:, None] & (d < D)[None, :]
    at = x + heads[:, None] * stride_head
    a = tl.load(at + d[None, :], mask=mask, other=0.0)
    b = tl.load(at + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    return (a.to(tl.float32) * c + b * s).to(a.dtype)


@triton.jit
def _latent_rows_kernel(
    q, kv_a, norm, cos, sin, queries, row, eps, stride_qt, stride_qh, stride_kv,
    N: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 of a token makes its row, the others BLOCK_H heads of its queries each."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    cos, sin = cos + token * D, sin + token * D
    if part == 0:
        r = tl.arange(0, BLOCK_R)
        value = tl.load(kv_a + token * stride_kv + r, mask=r < R, other=0.0)
        wide = value.to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / R + eps)
        weight = tl.load(norm + r, mask=r < R, other=0.0).to(tl.float32)
        normed = (wide * factor).to(value.dtype).to(tl.float32) * weight
        tl.store(row + token * (R + D) + r, normed.to(value.dtype), mask=r < R)
        one = tl.arange(0, 1)
        key = _turned(kv_a + token * stride_kv + R, cos, sin, one, one >= 0, 0, D, BLOCK_D)
        tl.store(row + token * (R + D) + R + one[:, None] + d[None, :], key, mask=(d < D)[None, :])
    else:
        heads = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        live = heads < N
        turned = _turned(q + token * stride_qt + NOPE, cos, sin, heads, live, stride_qh, D, BLOCK_D)
        at = queries + (token * N + heads[:, None]) * (R + D) + R + d[None, :]
        tl.store(at, turned, mask=live[:, None] & (d < D)[None, :])


def latent_rows(q: Tensor, kv_a: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.latent_rows`: one kernel."""
    num, heads, width = q.shape
    rank, dim = norm.shape[0], cos.shape[-1]
    queries = torch.empty(num, heads, rank + dim, dtype=q.dtype, device=q.device)
    row = torch.empty(num, 1, rank + dim, dtype=q.dtype, device=q.device)
    _latent_rows_kernel[(num, 1 + triton.cdiv(heads, HEADS))](
        q, kv_a, norm, cos, sin, queries, row, eps, q.stride(0), q.stride(1), kv_a.stride(0),
        N=heads, NOPE=width - dim, R=rank, D=dim, BLOCK_H=HEADS, BLOCK_R=triton.next_power_of_2(rank),
        BLOCK_D=triton.next_power_of_2(dim), num_warps=4, **launch_options(q),
    )  # fmt: skip
    return queries, row
