"""Rows times float8 weights on the tensor cores for float8, without losing what bfloat16 rows hold.

A row is divided by a power of two that brings its greatest number to between 128 and 256, and written as the sum of two
float8 numbers: the upper four of bfloat16's eight significant bits, and the lower four. Numbers from `2 ** -9` of the
row's greatest on are kept as they are, smaller ones rounded to `2 ** -17` of it. So weights go to the tensor cores as
they are read, and each is multiplied twice, at twice the speed.

M rows, N outputs, K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.layers import Act
from dovetail_backends.kernels.triton.endings import ended_tile, summed_parts
from dovetail_backends.kernels.triton.launch import Tile, scratch
from dovetail_backends.kernels.triton.packed_weight import PackedWeight
from dovetail_backends.kernels.triton.pdl import launch_options

ORDER = 128
"""Inputs that `packed_float8` reorders."""


class Halves(NamedTuple):
    """Rows as two float8 numbers each: `(high + low) * scale`.

    Attributes:
        numbers: `[2, M, K]` float8: high, low; wider where they are reordered.
        scale: `[M]` float32.
    """

    numbers: Tensor
    scale: Tensor


@triton.jit
def _steps(numbers, more):
    """Multiples of `2 ** -9`: numbers, whose size becomes greater by `more` of a step, cut off."""
    return (numbers * 512.0 + tl.where(numbers < 0, -more, more)).to(tl.int32).to(tl.float32) * 0.001953125


@triton.jit
def _halve_kernel(
    x, norm, high, low, scale, eps, stride_x,
    K: tl.constexpr, WIDE: tl.constexpr, ORDERED: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row, of WIDE numbers; with `ORDERED` they are in the order of `packed_float8`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    at = place
    if ORDERED:
        word = place // 4 % 4 * 4 + place // 32 % 4  # of 16
        at = place // 128 * 128 + word // 8 * 64 + (place // 16 % 2 * 4 + place % 4) * 8 + word % 8
    given = tl.load(x + m * stride_x + at, mask=at < K, other=0.0)
    wide = given.to(tl.float32)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / K + eps)
        normed = (wide * factor).to(given.dtype).to(tl.float32)
        wide = (normed * tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)).to(given.dtype).to(tl.float32)
    most = tl.max(tl.abs(wide), 0)
    exponent = tl.maximum((most.to(tl.int32, bitcast=True) >> 23) & 255, 16)
    near = wide * ((261 - exponent) << 23).to(tl.float32, bitcast=True)  # times 2 ** (134 - exponent)
    # A float8 number has four significant bits from 2 ** -6 on, and steps of 2 ** -9 below, to which alone is rounded.
    upper = (near.to(tl.int32, bitcast=True) & -0x100000).to(tl.float32, bitcast=True)
    first = tl.where(tl.abs(near) < 0.015625, _steps(near, 0.0), upper)
    tl.store(high + m * WIDE + place, first.to(tl.float8e4nv), mask=place < WIDE)
    rest = near - first
    lower = (rest.to(tl.int32, bitcast=True) & -0x100000).to(tl.float32, bitcast=True)
    second = tl.where(tl.abs(rest) < 0.015625, _steps(rest, 0.5), lower)
    tl.store(low + m * WIDE + place, second.to(tl.float8e4nv), mask=place < WIDE)
    by = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    tl.store(scale + m, by + tl.sum(wide * 0.0, 0))  # a row that is not finite stays so: a maximum skips nan


def halves(x: Tensor, norm: Tensor | None = None, eps: float = 0.0, *, ordered: bool = False) -> Halves:
    """Return rows `[M, K]`, or their RMS norm with weight `norm` `[K]`, as float8 numbers.

    With `ordered`, they are in the order in which `packed_float8` has weights, and zeros fill the last 128.
    """
    rows, k = x.shape
    wide = -(-k // ORDER) * ORDER if ordered else k
    numbers = torch.empty(2, rows, wide, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    _halve_kernel[(rows,)](
        x, x if norm is None else norm, numbers[0], numbers[1], scale, eps, x.stride(0), K=k,
        WIDE=wide, ORDERED=ordered, BLOCK=triton.next_power_of_2(wide), NORM=norm is not None, num_warps=8,
        **launch_options(x),
    )  # fmt: skip
    return Halves(numbers, scale)


@triton.jit
def _two_dots(
    weights, high, low, total, scale, n, start, N,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the product of weights `[BLOCK_N, BLOCK_K]` and both halves of rows `[BLOCK_K, BLOCK_M]`, in float32."""
    part = tl.dot(weights, high)
    part = tl.dot(weights, low, part)
    if GROUPS > 0:
        part *= tl.load(scale + n * GROUPS + start // GROUP, mask=n < N, other=0.0)[:, None]
    return total + part


@triton.jit(do_not_specialize=["M"])
def _halves_kernel(
    high, low, row_factor, w, scale, row_scale, bias, residual, out, part, arrived, M, stride_r,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr, ROW_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # Programs that read the same weights follow each other: what one has read is in the second-level cache.
    tall, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, m = tile * BLOCK_N + tl.arange(0, BLOCK_N), tall * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    ALL: tl.constexpr = N * (1 + GATE)
    rows = w + n[:, None].to(tl.int64) * K
    place = m[:, None].to(tl.int64) * K
    begin = split * SPAN
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + SPAN, K), BLOCK_K, num_stages=STAGES):
        at = start + k[None, :]
        mask, given = (n[:, None] < N) & (at < K), (m[:, None] < M) & (at < K)
        upper = tl.trans(tl.load(high + place + at, mask=given, other=0.0))
        lower = tl.trans(tl.load(low + place + at, mask=given, other=0.0))
        weights = tl.load(rows + at, mask=mask, other=0.0)
        total = _two_dots(weights, upper, lower, total, scale, n, start, N, GROUP, GROUPS, BLOCK_K)
        if GATE:
            ups = tl.load(rows + N * K + at, mask=mask, other=0.0)
            up_total = _two_dots(ups, upper, lower, up_total, scale, n + N, start, ALL, GROUP, GROUPS, BLOCK_K)
    is_last = True
    if SPLITS > 1:
        spot = tile * tl.num_programs(0) + tall
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        total, is_last = summed_parts(total, part, arrived, spot, split, inner, SPLITS, BLOCK_N, BLOCK_M)
    if is_last:
        dtype: tl.constexpr = out.dtype.element_ty
        live = (m[None, :] < M) & (n[:, None] < N)
        factor = tl.load(row_factor + m, mask=m < M, other=0.0)[None, :]
        total *= factor
        up_total *= factor
        total = ended_tile(
            total, up_total, factor, row_scale, bias, n, 0.0, N, K, ROW_SCALE, False, BIAS, GATE, ACT, dtype
        )
        if RESIDUAL:
            at_residual = residual + m[None, :].to(tl.int64) * stride_r + n[:, None]
            total = total.to(dtype).to(tl.float32) + tl.load(at_residual, mask=live, other=0.0).to(tl.float32)
        tl.store(out + m[None, :].to(tl.int64) * N + n[:, None], total.to(dtype), mask=live)


