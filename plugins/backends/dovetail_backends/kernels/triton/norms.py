"""Norms, rotary embedding and the gate of an MLP in Triton; each equals its meaning within rounding.

They compute in float32 and round where the meaning rounds. T tokens, H hidden size, D head dim, N heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.layers import Act
from dovetail.sdk.layers.ops import reference
from dovetail_backends.kernels.triton.pdl import launch_options
from dovetail_backends.kernels.triton.silu import gated


@triton.jit
def _add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    eps,
    stride_x,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < H
    value = tl.load(x + row * stride_x + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        value = (value.to(tl.float32) + tl.load(residual + row * H + at, mask=inside, other=0.0).to(tl.float32)).to(
            value.dtype
        )
        tl.store(total + row * H + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / H + eps)
    normed = wide * scale
    if not IS_WIDE:
        normed = normed.to(value.dtype).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row * H + at, (normed * w.to(tl.float32)).to(value.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`: as `add_rms_norm`."""
    return _normed(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`: one kernel, one program per row."""
    return _normed(x, residual.contiguous(), weight, eps)


def wide_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.wide_rms_norm`: as `rms_norm`, rounded at the end only."""
    return _normed(x, None, weight, eps, is_wide=True)[0]


def _normed(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, is_wide: bool = False
) -> tuple[Tensor, Tensor]:
    x = x if x.stride(-1) == 1 else x.contiguous()
    num, width = x.shape
    out = torch.empty(num, width, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(num,)](
        x, x if residual is None else residual, weight, out, total, eps, x.stride(0),
        H=width, BLOCK=block, HAS_RESIDUAL=residual is not None, IS_WIDE=is_wide,
        num_warps=min(8, max(1, block // 256)), **launch_options(x),
    )  # fmt: skip
    return out, total


@triton.jit
def _norm_rotate_kernel(
    x, weight, cos, sin, out, eps, stride_token, stride_head,
    N: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, heads = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, HALF)
    inside = d < D // 2
    mask = (heads < N)[:, None] & inside[None, :]
    source = x + token * stride_token + heads[:, None] * stride_head + d[None, :]
    low = tl.load(source, mask=mask, other=0.0)
    high = tl.load(source + D // 2, mask=mask, other=0.0)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORM:
        scale = (1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps))[:, None]
        at = weight + heads[:, None] * D + d[None, :]
        w_low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        w_high = tl.load(at + D // 2, mask=mask, other=0.0).to(tl.float32)
        a = ((a * scale).to(low.dtype).to(tl.float32) * w_low).to(low.dtype).to(tl.float32)
        b = ((b * scale).to(low.dtype).to(tl.float32) * w_high).to(low.dtype).to(tl.float32)
    c_low = tl.load(cos + token * D + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    c_high = tl.load(cos + token * D + D // 2 + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    s_low = tl.load(sin + token * D + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    s_high = tl.load(sin + token * D + D // 2 + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = out + (token * N + heads[:, None]) * D + d[None, :]
    tl.store(target, (a * c_low + b * s_low).to(low.dtype), mask=mask)
    tl.store(target + D // 2, (b * c_high + a * s_high).to(low.dtype), mask=mask)


def norm_rotate(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """See `reference.norm_rotate`: one kernel, up to 16 heads of a token a program. `x` may be a strided view."""
    num, heads, dim = x.shape
    out = torch.empty(num, heads, dim, dtype=x.dtype, device=x.device)
    block = min(16, triton.next_power_of_2(heads))
    _norm_rotate_kernel[(num, triton.cdiv(heads, block))](
        x, x if weight is None else weight, cos, sin, out, eps, x.stride(0), x.stride(1),
        N=heads, BLOCK_N=block, D=dim, HALF=triton.next_power_of_2(dim // 2), HAS_NORM=weight is not None,
        num_warps=max(1, min(4, block // 4)), **launch_options(x),
    )  # fmt: skip
    return out


@triton.jit
def _rotations_kernel(positions, freqs, cos, sin, factor, D: tl.constexpr, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF)
    inside = d < D // 2
    angle = tl.load(positions + token).to(tl.float32) * tl.load(freqs + d, mask=inside, other=0.0)
    c, s = tl.cos(angle) * factor, tl.sin(angle) * factor
    at = token * D + d
    tl.store(cos + at, c.to(cos.dtype.element_ty), mask=inside)
    tl.store(cos + at + D // 2, c.to(cos.dtype.element_ty), mask=inside)
    tl.store(sin + at, (-s).to(sin.dtype.element_ty), mask=inside)
    tl.store(sin + at + D // 2, s.to(sin.dtype.element_ty), mask=inside)


def rotations(positions: Tensor, freqs: Tensor, factor: float, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `reference.rotations`: one kernel, an ordinary launch, where plain torch takes a dozen."""
    num, dim = positions.shape[0], 2 * freqs.shape[0]
    cos, sin = torch.empty(2, num, 1, dim, dtype=dtype, device=positions.device).unbind(0)
    _rotations_kernel[(num,)](
        positions, freqs, cos, sin, float(factor), D=dim, HALF=triton.next_power_of_2(dim // 2), num_warps=1
    )
    return cos, sin


@triton.jit
def _silu_and_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0)
    value = gated(gate.to(tl.float32), up.to(tl.float32), gate.dtype)
    tl.store(out + row * WIDTH + at, value.to(gate.dtype), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_and_mul`: one kernel."""
    num, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up.contiguous()
    out = torch.empty(num, width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_and_mul_kernel[(num, triton.cdiv(width, 1024))](
        gate_up, out, WIDTH=width, BLOCK=1024, num_warps=4, **launch_options(out)
    )
    return out


def act_and_mul(gate_up: Tensor, *, act: Act) -> Tensor:
    """See `reference.act_and_mul`: for other activations than silu, that itself."""
    return silu_and_mul(gate_up) if act == "silu_and_mul" else reference.act_and_mul(gate_up, act=act)
