"""A matrix in the model's dtype: `PlainLinear`. Weights are `[out, in]`; inputs `[T, in]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from dovetail.contracts.device import is_on_host
from dovetail.contracts.kernels import meaning
from dovetail.contracts.layers import Act, BuildContext, Norm, Part, RMSScale, Stream
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.ops import invariant
from dovetail.sdk.layers.ops.reference import LinearKernel, Unary
from dovetail.sdk.layers.shards import gated

LONG_ROW = 1024
"""A row of more inputs is summed in parts."""


class PlainLinear(Matrix):
    """`act(norm(x) Wᵀ + b) * scale`, added to a stream or not; see `dovetail.contracts.layers.Linear`.

    Args:
        ctx: Device, dtype and rank.
        path: Where it stands in the model.
        in_features: Of the whole model, as all widths here.
        parts: One after the other by rows.
        bias: Whether there is one. Where ranks add up shares, the first one adds it.
        shard: How ranks divide the matrix.
        act: Applied to the product; needs two parts of one width.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    _linear: LinearKernel
    _linear_add: Callable[..., Tensor]
    _normed: Callable[..., Tensor]

    def __init__(
        self,
        ctx: BuildContext,
        path: str,
        in_features: int,
        parts: Sequence[Part],
        *,
        bias: bool = False,
        shard: Literal["out", "in"] | None = None,
        act: Act | None = None,
    ) -> None:
        super().__init__(ctx, path, in_features, parts, shard)
        self._is_silu, self._is_invariant = gated(path, act, parts) == "silu_and_mul", ctx.batch_invariant
        self._gate: Unary | None = None if act is None else ctx.operation("act_and_mul", F=self.local_out // 2, act=act)
        self.bias = None
        self.store("weight", ctx.dtype)
        self._prepacks = can_prepack(self.get_parameter("weight")) and self._is_plain(ctx)
        if self._prepacks:
            self.gather("weight")
        else:
            self._bind(ctx)
        if bias:
            self.store("bias", ctx.dtype, granule=None)
        self._packed: Tensor | None = None

    def _is_plain(self, ctx: BuildContext) -> bool:
        """Return whether no kernel set serves the product at any number of rows."""
        dims, dtype = {"N": self.local_out, "K": self.local_in}, str(ctx.dtype).removeprefix("torch.")
        ask = ctx.kernels.ask("linear", dtype, dims, {}, invariant=ctx.batch_invariant)
        return ctx.kernels.bind(ask) is meaning(ask)

    def _bind(self, ctx: BuildContext) -> None:
        """Bind the products over a weight that stays as it is."""
        dims = {"N": self.local_out, "K": self.local_in}
        self._linear, self._linear_add = ctx.operation("linear", **dims), ctx.operation("linear_add", **dims)
        if not self._is_invariant and self._is_silu:
            self._normed = ctx.operation("norm_gate", F=self.local_out // 2, K=self.local_in)
        elif not self._is_invariant:
            self._normed = ctx.operation("norm_linear", **dims)

    def finalize(self) -> None:
        """On CPU in bfloat16, repack into oneDNN's layout, twice as fast at few rows, where no set claims it."""
        if self.is_share and self.parallel.rank > 0:
            self.bias = None
        if self.weight is not None and self._prepacks:
            self._packed = prepack(self.gathered("weight"))
            self.weight = None

    def forward(
        self, x: Tensor | Stream, *, norm: Norm | None = None, add: Stream | None = None, scale: float = 1.0
    ) -> Tensor | Stream:
        x = x.total() if isinstance(x, Stream) else x
        if self._is_invariant:
            return self._invariant(x if norm is None else norm(x), add, scale)
        rms: RMSScale | None = None if norm is None or self.weight is None else getattr(norm, "rms", None)
        if norm is not None and rms is None:
            x = norm(x)
        if add is not None and self.weight is not None and self._adds_plainly(rms, scale):
            add.value = self._linear_add(x, self.weight, self.bias, add.value)
            return add
        return self.finish(self._product(x, norm if rms is not None else None, rms), add, scale)

    def _invariant(self, x: Tensor, add: Stream | None, scale: float) -> Tensor | Stream:
        """As `forward`, each row by itself: nothing is chosen by how many there are."""
        if self.weight is None:
            packed = self._repacked()
            y = invariant.in_blocks(x, lambda rows: packed_linear(rows, packed, self.bias))
        elif add is not None and self._adds_plainly(None, scale):
            add.value = self._linear_add(x, self.weight, self.bias, add.value)
            return add
        else:
            y = self._linear(x, self.weight, self.bias)
        return self.finish(y if self._gate is None else self._gate(y), add, scale)

    def _repacked(self) -> Tensor:
        if self._packed is None:
            raise RuntimeError("the weight was repacked and lost")
        return self._packed

    def _adds_plainly(self, rms: RMSScale | None, scale: float) -> bool:
        return rms is None and scale == 1.0 and self._gate is None and not self.is_share

    def _product(self, x: Tensor, norm: Norm | None, rms: RMSScale | None) -> Tensor:
        """`act(norm(x) Wᵀ + b)` for a norm that may be part of a kernel, or none."""
        if self.weight is None:
            y = packed_linear(x, self._repacked(), self.bias)
        elif norm is None or rms is None:
            y = self._linear(x, self.weight, self.bias)
        else:
            y = self._normed(x, *rms, self.weight, self.bias)
            if self._is_silu:
                return y
        return y if self._gate is None else self._gate(y)


def can_prepack(weight: Tensor) -> bool:
    """Whether oneDNN's blocked layout exists for this weight here."""
    return (
        is_on_host(weight.device)
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def prepack(weight: Tensor) -> Tensor:
    """Return `weight` `[out, in]` in oneDNN's layout; the op is the one that torch.compile emits on CPU."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Linear layer over a weight made by `prepack`: `[T, in]` to `[T, out]`. A row's result does not depend on T.

    oneDNN sums a long lone row in another order. It is computed twice, which costs little: reading the weight is what
    takes time.
    """
    is_alone = x.shape[0] == 1 and x.shape[-1] > LONG_ROW
    rows = torch.cat((x, x)) if is_alone else x  # a third of what repeat takes
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return out[:1] if is_alone else out
