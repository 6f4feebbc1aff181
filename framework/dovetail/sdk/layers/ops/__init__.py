"""Tensor operations behind the layers: `reference` in plain torch says what each means, `fused` is for CUDA tensors."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from dovetail.contracts.layers import Act
from dovetail.sdk.layers.ops import invariant, reference


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`."""
    found: tuple[Tensor, Tensor] = _implementation(x).add_rms_norm(x, residual, weight, eps)
    return found


def norm_rotate(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """See `reference.norm_rotate`."""
    found: Tensor = _implementation(x).norm_rotate(x, weight, eps, cos, sin)
    return found


def latent_rows(q: Tensor, kv_a: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.latent_rows`."""
    found: tuple[Tensor, Tensor] = _implementation(q).latent_rows(q, kv_a, norm, eps, cos, sin)
    return found


def rotations(positions: Tensor, freqs: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `reference.rotations`."""
    found: tuple[Tensor, Tensor] = _implementation(positions).rotations(positions, freqs, factor, dtype)
    return found


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_and_mul`."""
    found: Tensor = _implementation(gate_up).silu_and_mul(gate_up)
    return found


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """`linear`, or with a residual `linear_add`, whose rows do not depend on how many there are."""
    if not x.is_cuda:
        y = invariant.linear(x, weight, bias)
        return y if residual is None else residual + y
    from dovetail.sdk.layers.ops import fixed  # imports Triton, which only CUDA tensors need

    return fixed.linear(x, weight, bias, residual)


def invariant_act(act: Act, gate_up: Tensor) -> Tensor:
    """`act_and_mul`, whose rows do not depend on how many there are; on CUDA they never do."""
    if gate_up.is_cuda:
        return act_and_mul(act, gate_up)
    return invariant.by_rows(gate_up, lambda row: act_and_mul(act, row))


def act_and_mul(act: Act, gate_up: Tensor) -> Tensor:
    """The activation of the first half times the second: see `reference`."""
    if act == "silu_and_mul":
        return silu_and_mul(gate_up)
    if act == "clamped_silu_and_mul":
        return reference.clamped_silu_and_mul(gate_up)
    return reference.gelu_and_mul(gate_up, is_tanh=act == "gelu_tanh_and_mul")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.linear`."""
    found: Tensor = _implementation(x).linear(x, weight, bias)
    return found


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.wide_linear`."""
    found: Tensor = _implementation(x).wide_linear(x, weight, bias)
    return found


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.norm_linear`."""
    found: Tensor = _implementation(x).norm_linear(x, norm, eps, weight, bias)
    return found


def norm_gate(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.norm_gate`."""
    found: Tensor = _implementation(x).norm_gate(x, norm, eps, weight, bias)
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


__all__ = [
    "act_and_mul",
    "add_rms_norm",
    "invariant_act",
    "invariant_linear",
    "latent_rows",
    "linear",
    "linear_add",
    "norm_gate",
    "norm_linear",
    "norm_rotate",
    "rotations",
    "silu_and_mul",
    "wide_linear",
]
