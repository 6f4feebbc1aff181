"""65 rows and more as two float8 numbers each, times float8 weights, on the tensor cores for float8.

As `packed_halves`, for so many rows that the tensor cores and the second-level cache bound a product: so a tile is 128
outputs by 128 rows, and a program has two where there are gate and up, which share its rows. Each is multiplied by
itself, so that a sum beside its float32 total has room in registers: the tensor cores for float8 add up with fewer bits
than float32 has.

M rows, N outputs, K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from dovetail.contracts.layers import Act
from dovetail_backends.kernels.triton.endings import ended_tile
from dovetail_backends.kernels.triton.launch import Tile, scratch
from dovetail_backends.kernels.triton.packed_halves import fits_halves, halves
from dovetail_backends.kernels.triton.packed_weight import PackedWeight
from dovetail_backends.kernels.triton.packed_wide import FINISH_N, add_kernel, finish
from dovetail_backends.kernels.triton.pdl import launch_options


@triton.jit
def _added(total, weights, upper, lower, scale, n, start, N, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Add to `total` the product of weights `[BLOCK_N, …]` and both halves of rows; the lower first, as it is small."""
    part = tl.dot(weights, lower)
    part = tl.dot(weights, upper, part)
    if GROUPS > 0:
        part *= tl.load(scale + n * GROUPS + start // GROUP, mask=n < N, other=0.0)[:, None]
    return total + part


@triton.jit(do_not_specialize=["M"])
def _pairs_kernel(
    high, low, row_factor, w, scale, row_scale, bias, residual, out, part, M, stride_r,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    SPAN: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr, ROW_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, outputs, splits): programs of the same weights are neighbours."""
    tall, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ALL: tl.constexpr = N * (1 + GATE)
    from_n, from_m = tile * BLOCK_N, tall * BLOCK_M
    n, m = from_n + tl.arange(0, BLOCK_N), from_m + tl.arange(0, BLOCK_M)
    begin = split * SPAN
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_total = total
    for start in tl.range(begin, tl.minimum(begin + SPAN, K), BLOCK_K, num_stages=STAGES):
        upper, lower = tl.trans(high.load([from_m, start])), tl.trans(low.load([from_m, start]))
        total = _added(total, w.load([from_n, start]), upper, lower, scale, n, start, N, GROUP, GROUPS)
        if GATE:
            ups = w.load([from_n + N, start])
            up_total = _added(up_total, ups, upper, lower, scale, n + N, start, ALL, GROUP, GROUPS)
    factor = tl.load(row_factor + m, mask=m < M, other=0.0)[None, :]
    total *= factor
    if GATE:
        up_total *= factor
        dtype: tl.constexpr = out.dtype.element_ty
        total = ended_tile(
            total, up_total, factor, row_scale, bias, n, 0.0, N, K, ROW_SCALE, False, BIAS, GATE, ACT, dtype
        )
        finish(total, n, m, row_scale, bias, residual, out, M, stride_r, N, False, RESIDUAL, False)
    elif SPLITS > 1:
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        place = (tile * tl.num_programs(0) + tall) * SPLITS + split
        tl.store(part + place.to(tl.int64) * (BLOCK_N * BLOCK_M) + inner, total)
    else:
        finish(total, n, m, row_scale, bias, residual, out, M, stride_r, N, BIAS, RESIDUAL, ROW_SCALE)


def fits_pairs(weight: PackedWeight) -> bool:
    """Whether `by_pairs` multiplies by a weight: float8 that `fits_halves`.

    Rows of a weight begin at multiples of 16 bytes, which the device's copies of tiles ask for.
    """
    return fits_halves(weight) and weight.num_in % 16 == 0


def by_pairs(
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
    """As `packed_halves.by_halves` for weights that `fits_pairs`; with `act`, K is not split.

    Sums are in float32, splits of K added in fixed order.
    """
    rows, k = x.shape
    n = weight.num_out // 2 if act else weight.num_out
    block_m, (block_n, block_k, warps, stages, splits) = tile
    span = triton.cdiv(triton.cdiv(k, block_k), 1 if act else splits) * block_k
    splits = triton.cdiv(k, span)
    tiles, tall = triton.cdiv(n, block_n), triton.cdiv(rows, block_m)
    given = halves(x, norm, eps)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    part = x
    if splits > 1:
        part, _ = scratch(x.device, tiles * tall * splits * block_n * block_m, 1)
    scale, row_scale = (x if one is None else one for one in (weight.scale, weight.row_scale))
    after = (row_scale, x if bias is None else bias, x if residual is None else residual)
    stride_r = n if residual is None else residual.stride(0)
    what = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "ROW_SCALE": weight.row_scale is not None}
    sizes = {"N": n, "SPLITS": splits, "BLOCK_M": block_m, "BLOCK_N": block_n}
    high, low = (TensorDescriptor.from_tensor(one, [block_m, block_k]) for one in given.numbers)
    _pairs_kernel[(tall, tiles, splits)](
        high, low, given.scale, TensorDescriptor.from_tensor(weight.numbers, [block_n, block_k]), scale,
        *after, out, part, rows, stride_r, K=k, GROUP=weight.group, GROUPS=weight.groups, SPAN=span, BLOCK_K=block_k,
        STAGES=stages, ACT=act or "", GATE=act is not None, num_warps=warps, **sizes, **what, **launch_options(x),
    )  # fmt: skip
    if splits > 1:
        add_kernel[(tall, triton.cdiv(n, FINISH_N))](
            part, *after, out, rows, stride_r, FINISH=FINISH_N, num_warps=4, **sizes, **what, **launch_options(x)
        )
    return out
