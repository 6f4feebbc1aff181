"""Rows times a packed matrix on tensor cores: weights are read packed, and become the model's dtype in registers.

As `skinny` for plain weights: a program makes BLOCK_N outputs of BLOCK_M rows. M rows, N outputs, K inputs, G groups of
inputs that share a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.device import is_interpreted
from dovetail.contracts.layers import Act
from dovetail_backends.kernels.triton.endings import ended_tile, summed_parts
from dovetail_backends.kernels.triton.launch import Tile, scratch
from dovetail_backends.kernels.triton.packed_tiles import first_tile, walk
from dovetail_backends.kernels.triton.packed_weight import PackedWeight
from dovetail_backends.kernels.triton.pdl import launch_options


@triton.jit(do_not_specialize=["M"])
def _few_kernel(
    x, w, scale, offset, row_scale, bias, norm, residual, out, part, arrived, eps, M, stride_x, stride_r,
    N: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    FORM: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, IS_SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    ACT: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr, ROW_SCALE: tl.constexpr, ZERO: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Programs that read the same weights follow each other: what one has read is in the second-level cache.
    tall, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tall * BLOCK_M
    dtype: tl.constexpr = x.dtype.element_ty
    PER_WORD: tl.constexpr = 1 if FORM == "scaled" else 8
    STEP: tl.constexpr = BLOCK_K // PER_WORD
    n, m = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    begin = split * (SPAN // PER_WORD)
    end = tl.minimum(begin + SPAN // PER_WORD, ROW)
    weights = first_tile(w, scale, offset, n, begin, N, ROW, GROUP, GROUPS, FORM, STEP, GATE, ZERO, dtype)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    left = M - first
    rows = x + (first + m).to(tl.int64) * stride_x
    total, up_total, squares = walk(
        weights, w, scale, offset, rows, m < left, norm, n, begin, end,
        N, K, ROW, GROUP, GROUPS, FORM, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, NORM, GATE, ZERO, ASM,
    )  # fmt: skip
    is_last = True
    if SPLITS > 1 and not IS_SPLIT:  # the sums that `summed_parts` makes
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) + total
        for own in range(1, SPLITS):
            start = own * (SPAN // PER_WORD)
            stop = tl.minimum(start + SPAN // PER_WORD, ROW)
            others = first_tile(w, scale, offset, n, start, N, ROW, GROUP, GROUPS, FORM, STEP, GATE, ZERO, dtype)
            more, _, _ = walk(
                others, w, scale, offset, rows, m < left, norm, n, start, stop,
                N, K, ROW, GROUP, GROUPS, FORM, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, NORM, GATE, ZERO, ASM,
            )  # fmt: skip
            total += more
    if IS_SPLIT:
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        place = tile * tl.num_programs(0) + tall
        total, is_last = summed_parts(total, part, arrived, place, split, inner, SPLITS, BLOCK_N, BLOCK_M)
    if is_last:
        live = (m[None, :] < left) & (n[:, None] < N)
        total = ended_tile(
            total, up_total, squares, row_scale, bias, n, eps, N, K, ROW_SCALE, NORM, BIAS, GATE, ACT, dtype
        )
        if RESIDUAL:
            at_residual = residual + (first + m[None, :]).to(tl.int64) * stride_r + n[:, None]
            total = total.to(dtype).to(tl.float32) + tl.load(at_residual, mask=live, other=0.0).to(tl.float32)
        tl.store(out + (first + m[None, :]).to(tl.int64) * N + n[:, None], total.to(dtype), mask=live)


def few(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    tile: tuple[int, Tile],
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    act: Act | None = None,
    residual: Tensor | None = None,
    most_split: int | None = None,
) -> Tensor:
    """`x Wᵀ + b` for any number of rows, with what stands before and after it.

    Args:
        x: `[M, K]`, rows contiguous in K.
        weight: Of N outputs, or 2 N with `act`.
        bias: One per output of the weight, or None.
        tile: BLOCK_M, and the rest as for `skinny`. With `norm` or `act`, K is not split.
        norm: `[K]`, weight of an RMS norm of the rows of `x` before the product, or None.
        eps: Of the norm.
        act: The product is gate and up side by side, of which this is made; None: it is not.
        residual: `[M, N]`, rows contiguous, added to the product, or None.
        most_split: Tiles of rows up to which each split of K has a program of its own, which takes memory for its sums;
            one program goes through those of more, and makes the same sums. None: any number.

    Returns:
        `[M, N]` in the dtype of `x`; sums are in float32, splits of K added in fixed order.
    """
    rows, k = x.shape[0], weight.num_in
    n = weight.num_out // 2 if act else weight.num_out
    block_m, (block_n, block_k, warps, stages, splits) = tile
    if norm is not None or act:
        splits = 1
    stored = weight.numbers.shape[-1] * (1 if weight.kind == "scaled" else 8)
    tiles, tall = triton.cdiv(n, block_n), triton.cdiv(rows, block_m)
    span = triton.cdiv(triton.cdiv(stored, block_k), splits) * block_k
    splits = triton.cdiv(stored, span)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    part, arrived = (x, x)
    is_split = splits > 1 and (most_split is None or tall <= most_split)
    if is_split:
        part, arrived = scratch(x.device, tiles * tall * splits * block_n * block_m, tiles * tall)
    scales = (x if one is None else one for one in (weight.scale, weight.offset, weight.row_scale))
    _few_kernel[(tall, tiles, splits if is_split else 1)](
        x, weight.numbers, *scales, x if bias is None else bias, x if norm is None else norm,
        x if residual is None else residual, out, part, arrived, eps, rows, x.stride(0),
        n if residual is None else residual.stride(0), N=n, K=k, ROW=weight.numbers.shape[-1], GROUP=weight.group,
        GROUPS=weight.groups, FORM=weight.kind, SPAN=span, SPLITS=splits, IS_SPLIT=is_split, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, BIAS=bias is not None, NORM=norm is not None, ACT=act or "",
        GATE=act is not None, RESIDUAL=residual is not None, ROW_SCALE=weight.row_scale is not None,
        ZERO=weight.offset is not None, ASM=x.dtype == torch.bfloat16 and not is_interpreted(), num_warps=warps,
        **launch_options(x),
    )  # fmt: skip
    return out
