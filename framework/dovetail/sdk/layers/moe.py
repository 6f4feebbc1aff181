"""A mixture of experts in place of an MLP: a router that chooses among them, and experts that everybody shares.

T tokens, H hidden size, E experts, K experts chosen for each token, G groups of experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.device import is_on_host
from dovetail.contracts.layers import BuildContext, Norm, RMSScale, Stream
from dovetail.sdk.layers.base import Layer, Slot
from dovetail.sdk.layers.norm import BoundNorm
from dovetail.sdk.layers.ops import invariant
from dovetail.sdk.layers.ops.reference import LinearKernel
from dovetail.sdk.layers.packed import PackedExperts
from dovetail.sdk.layers.routing import Routing
from dovetail.sdk.layers.transformer import GATES, GatedMLP

FEW_TOKENS = 8
"""Up to so many, the norm is asked of the router, which a kernel may compute with it; of more, it is asked of what adds
up the stream. Where rows must not depend on how many there are, it is for any number."""


class Router(Layer):
    """Chooses the experts of each token. Scores are float32, and the correction is, as checkpoints have it."""

    correction: Tensor | None
    suffixes = {"correction": (".e_score_correction_bias", ".expert_bias")}  # noqa: RUF012 - as the base declares it

    def __init__(self, routing: Routing, hidden: int, ctx: BuildContext) -> None:
        super().__init__()
        self.routing, device, how = routing, ctx.device, {"routing": routing, "dtype": ctx.dtype}
        self.weight = self.empty(routing.num, hidden, device=device, dtype=ctx.dtype)
        product = "wide_linear" if routing.is_wide else "linear"
        self._product: LinearKernel = ctx.operation(product, N=routing.num, K=hidden)
        self._route, self._norm_route = ctx.operation("route", **how), ctx.operation("norm_route", H=hidden, **how)
        self.bias = self.empty(routing.num, device=device, dtype=ctx.dtype) if routing.bias else None
        correction = torch.zeros(routing.num, device=device) if routing.correction else None
        self.register_buffer("correction", correction)  # a buffer: it is float32 in models of any dtype

    def slots(self) -> dict[Slot, tuple[int, ...]]:
        found = super().slots()
        return found if self.correction is None else found | {Slot("correction"): (self.routing.num,)}

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return ids `[T, K]` int64 and shares `[T, K]`, times `scale`, in the dtype of `x`, for `[T, H]`."""
        found: tuple[Tensor, Tensor] = self._route(self._product(x, self.weight, self.bias), self.correction, scale)
        return found

    def normed(self, x: Tensor, rms: RMSScale | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """As a call for what a norm makes of `x`, which is returned, too."""
        found: tuple[Tensor, Tensor, Tensor] = self._norm_route(*self.operands(x, rms, scale))
        return found

    def operands(self, x: Tensor, rms: RMSScale | None, scale: float) -> tuple[Any, ...]:
        """Return the operands of `norm_route`."""
        norm, eps = (None, 0.0) if rms is None else rms
        return x, norm, eps, self.weight, self.bias, self.correction, scale


class SharedGate(Layer):
    """How much of the shared expert a token gets: the sigmoid of one product, weight `[1, H]`."""

    def __init__(self, hidden: int, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = self.empty(1, hidden, device=ctx.device, dtype=ctx.dtype)
        self._linear: LinearKernel | None = ctx.operation("linear", N=1, K=hidden) if ctx.batch_invariant else None
        self._by_element = invariant.by_rows if is_on_host(ctx.device) else invariant.at_once

    def forward(self, x: Tensor) -> Tensor:
        """Map `[T, H]` to `[T, 1]`."""
        if self._linear is not None:
            return self._by_element(self._linear(x, self.weight, None), torch.sigmoid)
        return F.linear(x, self.weight).sigmoid()


class MixtureOfExperts(nn.Module):
    """Router, experts, and where the model has them shared ones, which every token goes through.

    Args:
        config: The model's.
        ctx: Device, dtype, rank and path.
        routing: How experts are chosen.
        inner: Width between of an expert.
        shared_inner: That of the shared experts together; 0: there are none.
        has_shared_gate: Whether each token weighs the shared expert.
        experts: What `ctx.experts` takes beyond that: `bias`, `weigh`, `act`.
    """

    def __init__(
        self,
        config: ModelConfig,
        ctx: BuildContext,
        routing: Routing,
        inner: int,
        *,
        shared_inner: int = 0,
        has_shared_gate: bool = False,
        **experts: Any,
    ) -> None:
        super().__init__()
        hidden, act = config.hidden_size, experts.pop("act", None) or GATES[config.hidden_act]
        self.router, self._normed = Router(routing, hidden, ctx), BoundNorm.of(ctx, hidden)
        self._most_fused = 0 if ctx.batch_invariant else FEW_TOKENS
        self.experts = ctx.experts("experts", routing.num, routing.top_k, hidden, inner, act=act, **experts)
        self.shared = GatedMLP(config, ctx.at("shared"), inner=shared_inner) if shared_inner else None
        if self.shared is None and isinstance(self.experts, PackedExperts):
            self.experts.bind_router(ctx, routing)
        self.shared_gate = SharedGate(hidden, ctx) if has_shared_gate else None

    def forward(
        self, x: Tensor | Stream, *, norm: Norm | None = None, add: Stream | None = None, scale: float = 1.0
    ) -> Tensor | Stream:
        """Map `[T, H]` to `[T, H]`; `norm`, `add` and `scale` as for a `Linear`."""
        rms: RMSScale | None = None if norm is None else getattr(norm, "rms", None)
        if norm is not None and rms is None:
            x = norm(x.total() if isinstance(x, Stream) else x)
        if rms is not None and len(x.value if isinstance(x, Stream) else x) > self._most_fused:
            x, rms = self._normed(x, rms), None
        x = x.total() if isinstance(x, Stream) else x
        if self.shared is None and isinstance(self.experts, PackedExperts):
            return self.experts.added(add, *self.router.operands(x, rms, scale))
        ids, shares, x = self.router.normed(x, rms, scale)
        return self._of_chosen(x, ids, shares, add, scale)

    def _of_chosen(self, x: Tensor, ids: Tensor, shares: Tensor, add: Stream | None, scale: float) -> Tensor | Stream:
        """Map normed tokens, whose experts are chosen."""
        if self.shared is None:
            return self.experts(x, ids, shares, add=add)
        if add is not None and self.shared_gate is None:
            added: Stream = self.shared(x, add=self.experts(x, ids, shares, add=add), scale=scale)
            return added
        shared = self.shared(x, scale=scale)
        shared = shared if self.shared_gate is None else shared * self.shared_gate(x)
        if add is not None:
            return self.experts(x, ids, shares, add=add).plus(shared)
        found: Tensor = self.experts(x, ids, shares) + shared
        return found
