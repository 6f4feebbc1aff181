"""A few rows times words of 4 bits in integer arithmetic, two products an instruction, sums times their scales.

Every 64 inputs of a row are divided by a power of two that makes their greatest number one of 16 bits, and rounded:
what is lost is at most `2 ** -15` of the greatest number of the 64. Products of these with nibbles of int4, or with the
bytes that e2m1 becomes, and their sums over 32 or 64 inputs, are exact; sums of blocks are in float32. So nibbles need
not become floating point.

M rows, N outputs, K inputs, W words a row of a weight, B = W / 8 blocks of 64 inputs, P = 2 sums of a block where its
halves have scales of their own, else 1; see `nibbles` for the words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.device import is_interpreted
from dovetail.contracts.layers import Act
from dovetail_backends.kernels.triton.nibbles import BLOCK, e2m1_bytes, e2m1_eighths
from dovetail_backends.kernels.triton.packed_row import RowTile
from dovetail_backends.kernels.triton.packed_tiles import block_scales
from dovetail_backends.kernels.triton.packed_weight import PackedKind, PackedWeight
from dovetail_backends.kernels.triton.pdl import launch_options
from dovetail_backends.kernels.triton.silu import act_gated

MOST_PROGRAM = 1024
"""Inputs that a program makes integers of where no norm needs the whole row."""


def _asm(kind: str, is_halved: bool) -> str:
    """Assembly for the sum of a word's products with eight inputs in four registers, or the sums of its halves."""
    word, first = ("$2", 3) if is_halved else ("$1", 2)
    if kind == "int4":  # bytes are planes 0, 2, 4, 6 and 1, 3, 5, 7
        lines = [f"and.b32 a, {word}, 0x0f0f0f0f; shr.u32 b, {word}, 4; and.b32 b, b, 0x0f0f0f0f;"]
        terms = (("lo", "a"), ("lo", "b"), ("hi", "a"), ("hi", "b"))
    else:
        lines = [e2m1_bytes(word, "a", "b")]
        terms = (("lo", "a"), ("hi", "a"), ("lo", "b"), ("hi", "b"))
    for place, (part, of) in enumerate(terms):
        before = "0" if place == 0 or (is_halved and place == 2) else "sum"
        lines.append(f"dp2a.{part}.s32.u32 sum, ${first + place}, {of}, {before};")
        if place == 3 or (is_halved and place == 1):
            lines.append(f"mov.b32 ${place // 2 if is_halved else 0}, sum;")
    return "{.reg .b32 m, t, u, a, b, sum; " + " ".join(lines) + "}"


INT4_WHOLE: tl.constexpr = tl.constexpr(_asm("int4", False))
INT4_HALVES: tl.constexpr = tl.constexpr(_asm("int4", True))
E2M1_HALVES: tl.constexpr = tl.constexpr(_asm("mxfp4", True))


class Words(NamedTuple):
    """How a weight wants rows as integers.

    Attributes:
        kind: Which inputs are pairs.
        is_halved: Whether each half of a block has a sum.
    """

    kind: PackedKind
    is_halved: bool


class Integers(NamedTuple):
    """Rows as integers of 16 bits in the order of words.

    Attributes:
        pairs: `[M, 4, W]` int32, two integers each, the first one in the lower half: of a word's planes 0 and 2, 1 and
            3, 4 and 6, 5 and 7 for int4; 0 and 1, 2 and 3, 4 and 5, 6 and 7 for e2m1.
        sums: `[M, P, B]` int32, of a block's integers, or of those of each half.
        scale: `[M, B]` float32, what one stands for.
    """

    pairs: Tensor
    sums: Tensor
    scale: Tensor


@triton.jit
def normed_inputs(x, norm, factor, at, K: tl.constexpr, NORM: tl.constexpr):
    """Numbers `at` of a row, normed and rounded as it is, in float32."""
    given = tl.load(x + at, mask=at < K, other=0.0)
    wide = given.to(tl.float32)
    if NORM:
        wide = (wide * factor).to(given.dtype).to(tl.float32)
        wide = (wide * tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)).to(given.dtype).to(tl.float32)
    return wide


