"""Rows rounded to float8 times float8 weights, by the library's products: a quantisation says that rows may be rounded.

Each row is divided by a scale of its own, or each 128 of its inputs where weights have scales for blocks of 128 x 128,
so that its greatest number is float8's greatest. A bfloat16 row so loses some 3.8 % of its norm, and the product needs
half the time of one in bfloat16: 1,283 us instead of 2,656 for the four products of a Llama-3.1-8B layer and 4,096 rows
on an H200.

M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.layers import Act
from dovetail_backends.kernels.triton.norms import act_and_mul
from dovetail_backends.kernels.triton.packed_stacked import ended, fits_stacked
from dovetail_backends.kernels.triton.packed_weight import BLOCK_SCALES, PackedWeight
from dovetail_backends.kernels.triton.pdl import launch_options

LEAST_ROWS = 65
"""Rows from which rounded ones are faster by more than a few percent: measured on an H200."""
MOST_ENDED = 256
"""Rows up to which the library's product without scales is faster, although a kernel has to bring them in."""
BLOCK_ROWS = 4
"""The library multiplies by blocks with scales only multiples of so many rows."""
MOST_FLOAT8 = tl.constexpr(448.0)
LEAST_SCALE = tl.constexpr(1e-12)


@triton.jit
def _nearest(numbers):
    """Float32 numbers that float8 has: four significant bits from 2 ** -6 on, steps of 2 ** -9 below.

    A cast alone would do on a GPU; Triton's interpreter loses what it carries.
    """
    bits = numbers.to(tl.int32, bitcast=True)
    upper = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    half = tl.where(numbers < 0, -0.5, 0.5)
    lower = (numbers * 512.0 + half).to(tl.int32).to(tl.float32) * 0.001953125
    return tl.where(tl.abs(numbers) < 0.015625, lower, upper)


@triton.jit
def _round_kernel(
    x, norm, numbers, scale, eps, stride_x, stride_scale,
    K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row; GROUP inputs share a scale, BLOCK of them are all."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    given = tl.load(x + m * stride_x + at, mask=at < K, other=0.0)
    wide = given.to(tl.float32)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / K + eps)
        normed = (wide * factor).to(given.dtype).to(tl.float32)
        wide = (normed * tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)).to(given.dtype).to(tl.float32)
    GROUPS: tl.constexpr = BLOCK // GROUP
    parts = tl.reshape(wide, [GROUPS, GROUP])
    by = tl.maximum(tl.max(tl.abs(parts), 1) / MOST_FLOAT8, LEAST_SCALE)
    near = tl.minimum(tl.maximum(parts / by[:, None], -MOST_FLOAT8), MOST_FLOAT8)
    tl.store(numbers + m * K + at, tl.reshape(_nearest(near), [BLOCK]).to(tl.float8e4nv), mask=at < K)
    group = tl.arange(0, GROUPS)
    # Numbers that are not finite stay so: a maximum skips nan.
    tl.store(scale + m + group * stride_scale, by + tl.sum(parts * 0.0, 1), mask=group * GROUP < K)


def rounded(x: Tensor, group: int = 0, norm: Tensor | None = None, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return rows `[M, K]`, or their RMS norm with weight `norm` `[K]`, as float8 numbers and their scales.

    Args:
        x: The rows, contiguous in K.
        group: Inputs that share a scale, a power of two; 0: all of a row.
        norm: Its weight, or None.
        eps: Of the norm.

    Returns:
        `[M, K]`, and float32 `[M, 1]`; or, with a group, up to three rows more of anything, and `[M, K / group]` of
        which columns are contiguous.
    """
    (rows, k), block = x.shape, triton.next_power_of_2(x.shape[1])
    padded = -(-rows // BLOCK_ROWS) * BLOCK_ROWS if group else rows
    groups = k // group if group else 1
    numbers = torch.empty(padded, k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(groups, padded, dtype=torch.float32, device=x.device)
    _round_kernel[(rows,)](
        x, x if norm is None else norm, numbers, scale, eps, x.stride(0), padded, K=k, BLOCK=block,
        GROUP=group or block, NORM=norm is not None, num_warps=8, **launch_options(x),
    )  # fmt: skip
    return numbers, scale.t() if group else scale.view(rows, 1)


def fits_rounded(weight: PackedWeight) -> bool:
    """Whether `by_rounded` multiplies by a weight."""
    return weight.rounds and (weight.block_scale is not None or fits_stacked(weight))


def by_rounded(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    act: Act | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """As `packed_halves.by_halves` for bfloat16 rows, rounded, and weights that `fits_rounded`."""
    if weight.block_scale is not None:
        numbers, scale = rounded(x, BLOCK_SCALES, norm, eps)
        y = scaled_mm(
            numbers, weight.numbers.t(), scale, ScalingType.BlockWise1x128, weight.block_scale.t(),
            ScalingType.BlockWise128x128, output_dtype=x.dtype,
        )  # fmt: skip
        return _finished(y[: len(x)], bias, act, residual)
    numbers, scale = rounded(x, 0, norm, eps)
    if len(x) <= MOST_ENDED:
        one = torch.ones((), device=x.device)
        product = torch._scaled_mm(numbers, weight.numbers.t(), one, one, out_dtype=torch.float32)
        return ended(product, scale, weight, bias, x.dtype, act=act, residual=residual)
    of_outputs = weight.row_scale[None]  # type: ignore[index]  # there is one where there are no groups
    # With the library's faster sums, which cost .0021 of the product's norm, where rounding its rows costs .038.
    y = torch._scaled_mm(numbers, weight.numbers.t(), scale, of_outputs, out_dtype=x.dtype, use_fast_accum=True)
    return _finished(y, bias, act, residual)


def _finished(y: Tensor, bias: Tensor | None, act: Act | None, residual: Tensor | None) -> Tensor:
    """Return `act(y + bias) + residual`; `y` is written to."""
    y = y if bias is None else y.add_(bias)
    y = y if act is None else act_and_mul(y, act=act)
    return y if residual is None else y.add_(residual)