def fits_halves(weight: PackedWeight) -> bool:
    """Whether `by_halves` multiplies by a weight: float8 with a scale for each row, or for groups of a tile's width."""
    is_float8 = weight.kind == "scaled" and weight.numbers.dtype == torch.float8_e4m3fn
    return is_float8 and (weight.groups == 0 or weight.group % DEPTH == 0)


DEPTH = 128
"""BLOCK_K: so many products are added up by the tensor cores before they go into a float32 sum."""


def by_halves(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    tile: tuple[int, Tile],
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    act: Act | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """As `packed_few.few` for bfloat16 rows and weights that `fits_halves`; with `act`, K is not split."""
    rows, k = x.shape
    n = weight.num_out // 2 if act else weight.num_out
    block_m, (block_n, block_k, warps, stages, splits) = tile
    tiles, tall = triton.cdiv(n, block_n), triton.cdiv(rows, block_m)
    span = triton.cdiv(triton.cdiv(k, block_k), 1 if act else splits) * block_k
    splits = triton.cdiv(k, span)
    given = halves(x, norm, eps)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    part, arrived = (x, x)
    if splits > 1:
        part, arrived = scratch(x.device, tiles * tall * splits * block_n * block_m, tiles * tall)
    scales = (x if one is None else one for one in (weight.scale, weight.row_scale))
    _halves_kernel[(tall, tiles, splits)](
        given.numbers[0], given.numbers[1], given.scale, weight.numbers, *scales, x if bias is None else bias,
        x if residual is None else residual, out, part, arrived, rows, n if residual is None else residual.stride(0),
        N=n, K=k, GROUP=weight.group, GROUPS=weight.groups, SPAN=span, SPLITS=splits, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, STAGES=stages, BIAS=bias is not None, ACT=act or "", GATE=act is not None,
        RESIDUAL=residual is not None, ROW_SCALE=weight.row_scale is not None, num_warps=warps,
        **launch_options(x),
    )  # fmt: skip
    return out
