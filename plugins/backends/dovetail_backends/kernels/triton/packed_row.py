"""One row times numbers of 8 bits: as `gemv` for plain weights, each group's sum times its scale.

N outputs, K inputs, G groups of inputs that share a scale. Packed words of 4 bits go through `packed_few` even for one
row: taking them apart for tensor cores costs fewer instructions than multiplying them one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.layers import Act
from dovetail_backends.kernels.triton.endings import ended_row
from dovetail_backends.kernels.triton.packed_weight import PackedWeight
from dovetail_backends.kernels.triton.pdl import launch_options

RowTile = tuple[int, int, int]
"""BLOCK_N, BLOCK_K, warps."""


@triton.jit
def scaled_sum(
    weights, inputs, scale, n, start, N,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums over BLOCK_K inputs of numbers `[BLOCK_N, BLOCK_K]`, times the scales of rows `n`: `[BLOCK_N]`.

    `inputs` are `[1, BLOCK_K]`, or `[BLOCK_N, BLOCK_K]` where each row has its own.
    """
    products = weights.to(tl.float32) * inputs
    if GROUPS == 0:
        found = tl.sum(products, 1)
    elif (GROUP & (GROUP - 1)) == 0 and BLOCK_K % GROUP == 0:
        PARTS: tl.constexpr = BLOCK_K // GROUP
        group = start // GROUP + tl.arange(0, PARTS)
        inside = (n[:, None] < N) & (group[None, :] < GROUPS)
        of_group = tl.load(scale + n[:, None] * GROUPS + group[None, :], mask=inside, other=0.0)
        found = tl.sum(tl.sum(tl.reshape(products, [BLOCK_N, PARTS, GROUP]), 2) * of_group, 1)
    else:
        at = start + tl.arange(0, BLOCK_K)
        inside = (n[:, None] < N) & (at[None, :] < K)
        of_group = tl.load(scale + n[:, None] * GROUPS + at[None, :] // GROUP, mask=inside, other=0.0)
        found = tl.sum(products * of_group, 1)
    return found


@triton.jit
def _row_kernel(
    x, w, scale, row_scale, bias, norm, residual, out, eps,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr,
    RESIDUAL: tl.constexpr, ROW_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    ALL: tl.constexpr = N * (1 + GATE)
    rows = w + n[:, None].to(tl.int64) * K
    up_rows = rows + N * K
    mask = (n[:, None] < N) & (k[None, :] < K)
    weights = tl.load(rows + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    if GATE:
        ups = tl.load(up_rows + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    inputs = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    squares = inputs
    if NORM:
        squares = inputs * inputs
        inputs *= tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    total = scaled_sum(weights, inputs[None, :], scale, n, 0, N, K, GROUP, GROUPS, BLOCK_N, BLOCK_K)
    up_total = total
    if GATE:
        up_total = scaled_sum(ups, inputs[None, :], scale, n + N, 0, ALL, K, GROUP, GROUPS, BLOCK_N, BLOCK_K)
    for start in range(BLOCK_K, K, BLOCK_K):
        at = start + k
        mask = (n[:, None] < N) & (at[None, :] < K)
        weights = tl.load(rows + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        if GATE:
            ups = tl.load(up_rows + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        inputs = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        if NORM:
            squares += inputs * inputs
            inputs *= tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)
        total += scaled_sum(weights, inputs[None, :], scale, n, start, N, K, GROUP, GROUPS, BLOCK_N, BLOCK_K)
        if GATE:
            up_total += scaled_sum(ups, inputs[None, :], scale, n + N, start, ALL, K, GROUP, GROUPS, BLOCK_N, BLOCK_K)
    if ROW_SCALE:
        total *= tl.load(row_scale + n, mask=n < N, other=0.0)
        if GATE:
            up_total *= tl.load(row_scale + N + n, mask=n < N, other=0.0)
    total = ended_row(total, up_total, squares, bias, n, eps, N, K, NORM, BIAS, GATE, ACT, out.dtype.element_ty)
    if RESIDUAL:
        added = tl.load(residual + n, mask=n < N, other=0.0).to(tl.float32)
        total = total.to(out.dtype.element_ty).to(tl.float32) + added
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < N)


def row(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    tile: RowTile,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    act: Act | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """As `packed_few.few` for one row `[1, K]` and numbers of 8 bits."""
    k = weight.num_in
    n = weight.num_out // 2 if act else weight.num_out
    block_n, block_k, warps = tile
    out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    scales = (x if one is None else one for one in (weight.scale, weight.row_scale))
    _row_kernel[(triton.cdiv(n, block_n),)](
        x, weight.numbers, *scales, x if bias is None else bias, x if norm is None else norm,
        x if residual is None else residual, out, eps, N=n, K=k, GROUP=weight.group, GROUPS=weight.groups,
        BLOCK_N=block_n, BLOCK_K=block_k, BIAS=bias is not None, NORM=norm is not None, ACT=act or "",
        GATE=act is not None, RESIDUAL=residual is not None, ROW_SCALE=weight.row_scale is not None, num_warps=warps,
        num_stages=1, **launch_options(x),
    )  # fmt: skip
    return out
