"""65 rows and more as two float8 numbers each, times float8 weights, by the library's product for float8.

The upper halves of all rows stand above the lower ones: one product of twice as many rows, in float32, and a kernel
that adds both and does what comes behind. Scales are of rows and of outputs: the library has none for parts of K that
were multiplied so.

M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.layers import Act
from dovetail_backends.kernels.triton.endings import ended_tile
from dovetail_backends.kernels.triton.packed_halves import fits_halves, halves
from dovetail_backends.kernels.triton.packed_weight import PackedWeight
from dovetail_backends.kernels.triton.packed_wide import finish
from dovetail_backends.kernels.triton.pdl import launch_options

BLOCK_M, BLOCK_N = 2, 512
"""Rows and outputs that a program of `_stacked_kernel` ends."""


@triton.jit(do_not_specialize=["M"])
def _stacked_kernel(
    both, row_factor, row_scale, bias, residual, out, M, stride_r,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALVES: tl.constexpr, BIAS: tl.constexpr,
    ACT: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr, ROW_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the products of HALVES of rows, `[HALVES M, N]` or `[HALVES M, 2 N]`, and end them."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ALL: tl.constexpr = N * (1 + GATE)
    live = (m[None, :] < M) & (n[:, None] < N)
    high = both + m[None, :].to(tl.int64) * ALL + n[:, None]
    low = high + M.to(tl.int64) * ALL
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    factor = tl.load(row_factor + m, mask=m < M, other=0.0)[None, :]
    total = tl.load(high, mask=live, other=0.0)
    if HALVES == 2:
        total += tl.load(low, mask=live, other=0.0)
    total *= factor
    up_total = total
    if GATE:
        up_total = tl.load(high + N, mask=live, other=0.0)
        if HALVES == 2:
            up_total += tl.load(low + N, mask=live, other=0.0)
        up_total *= factor
    dtype: tl.constexpr = out.dtype.element_ty
    total = ended_tile(total, up_total, factor, row_scale, bias, n, 0.0, N, N, ROW_SCALE, False, BIAS, GATE, ACT, dtype)
    finish(total, n, m, row_scale, bias, residual, out, M, stride_r, N, False, RESIDUAL, False)


def fits_stacked(weight: PackedWeight) -> bool:
    """Whether `by_stacked` multiplies by a weight: no groups, and outputs and inputs as the library demands."""
    return fits_halves(weight) and weight.groups == 0 and weight.num_in % 16 == 0 and weight.num_out % 16 == 0


def by_stacked(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    act: Act | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """As `packed_halves.by_halves` for weights that `fits_stacked`."""
    given = halves(x, norm, eps)
    one = torch.ones((), device=x.device)
    both = torch._scaled_mm(
        given.numbers.flatten(0, 1), weight.numbers.t(), one, one, out_dtype=torch.float32, use_fast_accum=False
    )
    return ended(both, given.scale, weight, bias, x.dtype, act=act, residual=residual)


def ended(
    product: Tensor,
    factor: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    act: Act | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return what comes of the product of float8 rows: scales, bias, gate and residual.

    Args:
        product: float32 `[M, N]`, or `[2 M, N]` of rows in two halves; twice as many outputs with `act`.
        factor: float32, of each row, `[M]` or `[M, 1]`.
        weight: What was multiplied by.
        bias: One per output of the weight, or None.
        dtype: Of the result.
        act: Made of gate and up.
        residual: `[M, N]`, rows contiguous, or None.
    """
    rows, n = factor.numel(), weight.num_out // 2 if act else weight.num_out
    out = torch.empty(rows, n, dtype=dtype, device=product.device)
    row_scale, added, before = (product if one is None else one for one in (weight.row_scale, bias, residual))
    _stacked_kernel[(triton.cdiv(rows, BLOCK_M), triton.cdiv(n, BLOCK_N))](
        product, factor, row_scale, added, before, out, rows, n if residual is None else residual.stride(0), N=n,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, HALVES=len(product) // rows, BIAS=bias is not None, ACT=act or "",
        GATE=act is not None, RESIDUAL=residual is not None, ROW_SCALE=weight.row_scale is not None, num_warps=4,
        **launch_options(product),
    )  # fmt: skip
    return out
