"""Gated MLPs of which each token goes through some.

T tokens, H hidden size, E experts, K experts chosen for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from dovetail.contracts.layers import BuildContext, ExpertsSpec, Part, Stream
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.shards import gated


class ExpertMatrix(Matrix):
    """One matrix for each expert, `[E, out, in]`; checkpoints store each by itself or all in one tensor."""

    suffixes = {"weight": (".weight", ""), "bias": (".bias", "_bias")}  # noqa: RUF012 - as the base declares it

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        ctx: BuildContext,
        path: str,
        num: int,
        in_features: int,
        parts: Sequence[Part],
        *,
        bias: bool,
        shard: Literal["out", "in", "expert"],
    ) -> None:
        super().__init__(ctx, path, in_features, parts, shard, num)
        self.bias = None
        self.make_weight(ctx)
        if bias:
            self.store("bias", ctx.dtype, granule=None)

    def make_weight(self, ctx: BuildContext) -> None:
        """Make the parameters that hold the weights."""
        self.store("weight", ctx.dtype)

    def finalize(self) -> None:
        """Where ranks add up shares of one expert, the first one adds the bias."""
        if self.is_share and self.local_experts == self.num_experts and self.parallel.rank > 0:
            self.bias = None

    @property
    def operand(self) -> Any:
        """The weights, as the kernel of the experts takes them."""
        return self.weight


class GatedExperts(nn.Module):
    """See `dovetail.contracts.layers.Experts`: matrices, and the operation `experts` over them."""

    matrix: ClassVar[type[ExpertMatrix]] = ExpertMatrix
    """What its two matrices are."""

    def __init__(self, ctx: BuildContext, spec: ExpertsSpec) -> None:
        super().__init__()
        path, hidden, inner, act, bias = spec.path, spec.hidden, spec.inner, spec.act, spec.bias
        parts = (Part("gate", inner), Part("up", inner))[act == "relu2" :]
        cut: tuple[Literal["out", "expert"], Literal["in", "expert"]] = (
            ("expert", "expert") if spec.shard == "expert" else ("out", "in")
        )
        self.gate_up = self.matrix(ctx, f"{path}.gate_up", spec.num, hidden, parts, bias=bias, shard=cut[0])
        self.down = self.matrix(ctx, f"{path}.down", spec.num, inner, (Part("", hidden),), bias=bias, shard=cut[1])
        self._sums, self._top_k = ctx.rank_sums(hidden), spec.top_k
        dims = {"E": self.gate_up.local_experts, "H": hidden, "I": self.down.local_in, "C": spec.top_k}
        first = self.gate_up.first_expert
        self._place: dict[str, Any] = {
            **dims,
            "act": act if act == "relu2" else gated(path, act, parts),
            "weigh": spec.weigh,
            "first": first,
        }
        self.bind(ctx)

    def bind(self, ctx: BuildContext) -> None:
        """Bind what computes them."""
        self._kernel = ctx.operation("experts", **self._place, total=self.gate_up.num_experts)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, *, add: Stream | None = None) -> Tensor | Stream:
        if ids.shape[-1] != self._top_k:
            raise ValueError(f"{ids.shape[-1]} experts for each token, {self._top_k} were asked for")
        return self.added(add, x, ids, weights)

    def added(self, add: Stream | None, *operands: Any) -> Tensor | Stream:
        """Call the kernel, which adds to the stream itself unless ranks have shares of it."""
        up, down = self.gate_up, self.down
        residual = add.total() if add is not None and self._sums.ranks.size == 1 else None
        out: Tensor = self._kernel(*operands, up.operand, up.bias, down.operand, down.bias, residual)
        if add is None:
            return self._sums(out)
        if residual is None:
            return add.plus_share(out, self._sums)
        add.value = out
        return add
