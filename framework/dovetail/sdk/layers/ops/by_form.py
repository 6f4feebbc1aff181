"""Products with packed weights in plain torch: a weight is written out for each call. Faster ones must equal these.

Letters: T tokens, N outputs, K inputs, F half of the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from dovetail.contracts.kernels import Ask, PackedKernel
from dovetail.contracts.operations import Component
from dovetail.sdk.layers.ops.reference import NormKernel, Unary

if TYPE_CHECKING:
    from dovetail.contracts.layers import Act
    from dovetail.sdk.quantization.forms import Form


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
