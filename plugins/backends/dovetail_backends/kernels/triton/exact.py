"""Products in Triton that keep some 22 bits, of rows in the model's dtype with one another and with float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _upper(x):
    """The nearest numbers of tf32, which has 11 bits."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b):
    """`a b` of float32 in three passes of tf32, which keep some 22 bits.

    As "tf32x3" of Triton, which divides `b` where each thread has whole columns of it: of `[64, 64]`, 256 registers.
    """
    upper_a, upper_b = _upper(a), _upper(b)
    found = tl.dot(a - upper_a, upper_b, input_precision="tf32")
    found = tl.dot(upper_a, b - upper_b, found, input_precision="tf32")
    return tl.dot(upper_a, upper_b, found, input_precision="tf32")


@triton.jit
def _dot(a, b, total, EMULATED: tl.constexpr):
    """A product of bfloat16: exact products, summed in float32. The interpreter has none, so it is told to emulate."""
    if EMULATED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit
def alike(a, b, NARROW: tl.constexpr, EMULATED: tl.constexpr):
    """Products of rows as they are: of bfloat16 in one pass, of others in three."""
    if NARROW:
        return _dot(a, tl.trans(b), None, EMULATED)
    return product(a.to(tl.float32), tl.trans(b.to(tl.float32)))


@triton.jit
def exact(a, b, PARTS: tl.constexpr, NARROW: tl.constexpr, EMULATED: tl.constexpr):
    """`a b` for rows as they are and float32 numbers, which are two or three numbers of bfloat16 together.

    The least part is summed first, so that one sum is enough.
    """
    if NARROW:
        first = b.to(tl.bfloat16)
        left = b - first.to(tl.float32)
        second = left.to(tl.bfloat16)
        if PARTS == 3:
            found = _dot(a, (left - second.to(tl.float32)).to(tl.bfloat16), None, EMULATED)
            found = _dot(a, second, found, EMULATED)
        else:
            found = _dot(a, second, None, EMULATED)
        return _dot(a, first, found, EMULATED)
    return product(a.to(tl.float32), b)
