"""The gate of a gated MLP, inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl

SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
SQRT_2_OVER_PI: tl.constexpr = tl.constexpr(0.7978845608028654)


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
    """`silu(gate) * up` of float32 tensors in float32, rounded to `dtype` where the reference rounds."""
    wide = gate.to(dtype).to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(dtype)
    return silu.to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def act_gated(gate, up, ACT: tl.constexpr, dtype: tl.constexpr):
    """As `gated` for any `dovetail.contracts.layers.Act`."""
    if ACT == "silu_and_mul":
        return gated(gate, up, dtype)
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if ACT == "clamped_silu_and_mul":
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0)
        return (up + 1.0) * (gate / (1.0 + tl.exp(-1.702 * gate)))
    if ACT == "gelu_tanh_and_mul":
        inner = SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
        half = 1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0)  # (1 + tanh) / 2
        return (gate * half).to(dtype).to(tl.float32) * up
    return (0.5 * gate * (1.0 + tl.erf(gate * SQRT_HALF))).to(dtype).to(tl.float32) * up
