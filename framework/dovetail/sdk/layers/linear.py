"""A matrix in the model's dtype: `PlainLinear`. Weights are `[out, in]`; inputs `[T, in]`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from dovetail.contracts.kernels import repacks
from dovetail.contracts.layers import BuildContext, MatrixSpec, Norm, RMSScale, Stream
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.ops.reference import LinearKernel, Unary
from dovetail.sdk.layers.shards import gated


class PlainLinear(Matrix):
    """`act(norm(x) Wᵀ + b) * scale`, added to a stream or not; see `dovetail.contracts.layers.Linear`.

    Where ranks add up shares, the first one adds the bias. An `act` needs two parts of one width.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    _linear: LinearKernel
    _linear_add: Callable[..., Tensor]
    _normed: Callable[..., Tensor]

    def __init__(self, ctx: BuildContext, spec: MatrixSpec) -> None:
        super().__init__(ctx, spec.path, spec.in_features, spec.parts, spec.shard)
        act = spec.act
        self._is_silu = gated(spec.path, act, spec.parts) == "silu_and_mul"
        self._is_invariant = ctx.batch_invariant
        self._gate: Unary | None = None if act is None else ctx.operation("act_and_mul", F=self.local_out // 2, act=act)
        self.bias = None
        self.store("weight", ctx.dtype)
        self._bind(ctx)
        if spec.bias:
            self.store("bias", ctx.dtype, granule=None)

    def _bind(self, ctx: BuildContext) -> None:
        """Bind the products over a weight that stays as it is."""
        dims = {"N": self.local_out, "K": self.local_in}
        self._linear, self._linear_add = ctx.operation("linear", **dims), ctx.operation("linear_add", **dims)
        if not self._is_invariant and self._is_silu:
            self._normed = ctx.operation("norm_gate", F=self.local_out // 2, K=self.local_in)
        elif not self._is_invariant:
            self._normed = ctx.operation("norm_linear", **dims)

    def finalize(self) -> None:
        """Where ranks add up shares, the first one adds the bias."""
        if self.is_share and self.parallel.rank > 0:
            self.bias = None

    def forward(
        self, x: Tensor | Stream, *, norm: Norm | None = None, add: Stream | None = None, scale: float = 1.0
    ) -> Tensor | Stream:
        x = x.total() if isinstance(x, Stream) else x
        if self._is_invariant:
            return self._invariant(x if norm is None else norm(x), add, scale)
        rms: RMSScale | None = None if norm is None else getattr(norm, "rms", None)
        if norm is not None and rms is None:
            x = norm(x)
        if add is not None and self._adds_plainly(rms, scale):
            add.value = self._linear_add(x, self.weight, self.bias, add.value)
            return add
        return self.finish(self._product(x, norm if rms is not None else None, rms), add, scale)

    def _invariant(self, x: Tensor, add: Stream | None, scale: float) -> Tensor | Stream:
        """As `forward`, each row by itself: nothing is chosen by how many there are."""
        if add is not None and self._adds_plainly(None, scale):
            add.value = self._linear_add(x, self.weight, self.bias, add.value)
            return add
        y = self._linear(x, self.weight, self.bias)
        return self.finish(y if self._gate is None else self._gate(y), add, scale)

    def _adds_plainly(self, rms: RMSScale | None, scale: float) -> bool:
        return rms is None and scale == 1.0 and self._gate is None and not self.is_share

    def _product(self, x: Tensor, norm: Norm | None, rms: RMSScale | None) -> Tensor:
        """`act(norm(x) Wᵀ + b)` for a norm that may be part of a kernel, or none."""
        if norm is None or rms is None:
            y = self._linear(x, self.weight, self.bias)
        else:
            y = self._normed(x, *rms, self.weight, self.bias)
            if self._is_silu:
                return y
        return y if self._gate is None else self._gate(y)


def is_repacked(ctx: BuildContext, num_out: int, num_in: int) -> bool:
    """Whether a kernel set repacks a plain matrix at a place: see `dovetail.contracts.kernels.repacks`."""
    dims, dtype = {"N": num_out, "K": num_in}, str(ctx.dtype).removeprefix("torch.")
    return repacks(ctx.kernels.ask("linear", dtype, dims, {}, invariant=ctx.batch_invariant), ctx.kernels.serves)