@triton.jit
def write_integers(
    wide, made, sums, scale, m, block, blocks, SIZE: tl.constexpr, STRIDE: tl.constexpr, HALVES: tl.constexpr
):  # fmt: skip
    """Write blocks `block` `[SIZE]` of row `m`, of which there are `blocks`, as `Integers`.

    `wide` `[SIZE, 64]` are their numbers in order, zeros behind the row's last; `m` is of 64 bits.
    """
    greatest = tl.max(tl.abs(wide), 1)
    exponent = tl.maximum((greatest.to(tl.int32, bitcast=True) >> 23) & 255, 16)
    times = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # 2 ** (14 - (exponent - 127))
    whole = tl.floor(wide * times[:, None] + 0.5).to(tl.int32)
    # A block is eight planes of eight words. Of two planes that make a pair, one is in the upper half of 32 bits.
    if STRIDE == 1:
        planes = tl.reshape(whole, [SIZE, 4, 2, 8])
        upper = (tl.arange(0, 2) == 1)[None, None, :, None]
        pairs = tl.sum(tl.where(upper, planes << 16, planes & 0xFFFF), 2)
    else:
        planes = tl.reshape(whole, [SIZE, 2, 2, 16])
        upper = (tl.arange(0, 2) == 1)[None, None, :, None]
        pairs = tl.reshape(tl.sum(tl.where(upper, planes << 16, planes & 0xFFFF), 2), [SIZE, 4, 8])
    row = tl.cast(blocks, tl.int64) * 8
    pair, word = tl.arange(0, 4)[None, :, None], tl.arange(0, 8)[None, None, :]
    to = made + m * 4 * row + pair * row + block[:, None, None] * 8 + word
    tl.store(to, pairs, mask=(block < blocks)[:, None, None])
    PARTS: tl.constexpr = 1 + HALVES
    of_parts = tl.sum(tl.reshape(whole, [SIZE, PARTS, 64 // PARTS]), 2)
    part = tl.arange(0, PARTS)[None, :]
    tl.store(sums + (m * PARTS + part) * blocks + block[:, None], of_parts, mask=(block < blocks)[:, None])
    by = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    by += tl.sum(wide * 0.0, 1)  # what is not finite stays so: a maximum skips nan
    tl.store(scale + m * blocks + block, by, mask=block < blocks)


@triton.jit
def _integers_kernel(
    x, norm, made, sums, scale, eps, stride_x, blocks,
    K: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, STRIDE: tl.constexpr, HALVES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """SIZE blocks of one row, of `blocks`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    at = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    x += m * stride_x
    factor = 1.0
    if NORM:
        wide = normed_inputs(x, norm, factor, at, K, False)
        factor = 1.0 / tl.sqrt(tl.sum(tl.sum(wide * wide, 1), 0) / K + eps)
    wide = normed_inputs(x, norm, factor, at, K, NORM)
    write_integers(wide, made, sums, scale, m, block, blocks, SIZE, STRIDE, HALVES)


def room_for(rows: int, k: int, device: torch.device, *, is_halved: bool) -> Integers:
    """Return the buffers that `write_integers` fills for `rows` rows of `k` numbers."""
    blocks = triton.cdiv(k, BLOCK)
    return Integers(
        torch.empty(rows, 4, blocks * 8, dtype=torch.int32, device=device),
        torch.empty(rows, 1 + is_halved, blocks, dtype=torch.int32, device=device),
        torch.empty(rows, blocks, dtype=torch.float32, device=device),
    )


def plane_stride(kind: PackedKind) -> int:
    """Return how many planes lie between those of a pair, and one more."""
    return 2 if kind == "int4" else 1


def integers(x: Tensor, kind: PackedKind, norm: Tensor | None = None, eps: float = 0.0, *, is_halved: bool) -> Integers:
    """Return rows `[M, K]` in bfloat16 or float16, or their RMS norm with weight `norm` `[K]`, as integers.

    Args:
        x: The rows.
        kind: Of the weight that they meet: which inputs are pairs.
        norm: `[K]`, or None.
        eps: Of the norm.
        is_halved: Whether each half of a block has a sum.
    """
    rows, k = x.shape
    given = room_for(rows, k, x.device, is_halved=is_halved)
    blocks = triton.cdiv(k, BLOCK)
    size = triton.next_power_of_2(blocks)
    size = size if norm is not None else min(size, MOST_PROGRAM // BLOCK)
    _integers_kernel[(rows, triton.cdiv(blocks, size))](
        x, x if norm is None else norm, *given, eps, x.stride(0), blocks,
        K=k, SIZE=size, NORM=norm is not None, STRIDE=plane_stride(kind), HALVES=is_halved,
        num_warps=8 if size > 32 else 4, **launch_options(x),
    )  # fmt: skip
    return given


@triton.jit
def _two(words, pair, FIRST: tl.constexpr, STRIDE: tl.constexpr, FORM: tl.constexpr):
    """Products of planes FIRST and FIRST + STRIDE of words and a pair of integers, added up."""
    low, high = (pair << 16) >> 16, pair >> 16
    if FORM == "mxfp4":
        found = (64 + e2m1_eighths(words, FIRST)) * low + (64 + e2m1_eighths(words, FIRST + STRIDE)) * high
    else:
        found = ((words >> (4 * FIRST)) & 15) * low + ((words >> (4 * (FIRST + STRIDE))) & 15) * high
    return found


@triton.jit
def _half_sums(words, first, second, third, fourth, FORM: tl.constexpr, HALVES: tl.constexpr, ASM: tl.constexpr):
    """Sums of products of each half of words and pairs, or the sum of both, twice."""
    if ASM:
        if FORM == "mxfp4":
            low, high = tl.inline_asm_elementwise(
                E2M1_HALVES, "=r,=r,r,r,r,r,r", [words, first, second, third, fourth],
                dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        elif HALVES:
            low, high = tl.inline_asm_elementwise(
                INT4_HALVES, "=r,=r,r,r,r,r,r", [words, first, second, third, fourth],
                dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            low = tl.inline_asm_elementwise(
                INT4_WHOLE, "=r,r,r,r,r,r", [words, first, second, third, fourth],
                dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
            high = low
    else:
        STRIDE: tl.constexpr = 1 if FORM == "mxfp4" else 2
        OTHER: tl.constexpr = 2 // STRIDE
        low = _two(words, first, 0, STRIDE, FORM) + _two(words, second, OTHER, STRIDE, FORM)
        high = _two(words, third, 4, STRIDE, FORM) + _two(words, fourth, 4 + OTHER, STRIDE, FORM)
        if not HALVES:
            low += high
    return low, high


@triton.jit
def load_words(rows, at, live, ROW: tl.constexpr, ONCE: tl.constexpr):
    """Words `at` of rows that are `live`, `[BLOCK_N, BLOCK_W]`; read ONCE, they leave the cache first."""
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    return tl.load(rows + at[None, :], mask=live[:, None] & (at[None, :] < ROW), other=0, eviction_policy=POLICY)


@triton.jit
def load_integers(given, sums, factors, start, ROW: tl.constexpr, HALVES: tl.constexpr, BLOCK_W: tl.constexpr):
    """Load what `by_words` needs of rows as integers, which begin at `given`, `sums` and `factors`, one or `[R, 1]`.

    Returns:
        Four pairs, `[BLOCK_W]` or `[R, BLOCK_W]`, and of blocks the sums of halves and the scale.
    """
    BLOCKS: tl.constexpr = ROW // 8
    at, block = start + tl.arange(0, BLOCK_W), start // 8 + tl.arange(0, BLOCK_W // 8)
    here, inside = (at < ROW)[None, :], (block < BLOCKS)[None, :]
    at, block = at[None, :], block[None, :]
    low = tl.load(sums + block, mask=inside, other=0)
    high = low
    if HALVES:
        high = tl.load(sums + BLOCKS + block, mask=inside, other=0)
    return (
        tl.load(given + at, mask=here, other=0),
        tl.load(given + ROW + at, mask=here, other=0),
        tl.load(given + 2 * ROW + at, mask=here, other=0),
        tl.load(given + 3 * ROW + at, mask=here, other=0),
        low,
        high,
        tl.load(factors + block, mask=inside, other=0.0),
    )


@triton.jit
def by_words(
    words, inputs, scale, offset, n, start, N,
    FORM: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Products of words `[BLOCK_N, BLOCK_W]` of outputs `n` and `inputs` of `load_integers`, a sum for each block.

    Returns:
        `[BLOCK_N, BLOCK_W / 8]` float32, of mxfp4 times `END_OF` and without scales of rows.
    """
    HALVES: tl.constexpr = GROUP % 64 != 0
    first, second, third, fourth, sum_low, sum_high, factor = inputs
    low, high = _half_sums(words, first, second, third, fourth, FORM, HALVES, ASM)
    low = tl.sum(tl.reshape(low, [BLOCK_N, BLOCK_W // 8, 8]), 2)
    if HALVES:
        high = tl.sum(tl.reshape(high, [BLOCK_N, BLOCK_W // 8, 8]), 2)
    if FORM == "mxfp4":
        powers, _, _, _ = block_scales(scale, offset, n, start, N, FORM, GROUP, GROUPS, BLOCK_W, ZERO, tl.float32)
        found = (low - 64 * sum_low).to(tl.float32) * ((powers & 255) << 23).to(tl.float32, bitcast=True)
        found += (high - 64 * sum_high).to(tl.float32) * ((powers >> 8) << 23).to(tl.float32, bitcast=True)
    else:
        dtype: tl.constexpr = scale.dtype.element_ty
        of_low, of_high, zero_low, zero_high = block_scales(
            scale, offset, n, start, N, FORM, GROUP, GROUPS, BLOCK_W, ZERO, dtype
        )
        found = (low - (zero_low.to(tl.int32) - 128) * sum_low).to(tl.float32) * of_low.to(tl.float32)
        if HALVES:
            found += (high - (zero_high.to(tl.int32) - 128) * sum_high).to(tl.float32) * of_high.to(tl.float32)
    return found * factor


@triton.jit
def summed(total, row_scale, n, inside, FORM: tl.constexpr):
    """Sum of blocks `[R, …]` of `by_words` for outputs `n` that are `inside`, with the scales of rows of mxfp4."""
    value = tl.sum(total, 1)
    if FORM == "mxfp4":
        value *= tl.load(row_scale + n, mask=inside, other=0.0) * 0.015625  # 8 number * 2 ** (power - 127), see nibbles
    return value


@triton.jit
def _words_kernel(
    pairs, sums, factors, w, scale, offset, row_scale, bias, residual, out, stride_r,
    N: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, FORM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr,
    RESIDUAL: tl.constexpr, ZERO: tl.constexpr, ONCE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one row; the programs of all rows that read the same weights begin together."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_W)
    ALL: tl.constexpr = N * (1 + GATE)
    HALVES: tl.constexpr = GROUP % 64 != 0
    rows = w + n[:, None].to(tl.int64) * ROW
    inside = n < N
    words = load_words(rows, k, inside, ROW, ONCE)
    if GATE:
        ups = load_words(rows + N * ROW, k, inside, ROW, ONCE)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pairs += m * 4 * ROW
    sums += m * (1 + HALVES) * (ROW // 8)
    factors += m * (ROW // 8)
    total = tl.zeros([BLOCK_N, BLOCK_W // 8], tl.float32)
    up_total = total
    for start in tl.static_range(0, ROW, BLOCK_W):
        if start > 0:
            words = load_words(rows, start + k, inside, ROW, ONCE)
            if GATE:
                ups = load_words(rows + N * ROW, start + k, inside, ROW, ONCE)
        inputs = load_integers(pairs, sums, factors, start, ROW, HALVES, BLOCK_W)
        total += by_words(words, inputs, scale, offset, n, start, N, FORM, GROUP, GROUPS, ZERO, BLOCK_N, BLOCK_W, ASM)
        if GATE:
            up_total += by_words(
                ups, inputs, scale, offset, n + N, start, ALL, FORM, GROUP, GROUPS, ZERO, BLOCK_N, BLOCK_W, ASM
            )
    value = summed(total, row_scale, n, inside, FORM)
    if BIAS:
        value += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if GATE:
        up = summed(up_total, row_scale, n + N, inside, FORM)
        if BIAS:
            up += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)
        value = act_gated(value, up, ACT, out.dtype.element_ty)
    if RESIDUAL:
        added = tl.load(residual + m * stride_r + n, mask=inside, other=0.0).to(tl.float32)
        value = value.to(out.dtype.element_ty).to(tl.float32) + added
    tl.store(out + m * N + n, value.to(out.dtype.element_ty), mask=inside)


def fits_integers(weight: PackedWeight) -> bool:
    """Whether a weight is multiplied as integers: words, whose scales are for blocks of inputs or halves of them."""
    return weight.kind != "scaled"


def is_halved(weight: PackedWeight) -> bool:
    """Whether the halves of a block have scales of their own."""
    return weight.group % BLOCK != 0


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
    given = integers(x, weight.kind, norm, eps, is_halved=is_halved(weight))
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    scales = (x if one is None else one for one in (weight.scale, weight.offset, weight.row_scale))
    _words_kernel[(rows, triton.cdiv(n, block_n))](
        *given, weight.numbers, *scales, x if bias is None else bias, x if residual is None else residual, out,
        n if residual is None else residual.stride(0), N=n, ROW=weight.numbers.shape[-1], GROUP=weight.group,
        GROUPS=weight.groups, FORM=weight.kind, BLOCK_N=block_n, BLOCK_W=block_k // 8, BIAS=bias is not None,
        ACT=act or "", GATE=act is not None, RESIDUAL=residual is not None, ZERO=weight.offset is not None,
        ONCE=rows == 1, ASM=not is_interpreted(), num_warps=warps, num_stages=1, **launch_options(x),
    )  # fmt: skip
    return out
