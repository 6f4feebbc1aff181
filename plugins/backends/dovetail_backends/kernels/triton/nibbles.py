"""Numbers of 4 bits as kernels keep them, and how they are taken apart: eight to a word, in blocks of 64 inputs.

Word j of a block holds in its nibble i the input `8 i + j` of the block: nibble i of all words is a plane, which is
multiplied by runs of eight neighbouring inputs, so nothing is moved between threads. Inputs beyond K are masked where
rows are read; what stands there for them is never seen.

- int4: the nibble is `number + zero`; with `0x43` in the upper byte of a 16-bit half it is bfloat16's 128 + nibble.
- e2m1: the nibble is its bits, sign first. A byte permutation looks four of them up in a table of eight bytes; two
  tables make `64 + 8 number`, a byte below 128: as the lower byte of a bfloat16 it is subnormal, so `2 ** -133` times
  that, exactly, and one multiplication and addition leaves the number times its scale.

N outputs, K inputs, W words a row, B = ceil(K / 64) blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
"""Inputs of a block."""
PLANES = 8
E2M1_TABLES = (0x18100800, 0x60403020, 0x34383C40, 0x10202830)
"""Bytes by the lower three bits of e2m1, least first: twice `8 |number|` and `64 - 8 |number|`, in two words each."""
CHUNK = 1 << 25
"""Numbers that are packed at a time."""
MOST_SCALE = 251
"""Of e8m0, so that factors of rows are finite."""

_HALVES = "prmt.b32 lo, $8, $9, 0x5410; prmt.b32 hi, $8, $9, 0x7632;"
"""Of two words: plane 0 to 3 of both, and 4 to 7."""


def _int4_asm() -> str:
    # GPUs before Hopper have no sub.bf16x2 and no mul.bf16x2; fma's results are those, -0 added to a product leaves it.
    lines = [".reg .b32 lo, hi, t, z0, z1, s0, s1, less, none;", _HALVES]
    lines.append("mov.b32 less, 0xbf80bf80; mov.b32 none, 0x80008000;")
    lines.append("mov.b32 z0, $10; mov.b32 z1, $11; mov.b32 s0, $12; mov.b32 s1, $13;")
    for plane in range(PLANES):
        half, which = ("lo", 0) if plane < 4 else ("hi", 1)
        lines.append(f"shr.u32 t, {half}, {4 * (plane % 4)}; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;")
        lines.append(f"fma.rn.bf16x2 t, z{which}, less, t; fma.rn.bf16x2 ${plane}, t, s{which}, none;")
    return "{" + " ".join(lines) + "}"


def e2m1_bytes(word: str, to: str, upper: str) -> str:
    """Assembly for `64 + 8 number` of a word's lower and upper four numbers, in registers `to` and `upper`.

    Declare `m, t, u` beside these. Bit 3 of a selector gives a byte's sign, repeated: zero, of all in the tables.
    """
    first, second, third, fourth = (f"0x{table:08x}" for table in E2M1_TABLES)
    return (
        f"and.b32 m, {word}, 0x77777777; prmt.b32 {to}, {first}, {second}, {word};"
        f" prmt.b32 t, {third}, {fourth}, m; add.u32 {to}, {to}, t; shr.u32 u, {word}, 16; shr.u32 m, m, 16;"
        f" prmt.b32 {upper}, {first}, {second}, u; prmt.b32 t, {third}, {fourth}, m; add.u32 {upper}, {upper}, t;"
    )


def _e2m1_asm() -> str:
    lines = [".reg .b32 m, t, u, a0, a1, b0, b1, s, c;", e2m1_bytes("$8", "a0", "b0"), e2m1_bytes("$9", "a1", "b1")]
    for half, power in (("a", "and.b32 t, $10, 255;"), ("b", "shr.u32 t, $10, 8;")):
        lines.append(f"{power} mad.lo.u32 s, t, 0x00800080, 0x3f803f80; add.u32 c, s, 0x40804080;")
        for place in range(4):
            zero = 8 + place  # the sign of a byte that has none
            lines.append(f"prmt.b32 t, {half}0, {half}1, 0x{zero:x}{4 + place:x}{zero:x}{place:x};")
            lines.append(f"fma.rn.bf16x2 ${place + (4 if half == 'b' else 0)}, t, s, c;")
    return "{" + " ".join(lines) + "}"


INT4_ASM: tl.constexpr = tl.constexpr(_int4_asm())
"""Of two words, with offsets of planes 0 to 3 and of 4 to 7 and scales likewise: two bfloat16 numbers of each plane."""
E2M1_ASM: tl.constexpr = tl.constexpr(_e2m1_asm())
"""As `INT4_ASM`, of two words and the two exponents of each, which are the same: both words are of one block."""
INT4_REGS: tl.constexpr = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r")
E2M1_REGS: tl.constexpr = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r")


@triton.jit
def _int4(words, offset, scale, PLANE: tl.constexpr, dtype: tl.constexpr):
    nibbles = ((words >> (4 * PLANE)) & 15).to(tl.float32)
    return ((nibbles + 128.0 - offset.to(tl.float32)) * scale.to(tl.float32)).to(dtype)


@triton.jit
def e2m1_eighths(words, PLANE: tl.constexpr):
    """Eight times the numbers of a plane, int32."""
    nibble = (words >> (4 * PLANE)) & 15
    power, half = (nibble >> 1) & 3, nibble & 1
    size = tl.where(power == 0, half, (2 + half) << tl.maximum(power - 1, 0)) * 4
    return tl.where(nibble >= 8, -size, size)


@triton.jit
def _e2m1(words, exponents, PLANE: tl.constexpr, dtype: tl.constexpr):
    power = (exponents.to(tl.int32) >> (8 * (PLANE // 4))) & 255
    by = (power << 23).to(tl.float32, bitcast=True)  # 2 ** (power - 127)
    return (e2m1_eighths(words, PLANE).to(tl.float32) * 0.015625 * by).to(dtype)


@triton.jit
def int4_planes(words, zero_low, zero_high, low, high, dtype: tl.constexpr, ASM: tl.constexpr):
    """Numbers `(nibble - zero) * scale` of words, a tensor of their shape for each plane.

    For each word, in `dtype`: 128 + zero of planes 0 to 3 and of planes 4 to 7, and their scales.
    """
    if ASM:
        planes = tl.inline_asm_elementwise(
            INT4_ASM, INT4_REGS, [words, zero_low, zero_high, low, high],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            ),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        planes = (
            _int4(words, zero_low, low, 0, dtype), _int4(words, zero_low, low, 1, dtype),
            _int4(words, zero_low, low, 2, dtype), _int4(words, zero_low, low, 3, dtype),
            _int4(words, zero_high, high, 4, dtype), _int4(words, zero_high, high, 5, dtype),
            _int4(words, zero_high, high, 6, dtype), _int4(words, zero_high, high, 7, dtype),
        )  # fmt: skip
    return planes


@triton.jit
def e2m1_planes(words, exponents, dtype: tl.constexpr, ASM: tl.constexpr):
    """As `int4_planes` for e2m1 with the two exponents of a block, see `exponents_of`, as int32 for each word."""
    if ASM:
        planes = tl.inline_asm_elementwise(
            E2M1_ASM, E2M1_REGS, [words, exponents],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            ),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        planes = (
            _e2m1(words, exponents, 0, dtype), _e2m1(words, exponents, 1, dtype),
            _e2m1(words, exponents, 2, dtype), _e2m1(words, exponents, 3, dtype),
            _e2m1(words, exponents, 4, dtype), _e2m1(words, exponents, 5, dtype),
            _e2m1(words, exponents, 6, dtype), _e2m1(words, exponents, 7, dtype),
        )  # fmt: skip
    return planes


def in_planes(nibbles: Tensor) -> Tensor:
    """Pack nibbles uint8 `[N, K]`, one number each, into words int32 `[N, 8 B]`."""
    width = BLOCK * -(-nibbles.shape[1] // BLOCK)
    words = torch.empty(len(nibbles), width // PLANES, dtype=torch.int32, device=nibbles.device)
    step = max(1, CHUNK // width)
    for first in range(0, len(nibbles), step):
        here = nibbles[first : first + step]
        blocks = F.pad(here, (0, width - here.shape[1])).view(len(here), -1, PLANES, BLOCK // PLANES).to(torch.int32)
        some = blocks[:, :, 0]
        for plane in range(1, PLANES):
            some = some | (blocks[:, :, plane] << (4 * plane))
        words[first : first + step] = some.flatten(1)
    return words


def exponents_of(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return what kernels multiply e2m1 by: exponents relative to a row's greatest, and that.

    Args:
        scale: `[N, K / 32]` uint8: `2 ** (scale - 127)`.

    Returns:
        `[N, B]` int16, the lower byte for the first 32 inputs of a block: 127 is the row's greatest, and 0 also what is
        smaller than 2 ** -127 of it; and factors of rows `[N]`, float32.

    Raises:
        ValueError: A scale is `2 ** 125` or greater.
    """
    wide = scale.to(torch.int32)
    most = wide.amax(-1, keepdim=True)
    if bool((most > MOST_SCALE).any()):
        raise ValueError(
            f"a scale of e2m1 is 2 ** {int(most.max()) - 127}, and {MOST_SCALE - 127} is the greatest exponent that "
            "kernels multiply by; is this a scale in e8m0?"
        )
    near = F.pad((wide - most + 127).clamp_min(0), (0, scale.shape[-1] % 2)).view(len(scale), -1, 2)
    pairs = near[..., 0] | (near[..., 1] << 8)
    return pairs.to(torch.int16), torch.exp2(most[:, 0].float() - 124)
