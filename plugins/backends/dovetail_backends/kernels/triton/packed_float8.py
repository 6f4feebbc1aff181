"""Experts in e2m1 on the float8 tensor cores: for a few hundred tokens, where unpacking bounds the time.

A number of e2m1 times its group's scale is a float8 number, exactly, if no scale of a row is below 2 ** -11 of its
greatest: the scale is a power of two, and moves the exponent. So a table of eight float8 numbers for each row and group
takes the place of a multiplication for each number, and half as many registers hold what the tensor cores read. Tokens
are two float8 numbers each, as in `packed_halves`. Of a weight this takes 2.8 instructions where bfloat16 takes 4.2,
and 1.2 on the unit for integers instead of 2.0 (`docs/design/packed-counts.md`).

**Order.** Four words of a row make eight registers of four float8 numbers, each of one half of a word. A register
stands where the tensor cores look for four neighbouring inputs, so rows of tokens are written in the same order:
position `16 r + 4 t + b` of 128 inputs is nibble `4 (r % 2) + b` of word `4 t + r // 2`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.device import is_interpreted
from dovetail.contracts.layers import Act
from dovetail_backends.kernels.triton.packed_halves import halves
from dovetail_backends.kernels.triton.packed_tiles import awaited, spread
from dovetail_backends.kernels.triton.packed_weight import LEAST_NEAR, PackedWeight
from dovetail_backends.kernels.triton.pdl import launch_options
from dovetail_backends.kernels.triton.silu import act_gated

LEAST: tl.constexpr = tl.constexpr(LEAST_NEAR)
FACTOR: tl.constexpr = tl.constexpr(2.0**-9)
"""What numbers of tables are to be multiplied by, beside a row's factor."""
TABLES = 0x94908880, 0xA4A09C98
"""Bytes of negative float8 numbers by the lower three bits of e2m1, for a group with the least exponent."""
STEPS = 0x08080800, 0x08080808
"""What an exponent that is greater by one adds to the tables: nothing to zero."""
Tile = tuple[int, int, int, int]


def _asm() -> str:
    """Assembly: of four words, and two exponents for each, eight times four float8 numbers.

    A table has negative numbers. Where a nibble's sign is not set, `prmt` gives 0x40, which is taken off twice.
    """
    bases = [(table - LEAST_NEAR * step) & 0xFFFFFFFF for table, step in zip(TABLES, STEPS, strict=True)]
    lines = [".reg .b32 m, w, a, b, t0, t1, s;"]
    for word in range(4):
        lines.append(f"and.b32 m, ${8 + word}, 0x77777777; mov.b32 w, ${8 + word};")
        for half in range(2):
            shifts = f"shr.u32 s, ${12 + word}, 8; shr.u32 w, w, 16; shr.u32 m, m, 16;"
            lines.append(shifts if half else f"and.b32 s, ${12 + word}, 255;")
            lines += [f"mad.lo.u32 t{i}, s, 0x{STEPS[i]:08x}, 0x{bases[i]:08x};" for i in range(2)]
            lines.append("prmt.b32 b, t0, t1, m; prmt.b32 a, 0x40404040, 0x40404040, w;")
            lines.append(f"mad.lo.s32 ${2 * word + half}, a, -2, b;")
    return "{" + " ".join(lines) + "}"


FLOAT8_ASM: tl.constexpr = tl.constexpr(_asm())
FLOAT8_REGS: tl.constexpr = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 8))


@triton.jit
def _in_order(planes):
    """Registers of words `[BLOCK_N, W]` as the tensor cores take them, `[BLOCK_N, 8 W]`: see the module."""
    first = tl.join(tl.join(planes[0], planes[1]), tl.join(planes[2], planes[3]))
    second = tl.join(tl.join(planes[4], planes[5]), tl.join(planes[6], planes[7]))
    both = tl.join(first, second)
    rows: tl.constexpr = both.shape[0]
    blocks: tl.constexpr = both.shape[1] // 16
    every = tl.reshape(both, [rows, blocks, 16, 2, 2, 2])
    return tl.reshape(tl.permute(every, [0, 1, 5, 4, 3, 2]), [rows, blocks * 128])


