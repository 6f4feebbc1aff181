"""Products of heads around latent attention whose rows have the same bits however many there are.

One tile and one order of sums for every product, as in `dovetail_backends.kernels.triton.fixed`: a program makes
`TILE_N` outputs of `TILE_M` tokens for a head, and goes through all inputs.

T tokens, N heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail_backends.kernels.triton.pdl import launch_options

TILE_M, TILE_N, TILE_K, WARPS = 64, 64, 64, 4


@triton.jit(do_not_specialize=["num"])
def _heads_kernel(
    x, weight, out, num, stride_xt, stride_xh, stride_wh, stride_wk, stride_wn, stride_ot, stride_oh,
    K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = x + m[:, None].to(tl.int64) * stride_xt + head * stride_xh
    columns = weight + head * stride_wh + n[:, None].to(tl.int64) * stride_wn
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = (start + tl.arange(0, BLOCK_K))[None, :]
        weights = tl.load(columns + k * stride_wk, mask=(n[:, None] < N) & (k < K), other=0.0)
        inputs = tl.load(tokens + k, mask=(m[:, None] < num) & (k < K), other=0.0)
        total = tl.dot(weights, tl.trans(inputs), total, input_precision="ieee")
    at = out + m[None, :].to(tl.int64) * stride_ot + head * stride_oh + n[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=(m[None, :] < num) & (n[:, None] < N))


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply each head by a matrix of its own; a token has the bits that it has alone.

    Args:
        x: `[T, N, in]`, contiguous in the last axis.
        weight: `[N, in, out]`, of the same dtype, in any strides.
        out: `[T, N, out]`, contiguous in the last axis; written in full. Sums are float32.
    """
    num, (heads, k, n) = len(x), weight.shape
    if not num:
        return
    _heads_kernel[(triton.cdiv(num, TILE_M), triton.cdiv(n, TILE_N), heads)](
        x, weight, out, num, x.stride(0), x.stride(1), *weight.stride(),
        out.stride(0), out.stride(1), K=k, N=n, BLOCK_M=TILE_M, BLOCK_N=TILE_N, BLOCK_K=TILE_K,
        STAGES=4 if x.element_size() == 2 else 2, num_warps=WARPS, **launch_options(x),
    )  # fmt: skip
