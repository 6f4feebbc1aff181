"""Tensor operations behind the layers. `reference` is plain torch and the meaning of each."""

from dovetail.layers.ops.reference import add_rms_norm, rms_norm, rotate, silu_and_mul

__all__ = ["add_rms_norm", "rms_norm", "rotate", "silu_and_mul"]