@triton.jit
def _four_by_four(words):
    """Each word of `[BLOCK_N, W]` eight times, as `[BLOCK_N, W / 16, 4, 2, 4, 4]`: in the order of the module."""
    rows: tl.constexpr = words.shape[0]
    blocks: tl.constexpr = words.shape[1] // 16
    each = tl.permute(tl.reshape(words, [rows, blocks, 4, 4]), [0, 1, 3, 2])
    wide = tl.reshape(each, [rows, blocks, 4, 1, 4, 1])
    return tl.broadcast_to(wide, [rows, blocks, 4, 2, 4, 4])


@triton.jit
def float8_of(words, exponents, ASM: tl.constexpr):
    """Numbers of words `[BLOCK_N, W]` as float8 `[BLOCK_N, 8 W]`, with exponents `[BLOCK_N, W / 8]` of blocks."""
    each = spread(exponents)
    if ASM:
        planes = tl.inline_asm_elementwise(
            FLOAT8_ASM, FLOAT8_REGS, [words, each],
            dtype=(
                tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv,
                tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv,
            ),
            is_pure=True, pack=4,
        )  # fmt: skip
        found = _in_order(planes)
    else:
        half = tl.reshape(tl.arange(0, 2), [1, 1, 1, 2, 1, 1])
        place = tl.reshape(tl.arange(0, 4), [1, 1, 1, 1, 1, 4])
        nibble = (_four_by_four(words) >> (16 * half + 4 * place)) & 15
        power, low = (nibble >> 1) & 3, nibble & 1
        size = tl.where(power == 0, low, (2 + low) << tl.maximum(power - 1, 0))  # twice the number
        exponent = (_four_by_four(each) >> (8 * half)) & 255
        by = tl.maximum(exponent - LEAST + 121, 1) << 23  # 2 ** (exponent - LEAST - 6)
        value = tl.where(nibble >= 8, -size, size).to(tl.float32) * by.to(tl.float32, bitcast=True)
        found = tl.reshape(value, [words.shape[0], words.shape[1] * 8]).to(tl.float8e4nv)
    return found


@triton.jit
def _exponents(scale, n, block, N, GROUPS: tl.constexpr):
    """Pairs of exponents of blocks."""
    mask = (n[:, None] < N) & (block[None, :] < GROUPS)
    return tl.load(scale + n[:, None] * GROUPS + block[None, :], mask=mask, other=0).to(tl.int32) & 0xFFFF


