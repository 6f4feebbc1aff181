"""Packed weights written out in the model's dtype, in one pass, for products of so many rows that this costs little.

N outputs, K inputs, W words a row, G groups of inputs that share a scale.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dovetail.contracts.device import is_interpreted
from dovetail_backends.kernels.triton.packed_tiles import block_scales, in_order, planes_of
from dovetail_backends.kernels.triton.packed_weight import PackedWeight

CHUNK_BYTES = 32 << 20
"""Of a weight that is written out at a time: what a product then reads is still in an H200's cache."""


@triton.jit(do_not_specialize=["first", "N"])
def _write_kernel(
    w, scale, offset, row_scale, out, first, N,
    K: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, FORM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROW_SCALE: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows from `first` on, of which there are N."""
    STEP: tl.constexpr = BLOCK_K if FORM == "scaled" else BLOCK_K // 8
    place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.program_id(1) * STEP + tl.arange(0, STEP)
    n = first + place
    live = place[:, None] < N
    dtype: tl.constexpr = out.dtype.element_ty
    raw = tl.load(w + n[:, None].to(tl.int64) * ROW + at[None, :], mask=live & (at[None, :] < ROW), other=0.0)
    target = out + place[:, None].to(tl.int64) * K
    if FORM == "scaled":
        inside = live & (at[None, :] < K)
        wide = raw.to(tl.float32)
        if GROUPS > 0 and STEP % GROUP == 0:  # a load for each group, not for each number
            group = tl.program_id(1) * (STEP // GROUP) + tl.arange(0, STEP // GROUP)
            mask = live & (group[None, :] < GROUPS)
            of_groups = tl.load(scale + n[:, None] * GROUPS + group[None, :], mask=mask, other=0.0)
            parts = tl.reshape(wide, [BLOCK_N, STEP // GROUP, GROUP]) * of_groups[:, :, None]
            wide = tl.reshape(parts, [BLOCK_N, STEP])
        elif GROUPS > 0:
            wide *= tl.load(scale + n[:, None] * GROUPS + at[None, :] // GROUP, mask=inside, other=0.0)
        if ROW_SCALE:
            wide *= tl.load(row_scale + n, mask=place < N, other=0.0)[:, None]
        tl.store(target + at[None, :], wide.to(dtype), mask=inside)
    else:
        start = tl.program_id(1) * STEP
        scales = block_scales(scale, offset, n, start, first + N, FORM, GROUP, GROUPS, STEP, ZERO, dtype)
        planes = planes_of(raw, scales, FORM, dtype, ASM)
        wide = in_order(planes)
        if ROW_SCALE:
            wide = (wide.to(tl.float32) * tl.load(row_scale + n, mask=place < N, other=0.0)[:, None]).to(dtype)
        given = start * 8 + tl.arange(0, BLOCK_K)
        tl.store(target + given[None, :], wide, mask=live & (given[None, :] < K))


def written(weight: PackedWeight, dtype: torch.dtype, first: int = 0, num: int | None = None) -> Tensor:
    """Return rows of a weight, `[num, K]` from `first` on, rounded to `dtype` as a written-out weight is."""
    num = weight.num_out - first if num is None else num
    out = torch.empty(num, weight.num_in, dtype=dtype, device=weight.numbers.device)
    row = weight.numbers.shape[-1]
    block_n, block_k = (8, 512) if weight.kind == "scaled" else (8, 1024)
    step = block_k if weight.kind == "scaled" else block_k // 8
    scales = (out if one is None else one for one in (weight.scale, weight.offset, weight.row_scale))
    _write_kernel[(triton.cdiv(num, block_n), triton.cdiv(row, step))](
        weight.numbers, *scales, out, first, num, K=weight.num_in, ROW=row, GROUP=weight.group, GROUPS=weight.groups,
        FORM=weight.kind, BLOCK_N=block_n, BLOCK_K=block_k, ROW_SCALE=weight.row_scale is not None,
        ZERO=weight.offset is not None, ASM=dtype == torch.bfloat16 and not is_interpreted(), num_warps=4,
    )  # fmt: skip
    return out


def many(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """`x Wᵀ + b` for many rows `[M, K]`: some outputs at a time, whose weights are written out before."""
    step = max(256, CHUNK_BYTES // (weight.num_in * x.element_size()) // 256 * 256)
    if weight.num_out <= step:
        return F.linear(x, written(weight, x.dtype), bias)
    out = torch.empty(len(x), weight.num_out, dtype=x.dtype, device=x.device)
    for first in range(0, weight.num_out, step):
        here = slice(first, min(first + step, weight.num_out))
        part = written(weight, x.dtype, first, here.stop - first)
        torch.mm(x, part.t(), out=out[:, here])
    return out if bias is None else out.add_(bias)
