"""A few rows times a matrix, for decode batches of 2 to 64: the weights are what is read, rows only fill the tile.

M rows, N outputs, K inputs. A program makes BLOCK_N outputs of all rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail_backends.kernels.triton.endings import ended_tile, summed_parts
from dovetail_backends.kernels.triton.launch import Tile, scratch
from dovetail_backends.kernels.triton.pdl import launch_options

ROWS = (16, 32, 64)
"""Rows that a tile has, of which a product may use fewer."""
SHARED_BYTES = 200 << 10
"""Shared memory of a device for which the tiles are meant."""

Tiles = dict[tuple[int, int], dict[int, Tile]]
"""Tiles by the weight's `[N, K]` and by the rows of a tile."""

TILES: Tiles = {
    (1152, 896): {16: (16, 1024, 4, 2, 1), 32: (16, 1024, 8, 2, 1)},
    (896, 896): {16: (64, 256, 4, 2, 4), 32: (64, 256, 4, 2, 4), 64: (32, 512, 8, 2, 2)},
    (896, 4864): {16: (64, 128, 4, 4, 8), 32: (64, 128, 4, 4, 8), 64: (64, 128, 4, 4, 8)},
    (151936, 896): {16: (64, 128, 4, 3, 1)},
    (4096, 1024): {16: (64, 256, 4, 3, 1), 32: (64, 256, 4, 3, 1)},
    (1024, 2048): {16: (64, 256, 4, 3, 4), 32: (64, 128, 4, 3, 4), 64: (64, 128, 4, 3, 4)},
    (1024, 3072): {16: (64, 256, 4, 3, 4), 32: (64, 128, 4, 4, 4), 64: (64, 128, 4, 3, 4)},
    (151936, 1024): {16: (64, 128, 4, 3, 1)},
    (6144, 4096): {16: (64, 256, 4, 4, 1)},
    (4096, 4096): {16: (64, 256, 4, 4, 1), 64: (64, 128, 4, 4, 2)},
    (4096, 14336): {16: (64, 128, 4, 3, 4), 32: (64, 128, 4, 4, 2), 64: (64, 128, 4, 4, 2)},
}
"""Weights where this kernel beats cuBLAS, with the best tile; measured on an H200 with Triton 3.6 in whole decode steps
by `tests/benchmarks/skinny.py`. None has 64 outputs and 8 warps: with 4 stages, Triton 3.6 compiles a race there."""
GATE_TILES: Tiles = {
    (9728, 896): {32: (64, 64, 4, 4, 1)},
    (6144, 1024): {16: (64, 256, 4, 2, 1)},
    (28672, 4096): {16: (128, 64, 8, 4, 1), 32: (64, 64, 4, 4, 1), 64: (128, 64, 8, 4, 1)},
}
"""The same for gate and up, `[2 N, K]`, with norm and gate in the kernel."""


def tile_for(num_rows: int, weight: Tensor, tiles: Tiles) -> tuple[int, Tile] | None:
    """Return the rows of the tile and the rest of it that serve a product best, or None where cuBLAS does."""
    block_m = next((rows for rows in ROWS if num_rows <= rows), None)
    tile = tiles.get((weight.shape[0], weight.shape[1]), {}).get(block_m or 0)
    return None if block_m is None or tile is None or num_rows < 2 else (block_m, tile)


@triton.jit
def _columns(
    x, norm, squares, at, M, stride_x, K: tl.constexpr, BLOCK_M: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Columns `at` of the rows, times the norm's weight, `[BLOCK_K, BLOCK_M]`; and the sums of squares so far."""
    m = tl.arange(0, BLOCK_M)
    mask = (m[:, None] < M) & (at[None, :] < K)
    inputs = tl.load(x + m[:, None] * stride_x + at[None, :], mask=mask, other=0.0)
    if NORM:
        wide = inputs.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        norms = tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)
        inputs = (wide * norms[None, :]).to(inputs.dtype)
    return tl.trans(inputs), squares


