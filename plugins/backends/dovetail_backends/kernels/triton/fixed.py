"""A product whose rows have the same bits however many there are, on CUDA: one tile and one order of sums for a weight.

A program makes `TILE_N` outputs of `TILE_M` rows. The inputs are summed in spans, each from zero, and the spans are
added up in order. How many spans there are follows from the weight alone: enough programs for a few rows. Few rows take
a program for each span, and the last one to finish adds up; many take one program that goes through all spans. Both do
the same sums with the same instructions, so a row's bits do not tell which.

M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail_backends.kernels.triton.launch import scratch
from dovetail_backends.kernels.triton.pdl import launch_options

TILE_M, TILE_N, TILE_K, WARPS, STAGES = 64, 64, 64, 4, 4
"""Of every product. An instruction of Hopper's has 64 outputs at least; never 8 warps with them: see `skinny`."""
PROGRAMS = 264
"""Twice the multiprocessors of an H100 or H200: so many spans and tiles of outputs are wanted for a few rows."""
MAX_SPANS = 8
FEW = 2
"""Tiles of rows up to which each span has a program of its own."""


def num_spans(n: int, k: int) -> int:
    """Return in how many spans the inputs of a weight `[N, K]` are summed."""
    most = max(1, PROGRAMS // triton.cdiv(n, TILE_N))
    return max(1, min(MAX_SPANS, most, triton.cdiv(k, 4 * TILE_K)))


@triton.jit
def _span(
    x, w, m, n, begin, end, M, stride_x, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum of the inputs `begin … end - 1`, `[BLOCK_N, BLOCK_M]` float32."""
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        at = start + k
        weights = tl.load(
            w + n[:, None].to(tl.int64) * K + at[None, :], mask=(n[:, None] < N) & (at[None, :] < K), other=0.0
        )
        inputs = tl.load(
            x + m[:, None].to(tl.int64) * stride_x + at[None, :], mask=(m[:, None] < M) & (at[None, :] < K), other=0.0
        )
        total = tl.dot(weights, tl.trans(inputs), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["M"])
def _fixed_kernel(
    x, w, bias, residual, out, part, arrived, M, stride_x, stride_r,
    N: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows, tile, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = rows * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    is_last = True
    if IS_SPLIT:
        own = span * SPAN
        total = _span(x, w, m, n, own, tl.minimum(own + SPAN, K), M, stride_x, N, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
        which = rows * tl.num_programs(1) + tile
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(part + (which * SPANS + span) * (BLOCK_N * BLOCK_M) + inner, total)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + which, 1, sem="acq_rel") == SPANS - 1
        if is_last:
            tl.store(arrived + which, 0)
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in tl.static_range(SPANS):
                at_part = part + (which * SPANS + other) * (BLOCK_N * BLOCK_M)
                total += tl.load(at_part + inner, cache_modifier=".cg")
    else:
        for own in range(0, SPANS * SPAN, SPAN):
            total += _span(
                x, w, m, n, own, tl.minimum(own + SPAN, K), M, stride_x, N, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES
            )  # fmt: skip
    if is_last:
        live = (m[None, :] < M) & (n[:, None] < N)
        if BIAS:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if RESIDUAL:
            source = residual + m[None, :].to(tl.int64) * stride_r + n[:, None]
            added = tl.load(source, mask=live, other=0.0).to(tl.float32)
            total = total.to(out.dtype.element_ty).to(tl.float32) + added
        tl.store(out + m[None, :].to(tl.int64) * N + n[:, None], total.to(out.dtype.element_ty), mask=live)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `linear`, in float32: `[M, N]`."""
    return linear(x, weight, bias, dtype=torch.float32)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """`x Wᵀ + b`, added to a residual or not; every row has the bits that it has alone.

    Args:
        x: `[M, K]`.
        weight: `[N, K]`, of the same dtype.
        bias: `[N]`, or None.
        residual: `[M, N]`, added to the rounded product, or None.
        dtype: Of the result; default: that of `x`.

    Returns:
        `[M, N]`; sums are in float32.
    """
    x, weight = x if x.stride(-1) == 1 else x.contiguous(), weight.contiguous()
    residual = residual if residual is None or residual.stride(-1) == 1 else residual.contiguous()
    (rows, k), n = x.shape, weight.shape[0]
    out = torch.empty(rows, n, dtype=dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    spans, tiles, blocks = num_spans(n, k), triton.cdiv(n, TILE_N), triton.cdiv(rows, TILE_M)
    span = triton.cdiv(triton.cdiv(k, TILE_K), spans) * TILE_K
    is_split = spans > 1 and blocks <= FEW
    part, arrived = scratch(x.device, FEW * tiles * spans * TILE_N * TILE_M, FEW * tiles) if is_split else (x, x)
    stages = STAGES if x.element_size() == 2 else 2
    _fixed_kernel[(blocks, tiles, spans if is_split else 1)](
        x, weight, x if bias is None else bias, x if residual is None else residual, out, part, arrived,
        rows, x.stride(0), n if residual is None else residual.stride(0),
        N=n, K=k, SPAN=span, SPANS=spans, IS_SPLIT=is_split, BLOCK_M=TILE_M, BLOCK_N=TILE_N, BLOCK_K=TILE_K,
        STAGES=stages, BIAS=bias is not None, RESIDUAL=residual is not None, num_warps=WARPS, **launch_options(x),
    )  # fmt: skip
    return out
