"""Linear layers, plain and fused. Weights are `[out, in]`; inputs `[T, in]`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dovetail.contracts.model import BuildContext
from dovetail.layers import ops
from dovetail.layers.base import Layer
from dovetail.layers.norm import RMSNorm


class Linear(Layer):
    """`y = x Wᵀ + b`, optionally several projections fused by rows.

    Args:
        in_features: Input width.
        out_features: Output width, or a mapping from slot name to the width of each fused part, in order.
        ctx: Device and dtype.
        bias: Whether there is a bias.
    """

    weight: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int | Mapping[str, int], ctx: BuildContext, *, bias: bool = False
    ) -> None:
        super().__init__()
        self._slots: dict[str, tuple[int, int]] = {}
        if isinstance(out_features, Mapping):
            start = 0
            for slot, width in out_features.items():
                self._slots[slot] = (start, width)
                start += width
            out_features = start
        self.weight = self.empty(out_features, in_features, device=ctx.device, dtype=ctx.dtype)
        self.bias = self.empty(out_features, device=ctx.device, dtype=ctx.dtype) if bias else None
        self._packed: Tensor | None = None

    def expected(self) -> list[tuple[str, str | None]]:
        names = ["weight", "bias"] if self.bias is not None else ["weight"]
        return [(name, slot) for name in names for slot in (self._slots or [None])]

    def load_weight(self, name: str, slot: str | None, tensor: Tensor) -> None:
        param: Tensor = getattr(self, name)
        if slot is not None:
            param = param.narrow(0, *self._slots[slot])
        self.copy_part(param, tensor)

    def finalize(self) -> None:
        """On CPU in bfloat16, repack the weight into oneDNN's blocked layout: about twice as fast at few rows."""
        if self.weight is not None and can_prepack(self.weight):
            self._packed = prepack(self.weight)
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias)
        if self.weight is None:
            raise RuntimeError("the weight was repacked and lost")
        return ops.linear(x, self.weight, self.bias)

    def after(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """`self(norm(x))`."""
        if self.weight is None:
            return self(norm(x)[0])  # type: ignore[no-any-return]
        return ops.norm_linear(x, norm.weight, norm.eps, self.weight, self.bias)

    def gate_after(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """`silu(gate) * up` of `self(norm(x))`, where the output is gate and up side by side."""
        if self.weight is None:
            return ops.silu_and_mul(self(norm(x)[0]))
        return ops.norm_gate(x, norm.weight, norm.eps, self.weight, self.bias)

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`; `residual` may be overwritten."""
        if self.weight is None:
            return residual + self(x)  # type: ignore[no-any-return]
        return ops.linear_add(x, self.weight, self.bias, residual)


def can_prepack(weight: Tensor) -> bool:
    """Whether oneDNN's blocked layout exists for this weight here."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def prepack(weight: Tensor) -> Tensor:
    """Return `weight` `[out, in]` in oneDNN's layout; the op is the one that torch.compile emits on CPU."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Linear layer over a weight made by `prepack`."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
