"""Triton versions of the operations in `reference`, for CUDA tensors; each equals its reference within rounding.

They compute in float32 and round where the reference rounds. T tokens, H hidden size, D head dim, N heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.sdk.layers.ops import reference
from dovetail.sdk.layers.ops.gemv import gemv
from dovetail.sdk.layers.ops.latent import latent_rows as latent_rows  # one of the operations
from dovetail.sdk.layers.ops.pdl import launch_options, shared_bytes
from dovetail.sdk.layers.ops.silu import gated
from dovetail.sdk.layers.ops.skinny import GATE_TILES, SHARED_BYTES, TILES, Tile, Tiles, skinny, tile_for


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
    normed = (wide * scale).to(value.dtype)
    w = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row * H + at, (normed.to(tl.float32) * w.to(tl.float32)).to(value.dtype), mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`: one kernel, one program per row."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    num, width = x.shape
    out = torch.empty(num, width, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(num,)](
        x, x if residual is None else residual, weight, out, total, eps, x.stride(0),
        H=width, BLOCK=block, HAS_RESIDUAL=residual is not None, num_warps=min(8, max(1, block // 256)),
        **launch_options(x),
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


def rotations(positions: Tensor, freqs: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.linear`: our kernels for one row and, at shapes where they are faster, for a few; else cuBLAS."""
    if _is_gemv(x, weight):
        return gemv(x, weight, bias)
    tile = _tile(x, weight, TILES)
    return F.linear(x, weight, bias) if tile is None else skinny(x, weight, bias, tile)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.wide_linear`: one kernel for one row."""
    if _is_gemv(x, weight):
        return gemv(x, weight, bias, dtype=torch.float32)
    return reference.wide_linear(x, weight, bias)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.norm_linear`: one kernel for a few rows."""
    if _is_gemv(x, weight):
        return gemv(x, weight, bias, norm=norm, eps=eps)
    tile = _tile(x, weight, TILES)
    if tile is not None:
        return skinny(x, weight, bias, tile, norm=norm, eps=eps)
    return F.linear(add_rms_norm(x, None, norm, eps)[0], weight, bias)


def norm_gate(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.norm_gate`: one kernel for a few rows."""
    if _is_gemv(x, weight):
        return gemv(x, weight, bias, norm=norm, eps=eps, gate=True)
    tile = _tile(x, weight, GATE_TILES)
    if tile is not None:
        return skinny(x, weight, bias, tile, norm=norm, eps=eps, gate=True)
    return silu_and_mul(F.linear(add_rms_norm(x, None, norm, eps)[0], weight, bias))


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """See `reference.linear_add`: one kernel; cuBLAS adds in place."""
    if _is_gemv(x, weight):
        return gemv(x, weight, bias, residual=residual)
    tile = _tile(x, weight, TILES)
    if tile is not None:
        return skinny(x, weight, bias, tile, residual=residual)
    total = residual.addmm_(x, weight.t())
    return total if bias is None else total.add_(bias)


def _is_gemv(x: Tensor, weight: Tensor) -> bool:
    return x.shape[0] == 1 and x.stride(-1) == 1 and weight.is_contiguous()


def _tile(x: Tensor, weight: Tensor, tiles: Tiles) -> tuple[int, Tile] | None:
    if x.dtype != torch.bfloat16 or x.stride(-1) != 1 or not weight.is_contiguous():
        return None
    tile = tile_for(x.shape[0], weight, tiles)
    return tile if tile is not None and shared_bytes(x.device) >= SHARED_BYTES else None
