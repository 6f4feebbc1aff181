"""One row times a matrix: what a decode step of a single stream spends most of its time on.

cuBLAS reads the weights of a 0.5B model at a third of an H200's bandwidth here; this kernel at two thirds. A program
makes BLOCK_N outputs and walks over K; its first weights are loaded before it waits for the kernel that writes `x`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.layers.ops.pdl import launch_options

TILES: dict[tuple[int, int], tuple[int, int, int]] = {
    (1152, 896): (4, 2048, 8),
    (896, 896): (4, 2048, 8),
    (9728, 896): (8, 512, 1),
    (896, 4864): (1, 2048, 8),
    (151936, 896): (2, 512, 1),
    (4096, 1024): (4, 512, 1),
    (6144, 1024): (4, 512, 1),
    (1024, 2048): (2, 2048, 4),
    (1024, 3072): (2, 2048, 4),
    (6144, 4096): (4, 1024, 2),
    (4096, 4096): (2, 1024, 4),
    (28672, 4096): (1, 2048, 1),
    (4096, 14336): (1, 2048, 4),
}
"""Best (BLOCK_N, BLOCK_K, warps) by (N, K), measured on an H200 with Triton 3.6 and cold weights."""


def tile(n: int, k: int) -> tuple[int, int, int]:
    """Tile sizes and warps for a shape: measured, or by analogy with the measured ones."""
    if (n, k) in TILES:
        return TILES[n, k]
    if n * k >= 1 << 25:
        return (2, 512, 1) if k <= 1024 else (1, 2048, 1)
    if n >= 4096:
        return (4, 512, 1) if k <= 1024 else (2, 1024, 4)
    return (2, min(2048, triton.next_power_of_2(k)), 4)


@triton.jit
def _gemv_kernel(
    x, w, bias, out, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = w + n[:, None].to(tl.int64) * K
    mask = (n[:, None] < N) & (k[None, :] < K)
    weights = tl.load(rows + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    inputs = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    total = tl.sum(weights.to(tl.float32) * inputs[None, :], 1)
    for start in range(BLOCK_K, K, BLOCK_K):
        at = start + k
        inputs = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        mask = (n[:, None] < N) & (at[None, :] < K)
        weights = tl.load(rows + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        total += tl.sum(weights.to(tl.float32) * inputs[None, :], 1)
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < N)


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x Wᵀ + b` for one row.

    Args:
        x: `[1, K]`.
        weight: `[N, K]`, contiguous.
        bias: `[N]` or None.

    Returns:
        `[1, N]` in the dtype of `x`; sums are in float32.
    """
    n, k = weight.shape
    out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    block_n, block_k, warps = tile(n, k)
    _gemv_kernel[(triton.cdiv(n, block_n),)](
        x, weight, weight if bias is None else bias, out, n, k,
        BLOCK_N=block_n, BLOCK_K=block_k, BIAS=bias is not None, num_warps=warps, num_stages=1, **launch_options(x),
    )  # fmt: skip
    return out
