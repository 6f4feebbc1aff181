"""A mixture of experts in place of an MLP: a router that chooses among them, and experts that everybody shares.

T tokens, H hidden size, E experts, K experts chosen for each token, G groups of experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext, Norm, RMSScale, Stream
from dovetail.sdk.layers.base import Layer, Slot
from dovetail.sdk.layers.norm import BoundNorm
from dovetail.sdk.layers.ops import invariant
from dovetail.sdk.layers.ops.reference import LinearKernel
from dovetail.sdk.layers.packed import PackedExperts
from dovetail.sdk.layers.routing import Routing
from dovetail.sdk.layers.transformer import GATES, GatedMLP

if TYPE_CHECKING:
    from dovetail.sdk.layers.ops.packed_integers import Words
    from dovetail.sdk.layers.ops.router import Routed

FEW_TOKENS = 8
"""Up to so many go through the router in one kernel, which reads its weights for each; as many as experts of words take
one by one, of which four are chosen for each."""


class Router(Layer):
    """Chooses the experts of each token. Scores are float32, and the correction is, as checkpoints have it."""

    correction: Tensor | None
    suffixes = {"correction": (".e_score_correction_bias",)}  # noqa: RUF012 - as the base declares it

    def __init__(self, routing: Routing, hidden: int, ctx: BuildContext) -> None:
        super().__init__()
        self.routing, self._is_invariant, device = routing, ctx.batch_invariant, ctx.device
        self.weight = self.empty(routing.num, hidden, device=device, dtype=ctx.dtype)
        product = "wide_linear" if routing.is_wide else "linear"
        self._product: LinearKernel = ctx.operation(product, N=routing.num, K=hidden)
        self.bias = self.empty(routing.num, device=device, dtype=ctx.dtype) if routing.bias else None
        correction = torch.zeros(routing.num, device=device) if routing.correction else None
        self.register_buffer("correction", correction)  # a buffer: it is float32 in models of any dtype

    def slots(self) -> dict[Slot, tuple[int, ...]]:
        found = super().slots()
        return found if self.correction is None else found | {Slot("correction"): (self.routing.num,)}

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return ids `[T, K]` int64 and shares `[T, K]`, times `scale`, in the dtype of `x`, for `[T, H]`."""
        logits = self._logits(x)
        if x.is_cuda:
            from dovetail.sdk.layers.ops.route import route  # imports Triton

            return route(logits, self.correction, self.routing, scale=scale, dtype=x.dtype)
        if self._is_invariant:
            rows = [self.choose(row, scale=scale, dtype=x.dtype) for row in torch.split(logits, 1)]
            return torch.cat([ids for ids, _ in rows]), torch.cat([shares for _, shares in rows])
        return self.choose(logits, scale=scale, dtype=x.dtype)

    def is_for_one_kernel(self, x: Tensor) -> bool:
        """Whether `routed` serves these tokens: a few, on CUDA."""
        return x.is_cuda and 0 < len(x) <= FEW_TOKENS and not self._is_invariant and x.stride(-1) == 1

    def routed(self, x: Tensor, rms: RMSScale | None, scale: float, words: Words | None) -> Routed:
        """Norm tokens, choose for them as a call does, and make of them what experts want."""
        from dovetail.sdk.layers.ops.router import routed  # imports Triton

        return routed(x, rms, self.weight, self.bias, self.correction, self.routing, scale=scale, words=words)

    def _logits(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight, self.bias)

    def choose(self, logits: Tensor, *, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Choose by logits `[T, E]`, in plain torch."""
        if self.routing.score == "chosen":
            best, ids = logits.topk(self.routing.top_k, dim=-1)
            shares = best.softmax(-1).float()
        else:
            wide = logits.float()
            scores = wide.sigmoid() if self.routing.score == "sigmoid" else wide.softmax(-1)
            ids = self._choice(scores).topk(self.routing.top_k, dim=-1, sorted=False).indices
            shares = scores.gather(1, ids)
            if self.routing.normalise:
                shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return ids, (shares * (self.routing.scale * scale)).to(dtype)

    def _choice(self, scores: Tensor) -> Tensor:
        """What experts are chosen by, `[T, E]`: those outside the best groups fall behind all others."""
        choice = scores if self.correction is None else scores + self.correction
        if self.routing.groups == 1:
            return choice
        by_group = choice.view(-1, self.routing.groups, self.routing.num // self.routing.groups)
        num = 1 if self.routing.group_score == "best" else 2
        of_group = by_group.topk(num, dim=-1).values.sum(-1)
        best = of_group.topk(self.routing.top_groups, dim=-1, sorted=False).indices
        stays = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best, True)
        return by_group.masked_fill(~stays[..., None], float("-inf")).view_as(choice)


class SharedGate(Layer):
    """How much of the shared expert a token gets: the sigmoid of one product, weight `[1, H]`."""

    def __init__(self, hidden: int, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = self.empty(1, hidden, device=ctx.device, dtype=ctx.dtype)
        self._linear: LinearKernel | None = ctx.operation("linear", N=1, K=hidden) if ctx.batch_invariant else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[T, H]` to `[T, 1]`."""
        if self._linear is not None:
            return invariant.by_rows(self._linear(x, self.weight, None), torch.sigmoid)
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
        self.experts = ctx.experts("experts", routing.num, routing.top_k, hidden, inner, act=act, **experts)
        self.shared = GatedMLP(config, ctx.at("shared"), inner=shared_inner) if shared_inner else None
        self.shared_gate = SharedGate(hidden, ctx) if has_shared_gate else None

    def forward(
        self, x: Tensor | Stream, *, norm: Norm | None = None, add: Stream | None = None, scale: float = 1.0
    ) -> Tensor | Stream:
        """Map `[T, H]` to `[T, H]`; `norm`, `add` and `scale` as for a `Linear`."""
        rms: RMSScale | None = None if norm is None else getattr(norm, "rms", None)
        if norm is not None and rms is None:
            x = norm(x.total() if isinstance(x, Stream) else x)
        if not self.router.is_for_one_kernel(x.value if isinstance(x, Stream) else x):
            x = x if rms is None else self._normed(x, rms)
            x = x.total() if isinstance(x, Stream) else x
            ids, shares = self.router(x, scale)
            return self._of_chosen(x, ids, shares, add, scale)
        x = x.total() if isinstance(x, Stream) else x
        packed = self.experts if self.shared is None and isinstance(self.experts, PackedExperts) else None
        words = None if packed is None else packed.words(x)
        routed = self.router.routed(x, rms, scale, words)
        if packed is not None and not isinstance(routed.rows, Tensor):
            return packed.of_integers(x, routed.rows, routed.ids, routed.shares, add=add)
        return self._of_chosen(cast("Tensor", routed.rows), routed.ids, routed.shares, add, scale)

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
