"""Vector-norm: a kernel set for Dovetail with an RMS norm of its own, and a product that adds its bias in place.

The plain meaning squares a row in memory and adds it up; a norm of vectors reads the row once. Rows go through it one
after the other in a loop of the library, each by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.contracts import Ask, Claim, KernelSet
from dovetail.contracts.kernels import Kernel

if TYPE_CHECKING:
    from torch import Tensor

MAX_WIDTH = 16384


class VectorNorm(KernelSet):
    """Serves `rms_norm`, with the addition before it `add_rms_norm`, and `linear`."""

    devices = frozenset({"cpu"})

    def serves(self, ask: Ask) -> Claim | str:
        """RMS norms of floats, up to a width; products in float32."""
        if ask.op == "linear" and ask.dtype == "float32":
            return Claim(ask.rows)
        if ask.op not in ("rms_norm", "add_rms_norm"):
            return f"no kernel for {ask.op}"
        if ask.dim("H") > MAX_WIDTH:
            return f"rows of {ask.dim('H')} numbers, {MAX_WIDTH} at most"
        overwrites = frozenset({"residual"}) if ask.op == "add_rms_norm" else frozenset()
        return Claim(ask.rows, overwrites=overwrites)

    def make(self, ask: Ask) -> Kernel:
        """Return the function."""
        return {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "linear": linear}[ask.op]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of `[T, H]`, rounded to the dtype of `x` before the weight, as the meaning rounds."""
    import torch

    wide = x.float()
    squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    return (wide * squares.div_(x.shape[-1]).add_(eps).rsqrt_()).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add in place, which the claim says."""
    residual += x
    return rms_norm(residual, weight, eps), residual


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x Wᵀ + b` of `[T, K]` and `[N, K]`: one new tensor, to which the bias is added."""
    y = x @ weight.t()
    return y if bias is None else y.add_(bias)
