"""Tensor operations in plain torch: the reference that faster versions must equal, on any device.

Rounding follows transformers (normalise in float32, round to the model's dtype, then multiply by the weight), so that
greedy tokens agree. Letters: T tokens, H hidden size, D head dim, N heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.contracts.kernels import Ask, PackedKernel
from dovetail.contracts.layers import Act, Parallel
from dovetail.contracts.operations import Component
from dovetail.sdk.layers.ops import invariant

if TYPE_CHECKING:
    from dovetail.sdk.quantization.forms import Form

NormKernel = Callable[[Tensor, Tensor, float], Tensor]
"""Kernel of the operations `rms_norm` and `wide_rms_norm`."""
LayerNormKernel = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
"""Kernel of the operation `layer_norm`."""
AddNormKernel = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Kernel of the operation `add_rms_norm`."""
NormRotate = Callable[[Tensor, Tensor | None, float, Tensor, Tensor], Tensor]
"""Kernel of the operation `norm_rotate`."""
LinearKernel = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Kernel of the operation `linear`."""
Unary = Callable[[Tensor], Tensor]
"""A norm with its weight, or a kernel of the operation `act_and_mul`."""
Binary = Callable[[Tensor, Tensor], Tensor]
"""Kernel of the operation `sigmoid_gate`."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis; `weight` broadcasts.

    Source: arXiv:1910.07467.
    """
    wide = x.float()
    scale = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
    if wide is x:
        return (x * scale).mul_(weight)
    return wide.mul_(scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream and normalise the sum; returns the normalised sum and the sum, both `[T, H]`."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def added_rms_norm(norm: NormKernel) -> AddNormKernel:
    """Return `add_rms_norm` put together of an addition and a kernel of `rms_norm`."""

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        return norm(total, weight, eps), total

    return add_rms_norm


def wide_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `rms_norm` in float32, its weight's dtype, rounded to the dtype of `x` at the end (Gemma)."""
    return rms_norm(x.float(), weight, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last axis: mean and variance in float32, weight, and unless it is None, bias.

    Source: arXiv:1607.06450.
    """
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def act_and_mul(gate_up: Tensor, *, act: Act) -> Tensor:
    """The activation of the first half times the second, `[T, 2F]` to `[T, F]`; `relu2` maps `[T, F]`."""
    if act == "relu2":
        return F.relu(gate_up).square()
    if act == "silu_and_mul":
        return silu_and_mul(gate_up)
    if act == "clamped_silu_and_mul":
        return clamped_silu_and_mul(gate_up)
    return gelu_and_mul(gate_up, is_tanh=act == "gelu_tanh_and_mul")


def row_by_row(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """Apply a function of `x` and others `[T, …]` to each row by itself: see `invariant`."""
    if not others:
        return invariant.by_rows(x, function)
    parts = [function(*(one[i : i + 1] for one in (x, *others))) for i in range(len(x))]
    return torch.cat(parts) if parts else function(x, *others)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for `[T, 2F]` holding gate and up side by side; returns `[T, F]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(gate_up: Tensor, *, is_tanh: bool) -> Tensor:
    """As `silu_and_mul` with GELU, exact or by its approximation with tanh.

    Source: arXiv:1606.08415.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh" if is_tanh else "none") * up


def clamped_silu_and_mul(gate_up: Tensor) -> Tensor:
    """As `silu_and_mul`, both halves clamped, the gate steeper, and one added to the second.

    Source: gpt-oss, arXiv:2508.10925.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def norm_rotate(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """RMS norm of each head if there is a weight `[N, D]`, then rotary embedding in the halves layout.

    Args:
        x: `[T, N, D]`.
        weight: Norm weight of every head, or None.
        eps: Of the norm.
        cos: `[T, 1, D]` in the dtype of `x`, or in float32.
        sin: As `cos`, its first half negated: rolling by half a head swaps the halves, which saves building
            `(-x2, x1)`.

    Source: RoFormer, arXiv:2104.09864, in GPT-NeoX's layout.
    """
    if weight is not None:
        x = rms_norm(x, weight, eps)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def latent_rows(q: Tensor, kv_a: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What latent attention asks with and keeps, but for the absorbed part of its queries.

    Args:
        q: `[T, N, nope + D]`, the last D of each head to be rotated.
        kv_a: `[T, R + D]`: what keys and values are made of, to be normalised, and a key to be rotated.
        norm: `[R]`, the norm's weight.
        eps: Of the norm.
        cos: As for `norm_rotate`.
        sin: As `cos`.

    Returns:
        Queries `[T, N, R + D]`, of which the first R are left to the caller, and rows for the cache `[T, 1, R + D]`.
    """
    rank, turned_dim = norm.shape[0], cos.shape[-1]
    both = torch.cat((q[..., q.shape[-1] - turned_dim :], kv_a[:, None, rank:]), dim=1)
    turned = norm_rotate(both, None, 0.0, cos, sin)
    queries = q.new_empty(*q.shape[:2], rank + turned_dim)
    queries[..., rank:] = turned[:, :-1]
    return queries, torch.cat((rms_norm(kv_a[:, None, :rank], norm, eps), turned[:, -1:]), dim=-1)


def rotations(positions: Tensor, freqs: Tensor, factor: float | Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[T, 1, D]` for `norm_rotate`, of positions `[T]` times float32 frequencies `[D / 2]`.

    Both are multiplied by `factor`, a number or one for each frequency, and rounded to `dtype`.
    """
    angles = (positions.to(torch.float32)[:, None] * freqs)[:, None]
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x Wᵀ + b` for `x` `[T, in]` and `weight` `[out, in]`."""
    return F.linear(x, weight, bias)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `linear` in float32, whatever the dtypes."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Linear layer of the RMS norm of `x`; `norm` `[in]` is the norm's weight."""
    return F.linear(rms_norm(x, norm, eps), weight, bias)


def normed_linear(norm: NormKernel, linear: LinearKernel) -> Callable[..., Tensor]:
    """Return `norm_linear` put together of the kernels of a norm and a product."""
    return lambda x, weight, eps, matrix, bias: linear(norm(x, weight, eps), matrix, bias)


def norm_gate(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """First half of a gated MLP after its norm: `silu(gate) * up`, `weight` `[2F, in]` making both side by side."""
    return silu_and_mul(norm_linear(x, norm, eps, weight, bias))


def normed_gate(norm: NormKernel, linear: LinearKernel, gated: Unary) -> Callable[..., Tensor]:
    """Return `norm_gate` put together of the kernels of a norm, a product and an activation."""
    return lambda x, weight, eps, matrix, bias: gated(linear(norm(x, weight, eps), matrix, bias))


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Linear layer added to `residual` `[T, out]`, which may be overwritten: use the result in its place."""
    return residual + F.linear(x, weight, bias)


def added_linear(linear: LinearKernel) -> Callable[..., Tensor]:
    """Return `linear_add` put together of the kernel of a product and an addition."""
    return lambda x, weight, bias, residual: residual + linear(x, weight, bias)


def invariant_wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`wide_linear` whose rows do not depend on how many there are."""
    return invariant.in_blocks(x, lambda rows: wide_linear(rows, weight, bias))


def invariant_linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """`linear_add` whose rows do not depend on how many there are."""
    return residual + invariant.linear(x, weight, bias)


def rank_sum(share: Tensor, ranks: Parallel) -> Tensor:
    """Sum of all ranks' shares `[T, H]`, the same bits on all; `share` may be overwritten."""
    return ranks.sum(share)


def rank_sum_add(share: Tensor, value: Tensor, ranks: Parallel) -> Tensor:
    """`value` `[T, H]`, which all ranks have, and the sum of their shares."""
    return value + ranks.sum(share)


def added_rank_sum(total: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `rank_sum_add` put together of the kernel of a sum and an addition."""
    return lambda share, value, ranks: value + total(share, ranks)


def rank_sum_norm(share: Tensor, value: Tensor, weight: Tensor, eps: float, ranks: Parallel) -> tuple[Tensor, Tensor]:
    """RMS norm of `rank_sum_add`, and that."""
    return add_rms_norm(ranks.sum(share), value, weight, eps)


def normed_rank_sum(total: Callable[..., Tensor], add_norm: AddNormKernel) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `rank_sum_norm` put together of the kernels of a sum and of a norm behind an addition."""
    return lambda share, value, weight, eps, ranks: add_norm(total(share, ranks), value, weight, eps)


# Products with packed weights in plain torch: a weight is written out for each call. Faster ones must equal these.
#
# Letters: T tokens, N outputs, K inputs, F half of the outputs.


class PlainPacked:
    """`packed_linear`: the tensors of a form, or a plain matrix, as they are."""

    def __init__(self, *, form: Form | None) -> None:
        self._form = form

    def keeps(self, half: str = "") -> bool:
        """See `PackedKernel.keeps`."""
        return True

    def pack(self, tensors: Mapping[str, Tensor], half: str = "") -> Mapping[str, Tensor]:
        """See `PackedKernel.pack`."""
        return tensors

    def __call__(self, x: Tensor, weight: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """`x Wᵀ + b`."""
        return F.linear(x, weight["weight"] if self._form is None else self._form.dequantise(weight, x.dtype), bias)


class _Around:
    """Something around a product, whose matrix is packed as that wants it."""

    def __init__(self, product: PackedKernel) -> None:
        self._product = product

    def keeps(self, half: str = "") -> bool:
        """See `PackedKernel.keeps`."""
        return self._product.keeps(half)

    def pack(self, tensors: Mapping[str, Tensor], half: str = "") -> Any:
        """See `PackedKernel.pack`."""
        return self._product.pack(tensors, half)


class NormedPacked(_Around):
    """`packed_norm_linear`, put together of a norm, a product and an addition."""

    def __init__(self, norm: NormKernel, product: PackedKernel, *, form: Form | None) -> None:
        super().__init__(product)
        self._norm = norm

    def __call__(
        self, x: Tensor, norm: Tensor | None, eps: float, weight: Any, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """`norm(x) Wᵀ + b + residual`."""
        y: Tensor = self._product(x if norm is None else self._norm(x, norm, eps), weight, bias)
        return y if residual is None else residual + y


class GatedPacked(_Around):
    """`packed_norm_gate`, put together of a norm, a product and an activation."""

    def __init__(self, norm: NormKernel, product: PackedKernel, gate: Unary, *, form: Form | None, act: Act) -> None:
        super().__init__(product)
        self._norm, self._gate = norm, gate

    def __call__(self, x: Tensor, norm: Tensor | None, eps: float, weight: Any, bias: Tensor | None) -> Tensor:
        """`act(norm(x) Wᵀ + b)`."""
        return self._gate(self._product(x if norm is None else self._norm(x, norm, eps), weight, bias))


def parts_of_norm_linear(ask: Ask) -> tuple[Component, ...]:
    """Return what `NormedPacked` is put together of."""
    return (
        Component("rms_norm", {"H": "K"}),
        Component("packed_linear", {"N": "N", "K": "K"}, {"form": ask.option("form")}),
    )


def parts_of_norm_gate(ask: Ask) -> tuple[Component, ...]:
    """Return what `GatedPacked` is put together of."""
    return (
        Component("rms_norm", {"H": "K"}),
        Component("packed_linear", {"N": "2F", "K": "K"}, {"form": ask.option("form")}),
        Component("act_and_mul", {"F": "F"}, {"act": ask.option("act")}),
    )
