"""The gate of a gated MLP, inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
    """`silu(gate) * up` of float32 tensors in float32, rounded to `dtype` where the reference rounds."""
    wide = gate.to(dtype).to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(dtype)
    return silu.to(tl.float32) * up.to(dtype).to(tl.float32)
