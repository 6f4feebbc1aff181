"""A few rows times int4 weights in integer arithmetic, four products an instruction, each block's sum times its scale.

Every 64 inputs of a row are divided by a power of two that makes their greatest number one of 16 bits, rounded, and
kept as two bytes: what is lost is at most `2 ** -15` of the greatest number of the 64. Products of these with nibbles,
and their sums over 64 inputs, are exact; sums of blocks are in float32. So nibbles need not become floating point.

M rows, N outputs, K inputs, W words a row of a weight, B = W / 8 blocks of 64 inputs; see `nibbles` for the words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.layers import Act
from dovetail.layers.ops.nibbles import BLOCK
from dovetail.layers.ops.packed_row import RowTile
from dovetail.layers.ops.packed_tiles import block_scales
from dovetail.layers.ops.packed_weight import PackedWeight
from dovetail.layers.ops.pdl import interpreted, launch_options
from dovetail.layers.ops.silu import act_gated

MOST_PROGRAM = 1024
"""Inputs that a program makes integers of where no norm needs the whole row."""
_PRODUCTS = (
    "{.reg .b32 e, o, t; and.b32 e, $1, 0x0f0f0f0f; shr.u32 o, $1, 4; and.b32 o, o, 0x0f0f0f0f;"
    " dp4a.u32.s32 t, e, $2, 0; dp4a.u32.s32 t, o, $3, t; shl.b32 t, t, 8;"
    " dp4a.u32.u32 t, e, $4, t; dp4a.u32.u32 $0, o, $5, t;}"
)
ASM_PRODUCTS: tl.constexpr = tl.constexpr(_PRODUCTS)
"""Of a word, and the upper and lower bytes of the inputs of its even and of its odd nibbles."""


class Integers(NamedTuple):
    """Rows as integers of 16 bits in the order of words.

    Attributes:
        bytes: `[M, 4, W]` int32, four bytes each: upper bytes of the inputs of a word's even nibbles, of its odd
            nibbles, then lower bytes likewise. The upper ones are signed.
        sums: `[M, B]` int32, of a block's integers.
        scale: `[M, B]` float32, what one stands for.
    """

    bytes: Tensor
    sums: Tensor
    scale: Tensor


@triton.jit
def _inputs(x, norm, factor, at, K: tl.constexpr, NORM: tl.constexpr):
    """Numbers `at` of a row, normed, in float32."""
    given = tl.load(x + at, mask=at < K, other=0.0)
    wide = given.to(tl.float32)
    if NORM:
        wide = (wide * factor).to(given.dtype).to(tl.float32)
        wide = (wide * tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)).to(given.dtype).to(tl.float32)
    return wide


@triton.jit
def _integers_kernel(
    x, norm, made, sums, scale, eps, stride_x, blocks,
    K: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SIZE blocks of one row, of `blocks`: a lane has the numbers of one word, whichever planes they are in."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.program_id(0).to(tl.int64)
    block, word = tl.program_id(1) * SIZE + tl.arange(0, SIZE), tl.arange(0, 8)
    first = block[:, None] * 64 + word[None, :]
    x += m * stride_x
    squares = tl.zeros([SIZE, 8], tl.float32)
    factor = 1.0
    if NORM:
        for plane in tl.static_range(8):
            wide = _inputs(x, norm, factor, first + plane * 8, K, False)
            squares += wide * wide
        factor = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)
    greatest, wrong = tl.zeros([SIZE, 8], tl.float32), tl.zeros([SIZE, 8], tl.float32)
    for plane in tl.static_range(8):
        wide = _inputs(x, norm, factor, first + plane * 8, K, NORM)
        greatest = tl.maximum(greatest, tl.abs(wide))
        wrong += wide * 0.0
    exponent = tl.maximum((tl.max(greatest, 1).to(tl.int32, bitcast=True) >> 23) & 255, 16)
    times = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # 2 ** (14 - (exponent - 127))
    even, odd = tl.zeros([SIZE, 8], tl.int32), tl.zeros([SIZE, 8], tl.int32)
    low_even, low_odd, total = even, even, even
    for plane in tl.static_range(8):
        wide = _inputs(x, norm, factor, first + plane * 8, K, NORM)
        whole = tl.floor(wide * times[:, None] + 0.5).to(tl.int32)
        total += whole
        upper, lower = ((whole >> 8) & 255) << (plane // 2 * 8), (whole & 255) << (plane // 2 * 8)
        if plane % 2 == 0:
            even, low_even = even | upper, low_even | lower
        else:
            odd, low_odd = odd | upper, low_odd | lower
    row = tl.cast(blocks, tl.int64) * 8
    to = made + m * 4 * row + block[:, None] * 8 + word[None, :]
    live = block[:, None] < blocks
    tl.store(to, even, mask=live)
    tl.store(to + row, odd, mask=live)
    tl.store(to + 2 * row, low_even, mask=live)
    tl.store(to + 3 * row, low_odd, mask=live)
    tl.store(sums + m * blocks + block, tl.sum(total, 1), mask=block < blocks)
    by = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    by += tl.sum(wrong, 1)  # what is not finite stays so: a maximum skips nan
    tl.store(scale + m * blocks + block, by, mask=block < blocks)


def integers(x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Integers:
    """Return rows `[M, K]` in bfloat16 or float16, or their RMS norm with weight `norm` `[K]`, as integers."""
    rows, k = x.shape
    blocks = triton.cdiv(k, BLOCK)
    made = torch.empty(rows, 4, blocks * 8, dtype=torch.int32, device=x.device)
    sums = torch.empty(rows, blocks, dtype=torch.int32, device=x.device)
    scale = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
    size = triton.next_power_of_2(blocks)
    size = size if norm is not None else min(size, MOST_PROGRAM // BLOCK)
    _integers_kernel[(rows, triton.cdiv(blocks, size))](
        x, x if norm is None else norm, made, sums, scale, eps, x.stride(0), blocks,
        K=k, SIZE=size, NORM=norm is not None, num_warps=8 if size > 32 else 4, **launch_options(x),
    )  # fmt: skip
    return Integers(made, sums, scale)


@triton.jit
def _four(words, inputs, SHIFT: tl.constexpr, SIGNED: tl.constexpr):
    """Sum of the products of four nibbles of a word, from bit SHIFT on, eight bits apart, and four bytes."""
    total = tl.zeros(words.shape, tl.int32)
    for place in tl.static_range(4):
        byte = (inputs >> (8 * place)) & 255
        if SIGNED:
            byte = (byte ^ 128) - 128
        total += ((words >> (8 * place + SHIFT)) & 15) * byte
    return total


@triton.jit
def _block_sums(words, even, odd, low_even, low_odd, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, ASM: tl.constexpr):
    """Sums over blocks of products of words `[BLOCK_N, BLOCK_W]` and bytes `[1, BLOCK_W]`."""
    if ASM:
        found = tl.inline_asm_elementwise(
            ASM_PRODUCTS, "=r,r,r,r,r,r", [words, even, odd, low_even, low_odd], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        found = (_four(words, even, 0, True) + _four(words, odd, 4, True)) * 256
        found += _four(words, low_even, 0, False) + _four(words, low_odd, 4, False)
    return tl.sum(tl.reshape(found, [BLOCK_N, BLOCK_W // 8, 8]), 2)


@triton.jit
def _int4_kernel(
    made, sums, factors, w, scale, offset, bias, residual, out, stride_r,
    N: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr,
    ZERO: tl.constexpr, ONCE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one row; the programs of all rows that read the same weights begin together."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k, block = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_W // 8)
    dtype: tl.constexpr = scale.dtype.element_ty
    ALL: tl.constexpr = N * (1 + GATE)
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    rows = w + n[:, None].to(tl.int64) * ROW
    mask = (n[:, None] < N) & (k[None, :] < ROW)
    words = tl.load(rows + k[None, :], mask=mask, other=0, eviction_policy=POLICY)
    if GATE:
        ups = tl.load(rows + N * ROW + k[None, :], mask=mask, other=0, eviction_policy=POLICY)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    given = made + m * 4 * ROW
    total = tl.zeros([BLOCK_N, BLOCK_W // 8], tl.float32)
    up_total = total
    for start in tl.static_range(0, ROW, BLOCK_W):
        at, in_block = start + k, start // 8 + block
        if start > 0:
            mask = (n[:, None] < N) & (at[None, :] < ROW)
            words = tl.load(rows + at[None, :], mask=mask, other=0, eviction_policy=POLICY)
            if GATE:
                ups = tl.load(rows + N * ROW + at[None, :], mask=mask, other=0, eviction_policy=POLICY)
        here = at < ROW
        even = tl.load(given + at, mask=here, other=0)[None, :]
        odd = tl.load(given + ROW + at, mask=here, other=0)[None, :]
        low_even = tl.load(given + 2 * ROW + at, mask=here, other=0)[None, :]
        low_odd = tl.load(given + 3 * ROW + at, mask=here, other=0)[None, :]
        here = in_block < ROW // 8
        of_block = tl.load(sums + m * (ROW // 8) + in_block, mask=here, other=0)[None, :]
        factor = tl.load(factors + m * (ROW // 8) + in_block, mask=here, other=0.0)[None, :]
        low, _, zero, _ = block_scales(scale, offset, n, start, N, "int4", GROUP, GROUPS, BLOCK_W, ZERO, dtype)
        found = _block_sums(words, even, odd, low_even, low_odd, BLOCK_N, BLOCK_W, ASM)
        found -= (zero.to(tl.int32) - 128) * of_block
        total += found.to(tl.float32) * (factor * low.to(tl.float32))
        if GATE:
            low, _, zero, _ = block_scales(
                scale, offset, n + N, start, ALL, "int4", GROUP, GROUPS, BLOCK_W, ZERO, dtype
            )
            found = _block_sums(ups, even, odd, low_even, low_odd, BLOCK_N, BLOCK_W, ASM)
            found -= (zero.to(tl.int32) - 128) * of_block
            up_total += found.to(tl.float32) * (factor * low.to(tl.float32))
    value = tl.sum(total, 1)
    inside = n < N
    if BIAS:
        value += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if GATE:
        up = tl.sum(up_total, 1)
        if BIAS:
            up += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)
        value = act_gated(value, up, ACT, out.dtype.element_ty)
    if RESIDUAL:
        added = tl.load(residual + m * stride_r + n, mask=inside, other=0.0).to(tl.float32)
        value = value.to(out.dtype.element_ty).to(tl.float32) + added
    tl.store(out + m * N + n, value.to(out.dtype.element_ty), mask=inside)


def fits_integers(weight: PackedWeight) -> bool:
    """Whether `by_integers` multiplies by a weight: int4 whose scales are for whole blocks of 64 inputs."""
    return weight.kind == "int4" and weight.group % BLOCK == 0


def by_integers(
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
    """As `packed_few.few` for a few rows in 16-bit floating point, and weights that `fits_integers`.

    Each row is multiplied by itself: others find the weights in the cache. BLOCK_K of the tile counts inputs.
    """
    rows = x.shape[0]
    n = weight.num_out // 2 if act else weight.num_out
    block_n, block_k, warps = tile
    given = integers(x, norm, eps)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    _int4_kernel[(rows, triton.cdiv(n, block_n))](
        *given, weight.numbers, weight.scale, x if weight.offset is None else weight.offset,
        x if bias is None else bias, x if residual is None else residual, out,
        n if residual is None else residual.stride(0), N=n, ROW=weight.numbers.shape[-1], GROUP=weight.group,
        GROUPS=weight.groups, BLOCK_N=block_n, BLOCK_W=block_k // 8, BIAS=bias is not None, ACT=act or "",
        GATE=act is not None, RESIDUAL=residual is not None, ZERO=weight.offset is not None, ONCE=rows == 1,
        ASM=not interpreted(), num_warps=warps, num_stages=1, **launch_options(x),
    )  # fmt: skip
    return out
