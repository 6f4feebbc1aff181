"""65 rows and more times packed weights: they become the model's dtype between shared memory and the tensor cores.

A weight tile is loaded as it is stored, converted in registers, times the scale of its group, to what a written-out
weight would be, and multiplied from there. What bounds such a product on an H200 is how many bytes a multiprocessor
gets from the second-level cache, some 27 a clock. A step of 256 outputs, 128 rows and 64 inputs keeps the tensor cores
busy for 1,024 clocks and asks for 32 KiB; of plain weights it would be 48. So a tile is long in outputs, which cost a
byte each or half of one, and programs of the same weights follow each other. Where K is split, a second kernel adds up:
one program alone would take longer to read what it had to add than for its product.

M rows, N outputs, K inputs, G groups of inputs that share a scale; `ROW` stored numbers, or words of eight, are a row
of a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.device import is_interpreted
from dovetail_backends.kernels.triton.launch import Tile, scratch
from dovetail_backends.kernels.triton.packed_tiles import awaited, block_scales, in_order, planes_of
from dovetail_backends.kernels.triton.packed_weight import PackedWeight
from dovetail_backends.kernels.triton.pdl import launch_options

DEPTH = 64
"""BLOCK_K of the usual tiles: groups have to be multiples of it."""
FINISH_N = 32
"""Outputs that a program adds up."""


@triton.jit
def finish(
    total, n, m, row_scale, bias, residual, out, M, stride_r,
    N: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ROW_SCALE: tl.constexpr,
):  # fmt: skip
    """Store sums `[outputs, rows]` with what comes after them."""
    dtype: tl.constexpr = out.dtype.element_ty
    live = (m[None, :] < M) & (n[:, None] < N)
    if ROW_SCALE:
        total *= tl.load(row_scale + n, mask=n < N, other=0.0)[:, None]
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if RESIDUAL:
        at_residual = residual + m[None, :].to(tl.int64) * stride_r + n[:, None]
        total = total.to(dtype).to(tl.float32) + tl.load(at_residual, mask=live, other=0.0).to(tl.float32)
    tl.store(out + m[None, :].to(tl.int64) * N + n[:, None], total.to(dtype), mask=live)


@triton.jit(do_not_specialize=["M"])
def _wide_kernel(
    x, w, scale, offset, row_scale, bias, residual, out, part, M, stride_x, stride_r,
    N: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    FORM: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ROW_SCALE: tl.constexpr, ZERO: tl.constexpr, EVEN: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, outputs, splits): programs of the same weights are neighbours. EVEN: tiles divide N and K."""
    tall, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = x.dtype.element_ty
    PER_WORD: tl.constexpr = 1 if FORM == "scaled" else 8
    STEP: tl.constexpr = BLOCK_K // PER_WORD
    n, m = tile * BLOCK_N + tl.arange(0, BLOCK_N), tall * BLOCK_M + tl.arange(0, BLOCK_M)
    k, stored = tl.arange(0, BLOCK_K), tl.arange(0, STEP)
    weights = w + n[:, None].to(tl.int64) * ROW
    # Those beyond are not stored. The same row for all of them would be asked for by every multiprocessor at a time.
    rows = x + (m % M)[:, None].to(tl.int64) * stride_x
    begin = split * (SPAN // PER_WORD)
    if FORM != "scaled":
        ahead = block_scales(scale, offset, n, begin, N, FORM, GROUP, GROUPS, STEP, ZERO, dtype)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + SPAN // PER_WORD, ROW), STEP, num_stages=STAGES):
        at, inputs = start + stored[None, :], start * PER_WORD + k[None, :]
        if EVEN:
            raw = tl.load(weights + at)
            given = tl.load(rows + inputs)
        else:
            raw = tl.load(weights + at, mask=(n[:, None] < N) & (at < ROW), other=0.0)
            given = tl.load(rows + inputs, mask=inputs < K, other=0.0)
        if FORM == "scaled":
            wide = raw.to(tl.float32)
            if GROUPS > 0:
                wide *= tl.load(scale + n * GROUPS + start // GROUP, mask=n < N, other=0.0)[:, None]
            wide = wide.to(dtype)
        else:
            scales = ahead
            ahead = block_scales(scale, offset, n, start + STEP, N, FORM, GROUP, GROUPS, STEP, ZERO, dtype)
            wide = in_order(planes_of(raw, scales, FORM, dtype, ASM))
        total = awaited(tl.dot(wide, tl.trans(given), total, input_precision="ieee"))
    if SPLITS > 1:
        place = (tile * tl.num_programs(0) + tall) * SPLITS + split
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(part + place.to(tl.int64) * (BLOCK_N * BLOCK_M) + inner, total)
    else:
        finish(total, n, m, row_scale, bias, residual, out, M, stride_r, N, BIAS, RESIDUAL, ROW_SCALE)


@triton.jit(do_not_specialize=["M"])
def add_kernel(
    part, row_scale, bias, residual, out, M, stride_r,
    N: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FINISH: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ROW_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid as of `_wide_kernel`, but FINISH outputs of all splits, added in their order."""
    tall, piece = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = piece * FINISH
    place = ((first // BLOCK_N) * tl.num_programs(0) + tall) * SPLITS
    own, columns = tl.arange(0, FINISH), tl.arange(0, BLOCK_M)
    inner = (first % BLOCK_N + own)[:, None] * BLOCK_M + columns[None, :]
    total = tl.zeros([FINISH, BLOCK_M], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(part + (place + split).to(tl.int64) * (BLOCK_N * BLOCK_M) + inner)
    finish(
        total, first + own, tall * BLOCK_M + columns, row_scale, bias, residual, out, M, stride_r,
        N, BIAS, RESIDUAL, ROW_SCALE,
    )  # fmt: skip


def fits_wide(weight: PackedWeight) -> bool:
    """Whether `wide` multiplies by a weight: 8 bits with a scale for a row or groups of a tile's width, or 4 bits."""
    return weight.kind != "scaled" or weight.groups == 0 or weight.group % DEPTH == 0


def wide(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    tile: tuple[int, Tile],
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """`x Wᵀ + b + residual` for weights that `fits_wide`.

    Args:
        x: `[M, K]`, rows contiguous in K.
        weight: Of N outputs.
        bias: One per output of the weight, or None.
        tile: BLOCK_M, then BLOCK_N, BLOCK_K, warps, stages, splits of K. BLOCK_K is a multiple of 64 that divides
            groups of numbers of 8 bits.
        residual: `[M, N]`, rows contiguous, added to the product, or None.

    Returns:
        `[M, N]` in the dtype of `x`; sums are in float32, splits of K added in fixed order.
    """
    (rows, k), n = x.shape, weight.num_out
    block_m, (block_n, block_k, warps, stages, splits) = tile
    tiles, tall = triton.cdiv(n, block_n), triton.cdiv(rows, block_m)
    stored = weight.numbers.shape[-1] * (1 if weight.kind == "scaled" else 8)
    span = triton.cdiv(triton.cdiv(stored, block_k), splits) * block_k
    splits = triton.cdiv(stored, span)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    part = scratch(x.device, tiles * tall * splits * block_n * block_m, 1)[0] if splits > 1 else x
    scale, offset, row_scale = (x if one is None else one for one in (weight.scale, weight.offset, weight.row_scale))
    after = (row_scale, x if bias is None else bias, x if residual is None else residual)
    stride_r = n if residual is None else residual.stride(0)
    what = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "ROW_SCALE": weight.row_scale is not None}
    sizes = {"N": n, "SPLITS": splits, "BLOCK_M": block_m, "BLOCK_N": block_n}
    _wide_kernel[(tall, tiles, splits)](
        x, weight.numbers, scale, offset, *after, out, part, rows, x.stride(0), stride_r, K=k,
        ROW=weight.numbers.shape[-1], GROUP=weight.group, GROUPS=weight.groups, FORM=weight.kind, SPAN=span,
        BLOCK_K=block_k, STAGES=stages, ZERO=weight.offset is not None, EVEN=n % block_n == 0 and k % block_k == 0,
        ASM=x.dtype == torch.bfloat16 and not is_interpreted(), num_warps=warps, **sizes, **what,
        **launch_options(x),
    )  # fmt: skip
    if splits > 1:
        add_kernel[(tall, triton.cdiv(n, FINISH_N))](
            part, *after, out, rows, stride_r, FINISH=FINISH_N, num_warps=4, **sizes, **what, **launch_options(x)
        )
    return out
