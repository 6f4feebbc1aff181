"""Makes a model's matrices in its own dtype: what `BuildContext` uses unless the checkpoint is quantised."""

from __future__ import annotations

from dovetail.contracts.layers import BuildContext, Experts, ExpertsSpec, LayerFactory, Linear, MatrixSpec
from dovetail.sdk.layers import linear
from dovetail.sdk.layers.experts import GatedExperts
from dovetail.sdk.layers.packed import PackedLinear
from dovetail.sdk.layers.shards import shard_of


class PlainFactory:
    """Matrices in the model's dtype, plain and fused kernels over them."""

    def linear(self, ctx: BuildContext, spec: MatrixSpec) -> Linear:
        """See `LayerFactory.linear`."""
        share = shard_of(spec.path, spec.in_features, spec.parts, spec.shard, ctx.parallel)
        if linear.is_repacked(ctx, share.num_rows, share.columns[1]):
            return PackedLinear(ctx, spec, None)
        return linear.PlainLinear(ctx, spec)

    def experts(self, ctx: BuildContext, spec: ExpertsSpec) -> Experts:
        """See `LayerFactory.experts`."""
        return GatedExperts(ctx, spec)


PLAIN: LayerFactory = PlainFactory()
