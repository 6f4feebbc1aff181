"""Makes a model's matrices in its own dtype: what `BuildContext` uses unless the checkpoint is quantised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dovetail.contracts.layers import Act, BuildContext, LayerFactory, Linear, Part
from dovetail.layers import linear


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
        return linear.Linear(ctx, name, in_features, parts, bias=bias, shard=shard, act=act)


PLAIN: LayerFactory = PlainFactory()
