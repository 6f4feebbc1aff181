"""Vector-norm: a kernel set for Dovetail that computes RMS norms with one call of torch for the sum of squares.

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
    """Serves `rms_norm` and, with the addition before it, `add_rms_norm`."""

    devices = frozenset({"cpu"})

    def serves(self, ask: Ask) -> Claim | str:
        """RMS norms of floats, up to a width."""
        if ask.op not in ("rms_norm", "add_rms_norm"):
            return f"no kernel for {ask.op}"
        if ask.dim("H") > MAX_WIDTH:
            return f"rows of {ask.dim('H')} numbers, {MAX_WIDTH} at most"
        overwrites = frozenset({"residual"}) if ask.op == "add_rms_norm" else frozenset()
        return Claim(ask.rows, overwrites=overwrites)

    def make(self, ask: Ask) -> Kernel:
        """Return the function."""
        return rms_norm if ask.op == "rms_norm" else add_rms_norm


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
