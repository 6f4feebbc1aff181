"""A few rows times a matrix, for decode batches of 2 to 16: the weights are what is read, rows only fill the tile.

M rows, N outputs, K inputs. A program makes BLOCK_N outputs of all rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.layers.ops.pdl import launch_options

MAX_ROWS = 16
TILES: dict[tuple[int, int], tuple[int, int, int, int]] = {
    (1152, 896): (16, 128, 4, 5),
    (896, 896): (16, 128, 2, 5),
    (9728, 896): (64, 128, 4, 3),
    (151936, 896): (64, 128, 4, 3),
    (4096, 1024): (64, 256, 4, 3),
    (1024, 2048): (16, 256, 2, 3),
    (6144, 1024): (16, 256, 2, 5),
    (1024, 3072): (32, 256, 4, 5),
    (151936, 1024): (64, 128, 4, 3),
    (6144, 4096): (64, 128, 4, 5),
    (4096, 4096): (32, 256, 2, 5),
    (4096, 14336): (32, 256, 4, 5),
}
"""Shapes (N, K) where this kernel beats cuBLAS at 16 rows, with the best (BLOCK_N, BLOCK_K, warps, stages).

Measured on an H200 with Triton 3.6 and cold weights by `tests/bench/skinny.py`: by 4 to 40 %. It lost at 28672 x 4096
and 128256 x 4096 and drew at 896 x 4864.
"""


@triton.jit
def _skinny_kernel(
    x, w, bias, out, M, N, stride_x, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    weights_at = w + n[:, None].to(tl.int64) * K
    inputs_at = x + m[:, None] * stride_x
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        at = start + k
        weights = tl.load(weights_at + at[None, :], mask=(n[:, None] < N) & (at[None, :] < K), other=0.0)
        inputs = tl.load(inputs_at + at[None, :], mask=(m[:, None] < M) & (at[None, :] < K), other=0.0)
        total = tl.dot(weights, tl.trans(inputs), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + m[None, :] * N + n[:, None], total.to(out.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N)
    )


def skinny(x: Tensor, weight: Tensor, bias: Tensor | None, tile: tuple[int, int, int, int] | None = None) -> Tensor:
    """`x Wᵀ + b` for 2 to 16 rows.

    Args:
        x: `[M, K]`, rows contiguous in K.
        weight: `[N, K]`, contiguous.
        bias: `[N]` or None.
        tile: BLOCK_N, BLOCK_K, warps and stages; from `TILES` if not given.

    Returns:
        `[M, N]` in the dtype of `x`; sums are in float32.
    """
    rows, (n, k) = x.shape[0], weight.shape
    block_n, block_k, warps, stages = tile or TILES[n, k]
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    _skinny_kernel[(triton.cdiv(n, block_n),)](
        x, weight, weight if bias is None else bias, out, rows, n, x.stride(0), k,
        BLOCK_M=16, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, BIAS=bias is not None, num_warps=warps,
        **launch_options(x),
    )  # fmt: skip
    return out
