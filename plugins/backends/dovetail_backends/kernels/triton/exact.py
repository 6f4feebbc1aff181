"""Products in Triton that keep some 22 bits, of rows in the model's dtype with one another and with float32."""

from __future__ import annotations

import triton
import triton.language as tl

PRECISION: tl.constexpr = tl.constexpr("tf32x3")


@triton.jit
def _dot(a, b, EMULATED: tl.constexpr):
    """A product of bfloat16: exact products, summed in float32. The interpreter has none, so it is told to emulate."""
    if EMULATED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def alike(a, b, NARROW: tl.constexpr, EMULATED: tl.constexpr):
    """Products of rows as they are: of bfloat16 in one pass, of others in three."""
    if NARROW:
        return _dot(a, tl.trans(b), EMULATED)
    return tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), input_precision=PRECISION)


@triton.jit
def exact(a, b, PARTS: tl.constexpr, NARROW: tl.constexpr, EMULATED: tl.constexpr):
    """`a b` for rows as they are and float32 numbers, which are two or three numbers of bfloat16 together."""
    if NARROW:
        first = b.to(tl.bfloat16)
        left = b - first.to(tl.float32)
        second = left.to(tl.bfloat16)
        found = _dot(a, first, EMULATED) + _dot(a, second, EMULATED)
        if PARTS == 3:
            found += _dot(a, (left - second.to(tl.float32)).to(tl.bfloat16), EMULATED)
        return found
    return tl.dot(a.to(tl.float32), b, input_precision=PRECISION)
