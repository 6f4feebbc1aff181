"""Tiles of packed weights times rows on tensor cores: what the kernels of `packed_few` and `packed_experts` share.

Weights are read packed, and become the model's dtype in registers. N outputs, K inputs, G groups of inputs that share a
scale; `ROW` stored numbers, or words of eight, are a row of a weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.contracts.device import is_interpreted
from dovetail_backends.kernels.triton.nibbles import e2m1_planes, int4_planes

COMPILED: tl.constexpr = tl.constexpr(not is_interpreted())


@triton.jit
def block_scales(
    scale, offset, n, start, N,
    FORM: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr, ZERO: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """What `planes_of` needs of the blocks of words from `start` on, `[BLOCK_N, WORDS / 8]` each.

    Returns:
        Scales of the first and the second half of a block, and offsets of both; of mxfp4 the exponents, four times.
    """
    block = start // 8 + tl.arange(0, WORDS // 8)
    at = n[:, None] * GROUPS
    if FORM == "mxfp4":
        mask = (n[:, None] < N) & (block[None, :] < GROUPS)
        low = tl.load(scale + at + block[None, :], mask=mask, other=0).to(tl.int32) & 0xFFFF
        high, zero_low, zero_high = low, low, low
    else:
        first, second = block * 64 // GROUP, (block * 64 + 32) // GROUP
        mask = (n[:, None] < N) & (first[None, :] < GROUPS)
        low = tl.load(scale + at + first[None, :], mask=mask, other=0.0)
        high = low
        zero_low = tl.full(low.shape, 136.0, tl.float32).to(dtype)  # Triton 3.7 interprets no bfloat16 constant
        if ZERO:
            zero_low = tl.load(offset + at + first[None, :], mask=mask, other=0.0)
        zero_high = zero_low
        if GROUP % 64 != 0:
            mask = (n[:, None] < N) & (second[None, :] < GROUPS)
            high = tl.load(scale + at + second[None, :], mask=mask, other=0.0)
            if ZERO:
                zero_high = tl.load(offset + at + second[None, :], mask=mask, other=0.0)
    return low, high, zero_low, zero_high


@triton.jit
def spread(small):
    """Repeat each number of `[BLOCK_N, W / 8]` eight times: as words are in registers, so that nothing moves."""
    wide = tl.broadcast_to(small[:, :, None], [small.shape[0], small.shape[1], 8])
    return tl.reshape(wide, [small.shape[0], small.shape[1] * 8])


@triton.jit
def planes_of(raw, scales, FORM: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """Numbers of words `[BLOCK_N, W]`, a tensor for each plane, in `dtype`; `scales` are from `block_scales`."""
    if FORM == "mxfp4":
        planes = e2m1_planes(raw, spread(scales[0]), dtype, ASM)
    else:
        planes = int4_planes(
            raw, spread(scales[2]), spread(scales[3]), spread(scales[0]), spread(scales[1]),
            dtype, ASM,
        )  # fmt: skip
    return planes


@triton.jit
def awaited(total):
    """Sums of a matrix instruction, once it is done with the registers that it reads weights from.

    Triton lets instructions of two rounds run at a time, as if weights were made one by one between these. Ours are all
    made before the first, in registers that the round before may still be read from: it gave NaN on an H100.
    """
    if COMPILED:
        total = tl.inline_asm_elementwise("", "=f,0", [total], dtype=tl.float32, is_pure=False, pack=1)
    return total


@triton.jit
def in_order(planes):
    """Planes of words `[BLOCK_N, W]` as inputs follow each other, `[BLOCK_N, 8 W]`.

    As the tensor cores take them, these are other registers, but of the same threads.
    """
    first = tl.join(tl.join(planes[0], planes[1]), tl.join(planes[2], planes[3]))
    second = tl.join(tl.join(planes[4], planes[5]), tl.join(planes[6], planes[7]))
    both = tl.join(first, second)
    rows: tl.constexpr = both.shape[0]
    blocks: tl.constexpr = both.shape[1] // 8
    every = tl.reshape(both, [rows, blocks, 8, 2, 2, 2])  # words of a block, then bits of the plane
    return tl.reshape(tl.permute(every, [0, 1, 5, 4, 3, 2]), [rows, blocks * 64])


@triton.jit
def scaled_dot(
    raw, scale, n, at, columns, total, start, N,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the product of numbers of 8 bits `[BLOCK_N, BLOCK_K]` and columns `[BLOCK_K, BLOCK_M]` to `total`."""
    # By way of float32, for which the hardware has fast conversions; to bfloat16 directly it has only slow ones.
    wide = raw.to(tl.float32)
    if GROUPS > 0:
        if GROUP % BLOCK_K == 0:
            wide *= tl.load(scale + n * GROUPS + start // GROUP, mask=n < N, other=0.0)[:, None]
        elif BLOCK_K % GROUP == 0:  # a load for each group, not for each number
            PARTS: tl.constexpr = BLOCK_K // GROUP
            group = start // GROUP + tl.arange(0, PARTS)
            mask = (n[:, None] < N) & (group[None, :] < GROUPS)
            of_groups = tl.load(scale + n[:, None] * GROUPS + group[None, :], mask=mask, other=0.0)
            parts = tl.reshape(wide, [wide.shape[0], PARTS, GROUP]) * of_groups[:, :, None]
            wide = tl.reshape(parts, [wide.shape[0], BLOCK_K])
        else:
            inside = (n[:, None] < N) & (at[None, :] < K)
            wide *= tl.load(scale + n[:, None] * GROUPS + at[None, :] // GROUP, mask=inside, other=0.0)
    return awaited(tl.dot(wide.to(columns.dtype), columns, total, input_precision="ieee"))


@triton.jit
def columns_of(rows, live, norm, squares, at, K: tl.constexpr, NORM: tl.constexpr):
    """Inputs `at` of rows, times the norm's weight, `[BLOCK_K, BLOCK_M]`; and the sums of squares so far."""
    inputs = tl.load(rows[:, None] + at[None, :], mask=live[:, None] & (at[None, :] < K), other=0.0)
    if NORM:
        wide = inputs.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        norms = tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)
        inputs = (wide * norms[None, :]).to(inputs.dtype)
    return tl.trans(inputs), squares


@triton.jit
def _step(
    raw, ups, scale, scales, up_scales, rows, live, norm, n, at, total, up_total, squares, start,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, FORM: tl.constexpr,
    BLOCK_K: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add the products of one tile of weights, of gate and of up if there are both."""
    ALL: tl.constexpr = N * (1 + GATE)
    if FORM == "scaled":
        columns, squares = columns_of(rows, live, norm, squares, at, K, NORM)
        total = scaled_dot(raw, scale, n, at, columns, total, start, N, K, GROUP, GROUPS, BLOCK_K)
        if GATE:
            up_total = scaled_dot(ups, scale, n + N, at, columns, up_total, start, ALL, K, GROUP, GROUPS, BLOCK_K)
    else:
        dtype: tl.constexpr = rows.dtype.element_ty
        planes = planes_of(raw, scales, FORM, dtype, ASM)
        if GATE:
            others = planes_of(ups, up_scales, FORM, dtype, ASM)
        columns, squares = columns_of(rows, live, norm, squares, start * 8 + tl.arange(0, BLOCK_K), K, NORM)
        total = tl.dot(in_order(planes), columns, total, input_precision="ieee")
        if GATE:
            up_total = awaited(tl.dot(in_order(others), columns, up_total, input_precision="ieee"))
        total = awaited(total)
    return total, up_total, squares


@triton.jit
def first_tile(
    w, scale, offset, n, begin,
    N: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, FORM: tl.constexpr,
    STEP: tl.constexpr, GATE: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Load the first weights of `walk`, of gate and up, with their scales, and the scales after these."""
    at = begin + tl.arange(0, STEP)
    ALL: tl.constexpr = N * (1 + GATE)
    rows = w + n[:, None].to(tl.int64) * ROW
    mask = (n[:, None] < N) & (at[None, :] < ROW)
    raw = tl.load(rows + at[None, :], mask=mask, other=0.0)
    ups = raw
    if GATE:
        ups = tl.load(rows + N * ROW + at[None, :], mask=mask, other=0.0)
    scales = (0, 0, 0, 0)
    up_scales, ahead, up_ahead = scales, scales, scales
    if FORM != "scaled":
        scales = block_scales(scale, offset, n, begin, N, FORM, GROUP, GROUPS, STEP, ZERO, dtype)
        ahead = block_scales(scale, offset, n, begin + STEP, N, FORM, GROUP, GROUPS, STEP, ZERO, dtype)
        up_scales, up_ahead = scales, ahead
        if GATE:
            up_scales = block_scales(scale, offset, n + N, begin, ALL, FORM, GROUP, GROUPS, STEP, ZERO, dtype)
            up_ahead = block_scales(scale, offset, n + N, begin + STEP, ALL, FORM, GROUP, GROUPS, STEP, ZERO, dtype)
    return raw, ups, scales, up_scales, ahead, up_ahead


@triton.jit
def walk(
    tile, w, scale, offset, rows, live, norm, n, begin, end,
    N: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Multiply rows by BLOCK_N outputs of a packed weight, and of the N behind them with `GATE`.

    `tile` is from `first_tile`, `rows` are where the rows begin, `live` says which there are, and `begin` and `end`
    bound the stored numbers, or words, of a weight's row.

    Returns:
        Sums `[BLOCK_N, BLOCK_M]` of gate and of up, without scales of whole rows, and the rows' sums of squares.
    """
    raw, ups, scales, up_scales, ahead, up_ahead = tile
    dtype: tl.constexpr = rows.dtype.element_ty
    ALL: tl.constexpr = N * (1 + GATE)
    STEP: tl.constexpr = BLOCK_K if FORM == "scaled" else BLOCK_K // 8
    k = tl.arange(0, STEP)
    weights = w + n[:, None].to(tl.int64) * ROW
    squares = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_total = total
    total, up_total, squares = _step(
        raw, ups, scale, scales, up_scales, rows, live, norm, n, begin + k, total, up_total, squares, begin,
        N, K, GROUP, GROUPS, FORM, BLOCK_K, NORM, GATE, ASM,
    )  # fmt: skip
    for start in tl.range(begin + STEP, end, STEP, num_stages=STAGES):
        at = start + k
        mask = (n[:, None] < N) & (at[None, :] < ROW)
        raw = tl.load(weights + at[None, :], mask=mask, other=0.0)
        ups = raw
        if GATE:
            ups = tl.load(weights + N * ROW + at[None, :], mask=mask, other=0.0)
        scales, up_scales = ahead, up_ahead
        if FORM != "scaled":  # Triton does not load them ahead: what the next round needs is asked for in this one
            ahead = block_scales(scale, offset, n, start + STEP, N, FORM, GROUP, GROUPS, STEP, ZERO, dtype)
            if GATE:
                up_ahead = block_scales(scale, offset, n + N, start + STEP, ALL, FORM, GROUP, GROUPS, STEP, ZERO, dtype)
        total, up_total, squares = _step(
            raw, ups, scale, scales, up_scales, rows, live, norm, n, at, total, up_total, squares, start,
            N, K, GROUP, GROUPS, FORM, BLOCK_K, NORM, GATE, ASM,
        )  # fmt: skip
    return total, up_total, squares
