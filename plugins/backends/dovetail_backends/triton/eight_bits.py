"""Numbers of a cache in 8 bits as kernels write and read them: `dovetail.sdk.cache` says what they stand for.

A number is read as its share of `UNIT`, exactly, in the dtype of the queries, and scales, times `UNIT`, are applied to
scores and to weights. Of e4m3, sign, exponent and mantissa are moved to where bfloat16 or float16 has its own, which
gives 2 ** -120 times the number, or 2 ** -8 times, subnormal ones included. Of int8, the byte becomes the low bits of a
number whose last place is 1 / 128, from which the rest is taken away.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.contracts.device import is_interpreted

UNIT_E4M3: tl.constexpr = tl.constexpr(256.0)
UNIT_INT8: tl.constexpr = tl.constexpr(128.0)
ASM: tl.constexpr = tl.constexpr(not is_interpreted())

_SPREAD = "prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;"
"""Four bytes, each in the upper half of 16 bits."""


def _e4m3_asm(places: int, mask: str, times: str) -> str:
    # GPUs before Hopper have no mul.bf16x2; -0 added to a product leaves it.
    lines = ["{ .reg .b32 a, b, t, by, none;", _SPREAD]
    lines.append(f"mov.b32 by, {times}; mov.b32 none, 0x80008000;" if times else "")
    for index, name in enumerate("ab"):
        lines.append(f"shr.u32 t, {name}, {places}; and.b32 t, t, {mask};")
        lines.append(f"lop3.b32 t, {name}, 0x80008000, t, 0xea;")
        lines.append(f"fma.rn.bf16x2 ${index}, t, by, none;" if times else f"mov.b32 ${index}, t;")
    return " ".join([*lines, "}"])


def _int8_bfloat16_asm() -> str:
    lines = ["{ .reg .b32 t, w; .reg .f32 f0, f1, f2, f3;", "xor.b32 t, $2, 0x80808080;"]
    for index in range(4):  # 65536 + byte / 128
        lines.append(f"prmt.b32 w, t, 0x47800000, 0x765{index}; mov.b32 f{index}, w;")
        lines.append(f"sub.f32 f{index}, f{index}, 0f47800080;")
    return " ".join([*lines, "cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }"])


E4M3_BFLOAT16: tl.constexpr = tl.constexpr(_e4m3_asm(4, "0x07f007f0", "0x77807780"))  # by 2 ** 112
E4M3_FLOAT16: tl.constexpr = tl.constexpr(_e4m3_asm(1, "0x3f803f80", ""))
INT8_BFLOAT16: tl.constexpr = tl.constexpr(_int8_bfloat16_asm())
INT8_FLOAT16: tl.constexpr = tl.constexpr(
    "{ .reg .b32 t, less; xor.b32 t, $2, 0x80808080; mov.b32 less, 0x48804880;"
    " prmt.b32 $0, t, 0x48004800, 0x7150; prmt.b32 $1, t, 0x48004800, 0x7352;"  # 8 + byte / 128
    " sub.f16x2 $0, $0, less; sub.f16x2 $1, $1, less; }"
)
REGISTERS: tl.constexpr = tl.constexpr("=r,=r,r")


def _by_word(asm: tl.constexpr) -> tl.constexpr:
    """Of a word instead of four bytes, to four numbers instead of two pairs: the same instructions."""
    lines = asm.value.strip().removeprefix("{").removesuffix("}")
    lines = lines.replace("$0", "low").replace("$1", "high").replace("$2", "$4")
    return tl.constexpr(f"{{ .reg .b32 low, high; {lines} mov.b32 {{$0, $1}}, low; mov.b32 {{$2, $3}}, high; }}")


E4M3_BFLOAT16_WORDS: tl.constexpr = _by_word(E4M3_BFLOAT16)
E4M3_FLOAT16_WORDS: tl.constexpr = _by_word(E4M3_FLOAT16)
INT8_BFLOAT16_WORDS: tl.constexpr = _by_word(INT8_BFLOAT16)
INT8_FLOAT16_WORDS: tl.constexpr = _by_word(INT8_FLOAT16)
WORD_REGISTERS: tl.constexpr = tl.constexpr("=h,=h,=h,=h,r")


@triton.jit
def unpacked(numbers, dtype: tl.constexpr, E4M3: tl.constexpr):
    """Numbers of 8 bits, int8 or the bytes of e4m3, by `UNIT`, in `dtype`."""
    if ASM and dtype == tl.bfloat16:
        found = tl.inline_asm_elementwise(
            E4M3_BFLOAT16 if E4M3 else INT8_BFLOAT16, REGISTERS, [numbers], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif ASM and dtype == tl.float16:
        found = tl.inline_asm_elementwise(
            E4M3_FLOAT16 if E4M3 else INT8_FLOAT16, REGISTERS, [numbers], dtype=tl.float16, is_pure=True, pack=4
        )
    elif E4M3:
        wide = numbers.to(tl.int16)
        found = (((wide & 0x7F) << 7) | (wide & -32768)).to(tl.float16, bitcast=True).to(dtype)
    else:
        found = (numbers.to(tl.float32) * (1.0 / UNIT_INT8)).to(dtype)
    return found


@triton.jit
def _byte_of(words, AT: tl.constexpr, dtype: tl.constexpr, E4M3: tl.constexpr):
    return unpacked(((words >> (8 * AT)) & 255).to(tl.int8), dtype, E4M3)


@triton.jit
def unpacked_words(words, dtype: tl.constexpr, E4M3: tl.constexpr):
    """As `unpacked` for words of four numbers, `[R, W]` to `[R, 4 W]`.

    What a loop carries from one round to the next should be words: bytes would get a register each.
    """
    if ASM and dtype == tl.bfloat16:
        parts = tl.inline_asm_elementwise(
            E4M3_BFLOAT16_WORDS if E4M3 else INT8_BFLOAT16_WORDS, WORD_REGISTERS, [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    elif ASM and dtype == tl.float16:
        parts = tl.inline_asm_elementwise(
            E4M3_FLOAT16_WORDS if E4M3 else INT8_FLOAT16_WORDS, WORD_REGISTERS, [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        parts = (
            _byte_of(words, 0, dtype, E4M3), _byte_of(words, 1, dtype, E4M3),
            _byte_of(words, 2, dtype, E4M3), _byte_of(words, 3, dtype, E4M3),
        )  # fmt: skip
    every = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    return tl.reshape(every, [words.shape[0], 4 * words.shape[1]])


@triton.jit
def by_unit(scales, E4M3: tl.constexpr):
    """Scales as they are applied to what `unpacked` gives, in float32."""
    return scales.to(tl.float32) * (UNIT_E4M3 if E4M3 else UNIT_INT8)


@triton.jit
def quantised(x, E4M3: tl.constexpr):
    """Numbers `[R, D]`, as int8, and scales `[R]` in bfloat16 of heads `x` `[R, D]`, to the bit as `quantise` has them.

    Elements beyond the head have to be 0.
    """
    most: tl.constexpr = 448.0 if E4M3 else 127.0
    heads = x.to(tl.float32)
    largest = tl.max(tl.abs(heads), 1)
    is_broken = tl.max((heads != heads).to(tl.int32), 1) > 0
    exact = tl.div_rn(largest, most + tl.zeros_like(largest)).to(tl.int32, bitcast=True)
    # To the nearest bfloat16, ties to even; the interpreter's own conversion cuts off.
    upper = tl.where(is_broken, 0x7FC0, (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16)
    scale = upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
    by = (upper << 16).to(tl.float32, bitcast=True)
    by = tl.where(by == 0, 1.0, by)[:, None] + tl.zeros_like(heads)
    found = tl.minimum(tl.maximum(tl.div_rn(heads, by), -most), most)
    if E4M3:
        bits = found.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # 120 << 3: the difference of the biases
        small = (tl.abs(found) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # whose last place is 2 ** -9
        code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & -128)
    else:
        code = ((found + 12582912.0) - 12582912.0).to(tl.int32)  # to the nearest, ties to even
    return code.to(tl.int8), scale
