"""Where Triton's interpreter computes what no device does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@contextmanager
def rounding_to_nearest() -> Iterator[None]:
    """Have Triton's interpreter round float32 to the nearest bfloat16, as devices and torch do; it cuts bits off.

    A kernel that rounds where its meaning does would else be a last bit off at half of all numbers. Nor does it read
    the smallest numbers of bfloat16 as they are. The kit knows no Triton: without it, nothing is done.
    """
    import numpy as np

    if find_spec("triton") is None:
        yield
        return
    interpreter = import_module("triton.runtime.interpreter")

    builder: Any = interpreter.InterpreterBuilder
    tl, handle, cast = interpreter.tl, interpreter.TensorHandle, builder.cast_impl

    def rounded(self: Any, src: Any, dst_type: Any) -> Any:
        types = src.dtype.scalar, dst_type.scalar
        if types == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(src.data).view(np.uint32)
            # Half of the last bit that stays, and an even one of two that are as near; a NaN stays one.
            nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
            found = np.where(np.isnan(src.data), (bits >> 16) | 0x40, nearest).astype(np.uint16)
            return handle(found, dst_type.scalar)
        if types == (tl.bfloat16, tl.float32):
            return handle((src.data.astype(np.uint32) << 16).view(np.float32), dst_type.scalar)
        return cast(self, src, dst_type)

    builder.cast_impl = rounded
    try:
        yield
    finally:
        builder.cast_impl = cast