@triton.jit(do_not_specialize=["M"])
def _skinny_kernel(
    x, w, bias, norm, residual, out, part, arrived, eps, M, stride_x, stride_r,
    N: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    rows = w + n[:, None].to(tl.int64) * K
    up_rows = rows + N * K
    begin = split * SPAN
    at = begin + k
    mask = (n[:, None] < N) & (at[None, :] < K)
    weights = tl.load(rows + at[None, :], mask=mask, other=0.0)
    if GATE:
        ups = tl.load(up_rows + at[None, :], mask=mask, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    squares = tl.zeros([BLOCK_M], tl.float32)
    columns, squares = _columns(x, norm, squares, at, M, stride_x, K, BLOCK_M, NORM)
    total = tl.dot(weights, columns, input_precision="ieee")
    up_total = total
    if GATE:
        up_total = tl.dot(ups, columns, input_precision="ieee")
    for start in tl.range(begin + BLOCK_K, tl.minimum(begin + SPAN, K), BLOCK_K, num_stages=STAGES):
        at = start + k
        mask = (n[:, None] < N) & (at[None, :] < K)
        weights = tl.load(rows + at[None, :], mask=mask, other=0.0)
        columns, squares = _columns(x, norm, squares, at, M, stride_x, K, BLOCK_M, NORM)
        total = tl.dot(weights, columns, total, input_precision="ieee")
        if GATE:
            ups = tl.load(up_rows + at[None, :], mask=mask, other=0.0)
            up_total = tl.dot(ups, columns, up_total, input_precision="ieee")
    is_last = True
    if SPLITS > 1:
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        total, is_last = summed_parts(total, part, arrived, tile, split, inner, SPLITS, BLOCK_N, BLOCK_M)
    if is_last:
        live = (m[None, :] < M) & (n[:, None] < N)
        total = ended_tile(
            total, up_total, squares, bias, bias, n, eps, N, K, False, NORM, BIAS, GATE, "silu_and_mul",
            out.dtype.element_ty,
        )  # fmt: skip
        if RESIDUAL:
            added = tl.load(residual + m[None, :] * stride_r + n[:, None], mask=live, other=0.0).to(tl.float32)
            total = total.to(out.dtype.element_ty).to(tl.float32) + added
        tl.store(out + m[None, :] * N + n[:, None], total.to(out.dtype.element_ty), mask=live)


def skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: tuple[int, Tile],
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`x Wᵀ + b` for 2 to 64 rows, with what stands before and after it.

    Args:
        x: `[M, K]`, rows contiguous in K.
        weight: `[N, K]`, contiguous; `[2 N, K]` with `gate`.
        bias: As many as the weight has rows, or None.
        tile: From `tile_for`. With `norm` or `gate`, K is not split.
        norm: `[K]`, weight of an RMS norm of the rows of `x` before the product, or None.
        eps: Of the norm.
        gate: The product is gate and up side by side; return `silu(gate) * up`.
        residual: `[M, N]`, rows contiguous, added to the product, or None.

    Returns:
        `[M, N]` in the dtype of `x`; sums are in float32, splits of K added in fixed order.
    """
    rows, (num, k) = x.shape[0], weight.shape
    n = num // 2 if gate else num
    block_m, (block_n, block_k, warps, stages, splits) = tile
    if norm is not None or gate:
        splits = 1
    tiles, span = triton.cdiv(n, block_n), triton.cdiv(triton.cdiv(k, block_k), splits) * block_k
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    part, arrived = scratch(x.device, tiles * splits * block_n * block_m, tiles) if splits > 1 else (x, x)
    _skinny_kernel[(tiles, splits)](
        x, weight, x if bias is None else bias, x if norm is None else norm, x if residual is None else residual, out,
        part, arrived, eps, rows, x.stride(0), n if residual is None else residual.stride(0),
        N=n, K=k, SPAN=span, SPLITS=splits, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages,
        BIAS=bias is not None, NORM=norm is not None, GATE=gate, RESIDUAL=residual is not None, num_warps=warps,
        **launch_options(x),
    )  # fmt: skip
    return out
