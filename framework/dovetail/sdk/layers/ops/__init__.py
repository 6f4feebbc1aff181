"""Products behind the layers: `reference` in plain torch says what each means, `fused` is for CUDA tensors.

All other operations are rows of `dovetail.contracts.kernels.OPS`, which layers bind when they are built.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from dovetail.sdk.layers.ops import invariant, reference
from dovetail.sdk.layers.ops.reference import Unary


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """`linear`, or with a residual `linear_add`, whose rows do not depend on how many there are."""
    if not x.is_cuda:
        y = invariant.linear(x, weight, bias)
        return y if residual is None else residual + y
    from dovetail.sdk.layers.ops import fixed  # imports Triton, which only CUDA tensors need

    return fixed.linear(x, weight, bias, residual)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.linear`."""
    found: Tensor = _implementation(x).linear(x, weight, bias)
    return found


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.wide_linear`."""
    found: Tensor = _implementation(x).wide_linear(x, weight, bias)
    return found


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, normed: Unary) -> Tensor:
    """See `reference.norm_linear`; `normed` computes the norm where no kernel does both."""
    found: Tensor = _implementation(x).norm_linear(x, norm, eps, weight, bias, normed)
    return found


def norm_gate(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    normed: Unary,
    gated: Unary,
) -> Tensor:
    """See `reference.norm_gate`; `normed` and `gated` compute these where no kernel does all."""
    found: Tensor = _implementation(x).norm_gate(x, norm, eps, weight, bias, normed, gated)
    return found


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """See `reference.linear_add`: `residual` may be overwritten."""
    found: Tensor = _implementation(x).linear_add(x, weight, bias, residual)
    return found


def _implementation(x: Tensor) -> ModuleType:
    if not x.is_cuda:
        return reference
    from dovetail.sdk.layers.ops import fused  # imports Triton, which only CUDA tensors need

    return fused


__all__ = ["invariant_linear", "linear", "linear_add", "norm_gate", "norm_linear", "wide_linear"]