@triton.jit
def _sums(
    w, scale, high, low, given, n,
    N: tl.constexpr, ROW: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, GATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Products of BLOCK_N outputs, gate's and up's, and rows `given` of tokens."""
    STEP: tl.constexpr = BLOCK_K // 8
    ALL: tl.constexpr = N * (1 + GATE)
    k, inputs, block = tl.arange(0, STEP), tl.arange(0, BLOCK_K), tl.arange(0, STEP // 8)
    rows = w + n[:, None].to(tl.int64) * ROW
    above, below = high + given[:, None] * WIDE, low + given[:, None] * WIDE
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_total = total
    ahead = _exponents(scale, n, block, N, GROUPS)
    up_ahead = ahead
    if GATE:
        up_ahead = _exponents(scale, n + N, block, ALL, GROUPS)
    for start in tl.range(0, ROW, STEP, num_stages=STAGES):
        mask = (n[:, None] < N) & (start + k[None, :] < ROW)
        at = start * 8 + inputs[None, :]
        raw = tl.load(rows + start + k[None, :], mask=mask, other=0)
        upper = tl.trans(tl.load(above + at, mask=at < WIDE, other=0.0))
        lower = tl.trans(tl.load(below + at, mask=at < WIDE, other=0.0))
        now, up_now = ahead, up_ahead  # Triton does not load exponents ahead: those of the next round come in this one
        ahead = _exponents(scale, n, start // 8 + STEP // 8 + block, N, GROUPS)
        numbers = float8_of(raw, now, ASM)
        if GATE:
            ups = tl.load(rows + N * ROW + start + k[None, :], mask=mask, other=0)
            up_ahead = _exponents(scale, n + N, start // 8 + STEP // 8 + block, ALL, GROUPS)
            others = float8_of(ups, up_now, ASM)
        part = tl.dot(numbers, upper)
        total += awaited(tl.dot(numbers, lower, part))
        if GATE:
            part = tl.dot(others, upper)
            up_total += awaited(tl.dot(others, lower, part))
    return total, up_total


@triton.jit
def _float8_kernel(
    high, low, factors, order, bounds, shares, w, scale, row_scale, bias, out,
    N: tl.constexpr, ROW: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, TOP_K: tl.constexpr,
    ACT: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, WEIGH: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of all rows of one expert: of its gated half, or of the other."""
    dtype: tl.constexpr = out.dtype.element_ty
    ALL: tl.constexpr = N * (1 + GATE)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(1).to(tl.int64)
    begin, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    w += expert * ALL * ROW
    scale += expert * ALL * GROUPS
    row_scale += expert * ALL
    bias += expert * ALL
    for first in tl.range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        live = m < end
        slot = tl.load(order + m, mask=live, other=0)
        given = tl.where(live, slot // TOP_K if GATE else m, 0).to(tl.int64)
        total, up_total = _sums(
            w, scale, high, low, given, n, N, ROW, GROUPS, WIDE, GATE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, ASM
        )
        factor = tl.load(factors + given, mask=live, other=0.0)[None, :] * FACTOR
        share = tl.load(shares + slot, mask=live, other=0.0).to(tl.float32)[None, :]
        total *= factor * tl.load(row_scale + n, mask=inside, other=0.0)[:, None]
        up_total *= factor
        if WEIGH and GATE:
            total *= share
            up_total *= share
        if BIAS:
            total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATE:
            up_total *= tl.load(row_scale + N + n, mask=inside, other=0.0)[:, None]
            if BIAS:
                up_total += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)[:, None]
            total = act_gated(total, up_total, ACT, dtype)
        elif WEIGH:
            total = total.to(dtype).to(tl.float32) * share
        place = m if GATE else slot
        at = out + place[None, :].to(tl.int64) * N + n[:, None]
        tl.store(at, total.to(dtype), mask=live[None, :] & inside[:, None])


def fits_float8(weight: PackedWeight) -> bool:
    """Whether a weight of experts is multiplied here: in e2m1, with scales that are near enough to each other."""
    return weight.kind == "mxfp4" and weight.is_near


def float8_half(
    x: Tensor, order: Tensor, bounds: Tensor, shares: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor,
    block_m: int, tile: Tile, *, act: Act, top_k: int, gate: bool, weigh: bool,
) -> None:  # fmt: skip
    """Fill `out` with one half of experts, as `packed_experts` does: `x` `[T, H]`, or in sorted order `[S, I]`."""
    block_n, block_k, warps, stages = tile
    given = halves(x, ordered=True)
    n = weight.num_out // 2 if gate else weight.num_out
    _float8_kernel[(triton.cdiv(n, block_n), len(weight.numbers))](
        given.numbers[0], given.numbers[1], given.scale, order, bounds, shares, weight.numbers, weight.scale,
        weight.row_scale, x if bias is None else bias, out, N=n, ROW=weight.numbers.shape[-1], GROUPS=weight.groups,
        WIDE=given.numbers.shape[-1], TOP_K=top_k, ACT=act, GATE=gate, BIAS=bias is not None, WEIGH=weigh,
        ASM=not is_interpreted(), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, num_warps=warps,
        **launch_options(x),
    )  # fmt: skip
