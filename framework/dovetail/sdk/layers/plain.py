"""Makes a model's matrices in its own dtype: what `BuildContext` uses unless the checkpoint is quantised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dovetail.contracts.layers import Act, BuildContext, Experts, LayerFactory, Linear, Part
from dovetail.sdk.layers import linear
from dovetail.sdk.layers.experts import GatedExperts
from dovetail.sdk.layers.packed import PackedLinear
from dovetail.sdk.layers.shards import shard_of


class PlainFactory:
    """Matrices in the model's dtype, plain and fused kernels over them."""

    def linear(
        self,
        ctx: BuildContext,
        name: str,
        in_features: int,
        parts: Sequence[Part],
        *,
        bias: bool,
        shard: Literal["out", "in"] | None,
        act: Act | None,
    ) -> Linear:
        """See `BuildContext.linear`."""
        share = shard_of(name, in_features, parts, shard, ctx.parallel)
        if linear.is_repacked(ctx, share.num_rows, share.columns[1]):
            return PackedLinear(ctx, name, in_features, parts, None, bias=bias, shard=shard, act=act)
        return linear.PlainLinear(ctx, name, in_features, parts, bias=bias, shard=shard, act=act)

    def experts(
        self,
        ctx: BuildContext,
        name: str,
        num: int,
        top_k: int,
        hidden: int,
        inner: int,
        *,
        act: Act,
        bias: bool,
        weigh: Literal["output", "input"],
        shard: Literal["inner", "expert"],
    ) -> Experts:
        """See `BuildContext.experts`."""
        return GatedExperts(ctx, name, num, top_k, hidden, inner, act=act, bias=bias, weigh=weigh, shard=shard)


PLAIN: LayerFactory = PlainFactory()
