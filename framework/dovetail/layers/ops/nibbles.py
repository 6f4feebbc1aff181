"""Numbers of 4 bits as kernels keep them, and how they are taken apart: eight to a word, in blocks of 64 inputs.

Word j of a block holds in its nibble i the input `8 i + j` of the block: nibble i of all words is a plane, which is
multiplied by runs of eight neighbouring inputs, so nothing is moved between threads. Inputs beyond K are masked where
rows are read; what stands there for them is never seen.

- int4: the nibble is `number + zero`; with `0x43` in the upper byte of a 16-bit half it is bfloat16's 128 + nibble.
- e2m1: the four numbers of a half stand so that a shift and a mask put sign, exponent and mantissa where bfloat16 has
  its own: 2 ** -126 times the number, also for 0.5, which is subnormal there.

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
E2M1_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
"""Where a half has the bits of each of its four numbers, from the sign down."""
CHUNK = 1 << 25
"""Numbers that are packed at a time."""

_HALVES = "prmt.b32 lo, $8, $9, 0x5410; prmt.b32 hi, $8, $9, 0x7632;"
"""Of two words: plane 0 to 3 of both, and 4 to 7."""


def _int4_asm() -> str:
    lines = [".reg .b32 lo, hi, t, z0, z1, s0, s1;", _HALVES]
    lines.append("mov.b32 z0, $10; mov.b32 z1, $11; mov.b32 s0, $12; mov.b32 s1, $13;")
    for plane in range(PLANES):
        half, which = ("lo", 0) if plane < 4 else ("hi", 1)
        lines.append(f"shr.u32 t, {half}, {4 * (plane % 4)}; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;")
        lines.append(f"sub.bf16x2 t, t, z{which}; mul.bf16x2 ${plane}, t, s{which};")
    return "{" + " ".join(lines) + "}"


def _e2m1_asm() -> str:
    lines = [".reg .b32 lo, hi, t, u, m, m0, m1;", _HALVES]
    lines.append("and.b32 t, $10, 255; mul.lo.u32 m0, t, 0x00800080; shr.u32 t, $10, 8; mul.lo.u32 m1, t, 0x00800080;")
    for plane in range(PLANES):
        half, scale, place = ("lo", "m0", plane) if plane < 4 else ("hi", "m1", plane - 4)
        if place < 3:
            lines.append(f"shl.b32 t, {half}, {3 * place}; and.b32 t, t, 0x81c081c0;")
        else:
            lines.append(f"shl.b32 t, {half}, 1; and.b32 t, t, 0x80008000; shr.u32 u, {half}, 5;")
            lines.append("lop3.b32 t, u, 0x01000100, t, 0xea;")
            lines.append(f"shr.u32 u, {half}, 4; lop3.b32 t, u, 0x00c000c0, t, 0xea;")
        lines.append(f"mul.bf16x2 ${plane}, t, {scale};")
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
def _e2m1(words, exponents, PLANE: tl.constexpr, dtype: tl.constexpr):
    half = (words >> (16 * (PLANE // 4))) & 0xFFFF
    if PLANE % 4 < 3:  # noqa: SIM108 - constant
        bits = (half << (3 * (PLANE % 4))) & 0x81C0
    else:
        bits = ((half << 1) & 0x8000) | ((half >> 5) & 0x0100) | ((half >> 4) & 0x00C0)
    power = (exponents.to(tl.int32) >> (8 * (PLANE // 4))) & 255
    wide = (bits << 16).to(tl.float32, bitcast=True)
    return (wide * (power << 23).to(tl.float32, bitcast=True)).to(dtype)


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


def in_planes(nibbles: Tensor, *, is_float: bool) -> Tensor:
    """Pack nibbles uint8 `[N, K]` into words int32 `[N, 8 B]`.

    Args:
        nibbles: One number each.
        is_float: They are e2m1.
    """
    places = _places(nibbles.device, is_float)
    width = BLOCK * -(-nibbles.shape[1] // BLOCK)
    words = torch.empty(len(nibbles), width // PLANES, dtype=torch.int32, device=nibbles.device)
    step = max(1, CHUNK // width)
    for first in range(0, len(nibbles), step):
        here = nibbles[first : first + step]
        blocks = F.pad(here, (0, width - here.shape[1])).view(len(here), -1, PLANES, BLOCK // PLANES).to(torch.int32)
        some = places[0][blocks[:, :, 0]]
        for plane in range(1, PLANES):
            some |= places[plane][blocks[:, :, plane]]
        words[first : first + step] = some.flatten(1)
    return words


def _places(device: torch.device, is_float: bool) -> Tensor:
    """Return what each nibble is in a word, for each plane: `[8, 16]` int32."""
    number = torch.arange(16, device=device).expand(PLANES, 16)
    plane = torch.arange(PLANES, device=device)[:, None]
    if not is_float:
        return (number << (4 * plane)).to(torch.int32)
    targets = torch.tensor(E2M1_BITS, device=device)[plane % 4]  # [8, 1, 4]
    bits = (number[..., None] >> torch.arange(3, -1, -1, device=device)) & 1
    return ((bits << targets).sum(-1) << (16 * (plane // 4))).to(torch.int32)


def exponents_of(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return what kernels multiply e2m1 by: exponents relative to a row's greatest, and that.

    Args:
        scale: `[N, K / 32]` uint8: `2 ** (scale - 127)`.

    Returns:
        `[N, B]` int16, the lower byte for the first 32 inputs of a block, exponents of bfloat16 in which 253 is the
        row's greatest; and factors of rows `[N]`, float32.
    """
    wide = scale.to(torch.int32)
    most = wide.amax(-1, keepdim=True)
    near = F.pad((wide - most + 253).clamp_min(0), (0, scale.shape[-1] % 2)).view(len(scale), -1, 2)
    pairs = near[..., 0] | (near[..., 1] << 8)
    return pairs.to(torch.int16), torch.exp2(most[:, 0].float() - 127)
