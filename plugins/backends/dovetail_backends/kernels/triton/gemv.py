"""One row times a matrix: what a decode step of a single stream spends most of its time on.

cuBLAS reads the weights of a 0.5B model at a third of an H200's bandwidth here; this kernel at two thirds. A program
makes BLOCK_N outputs and walks over K; its first weights are loaded before it waits for the kernel that writes `x`.
What stands around the product is done by the same kernel: a launch costs more than computing a norm once per program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail_backends.kernels.triton.endings import ended_row
from dovetail_backends.kernels.triton.pdl import launch_options

TILES: dict[tuple[int, int], tuple[int, int, int]] = {
    (1152, 896): (4, 1024, 8),
    (896, 896): (4, 1024, 8),
    (9728, 896): (4, 512, 1),
    (896, 4864): (2, 4096, 8),
    (151936, 896): (2, 512, 1),
    (4096, 1024): (4, 1024, 4),
    (1024, 2048): (2, 2048, 4),
    (6144, 1024): (4, 512, 1),
    (1024, 3072): (4, 4096, 16),
    (6144, 4096): (4, 2048, 8),
    (4096, 4096): (2, 1024, 4),
    (28672, 4096): (8, 512, 2),
    (4096, 14336): (1, 2048, 4),
    # What each of two ranks has of the 8B, the 30B-A3B, and of dense models of 32B and 70B.
    (3072, 4096): (2, 2048, 1),
    (4096, 2048): (2, 1024, 1),
    (14336, 4096): (4, 2048, 1),
    (4096, 7168): (4, 4096, 4),
    (64128, 4096): (1, 4096, 8),
    (2560, 2048): (2, 1024, 1),
    (2048, 2048): (4, 1024, 1),
    (75968, 2048): (4, 1024, 4),
    (5120, 5120): (2, 1024, 1),
    (5120, 4096): (2, 1024, 1),
    (25600, 5120): (4, 1024, 1),
    (5120, 12800): (2, 1024, 1),
    (75968, 5120): (1, 1024, 1),
    (5120, 8192): (2, 1024, 2),
    (8192, 4096): (2, 1024, 4),
    (28672, 8192): (4, 4096, 4),
    (8192, 14336): (1, 2048, 4),
    (64128, 8192): (1, 4096, 2),
}
"""Best (BLOCK_N, BLOCK_K, warps) by (N, K): on an H200, Triton 3.6, cold weights; `tests/benchmarks/gemv_tiles.py`."""


def best_tile(n: int, k: int, *, gate: bool = False) -> tuple[int, int, int]:
    """Tile sizes and warps for a weight: measured, or by analogy with the measured ones; half the rows for a gate."""
    if gate:
        block_n, block_k, warps = best_tile(n, k)
        return max(1, block_n // 2), block_k, warps
    if (n, k) in TILES:
        return TILES[n, k]
    if n * k >= 1 << 25:
        return (2, 512, 1) if k <= 1024 else (4, 1024, 4) if k <= 2048 else (1, 2048, 1)
    if k >= 2048:
        return (2, 1024, 1)
    if n >= 4096:
        return (4, 512, 1) if k <= 1024 else (2, 1024, 4)
    return (2, min(2048, triton.next_power_of_2(k)), 4)


@triton.jit
def _gemv_kernel(
    x, w, bias, norm, residual, out, eps,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = w + n[:, None].to(tl.int64) * K
    up_rows = rows + N * K
    mask = (n[:, None] < N) & (k[None, :] < K)
    weights = tl.load(rows + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    if GATE:
        up_weights = tl.load(up_rows + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    if NORM:
        norms = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    inputs = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    squares = inputs
    if NORM:
        squares = inputs * inputs
        inputs *= norms
    total = tl.sum(weights.to(tl.float32) * inputs[None, :], 1)
    up_total = total
    if GATE:
        up_total = tl.sum(up_weights.to(tl.float32) * inputs[None, :], 1)
    for start in range(BLOCK_K, K, BLOCK_K):
        at = start + k
        inputs = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        if NORM:
            squares += inputs * inputs
            inputs *= tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)
        mask = (n[:, None] < N) & (at[None, :] < K)
        weights = tl.load(rows + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        total += tl.sum(weights.to(tl.float32) * inputs[None, :], 1)
        if GATE:
            up_weights = tl.load(up_rows + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            up_total += tl.sum(up_weights.to(tl.float32) * inputs[None, :], 1)
    total = ended_row(
        total, up_total, squares, bias, n, eps, N, K, NORM, BIAS, GATE, "silu_and_mul", out.dtype.element_ty
    )
    if RESIDUAL:
        added = tl.load(residual + n, mask=n < N, other=0.0).to(tl.float32)
        total = total.to(out.dtype.element_ty).to(tl.float32) + added
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < N)


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile: tuple[int, int, int] | None = None,
) -> Tensor:
    """`x Wᵀ + b` for one row, with what stands before and after it.

    Args:
        x: `[1, K]`.
        weight: `[N, K]`, contiguous; `[2 N, K]` with `gate`.
        bias: As many as the weight has rows, or None.
        norm: `[K]`, weight of an RMS norm of `x` before the product, or None.
        eps: Of the norm.
        gate: The product is gate and up side by side; return `silu(gate) * up`.
        residual: `[1, N]`, added to the product, or None.
        dtype: Of the result; that of `x` if not given.
        tile: BLOCK_N, BLOCK_K and warps; from `TILES` if not given.

    Returns:
        `[1, N]`; sums are in float32. The norm's factor multiplies the product rather than the
        row, so that one pass over the row does for both.
    """
    num, k = weight.shape
    n = num // 2 if gate else num
    out = torch.empty(1, n, dtype=dtype or x.dtype, device=x.device)
    block_n, block_k, warps = tile or best_tile(num, k, gate=gate)
    _gemv_kernel[(triton.cdiv(n, block_n),)](
        x, weight, x if bias is None else bias, x if norm is None else norm, x if residual is None else residual, out,
        eps, N=n, K=k, BLOCK_N=block_n, BLOCK_K=block_k, BIAS=bias is not None, NORM=norm is not None, GATE=gate,
        RESIDUAL=residual is not None, num_warps=warps, num_stages=1, **launch_options(x),
    )  # fmt: skip
    return out
