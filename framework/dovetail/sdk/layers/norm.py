"""Norms over the last axis."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dovetail.contracts.layers import BuildContext, RMSScale, Stream
from dovetail.sdk.layers.base import Layer, Slot
from dovetail.sdk.layers.ops.reference import LayerNormKernel, NormKernel, NormRotate


class BoundNorm(NamedTuple):
    """What computes RMS norms of one width.

    Attributes:
        norm: Of a tensor.
    """

    norm: NormKernel

    @classmethod
    def of(cls, ctx: BuildContext, width: int) -> BoundNorm:
        """Bind it."""
        return cls(ctx.operation("rms_norm", H=width))

    def __call__(self, x: Tensor | Stream, rms: RMSScale) -> Tensor:
        """Compute what a norm with this `rms` computes; a stream is added up first, as `RMSNorm` says."""
        if not isinstance(x, Stream):
            return self.norm(x, *rms)
        normed = x.normed(*rms)
        return self.norm(x.value, *rms) if normed is None else normed


class RMSNorm(Layer):
    """RMS norm over `[T, size]`, which kernels may compute themselves.

    A subclass that computes something else is called instead, without saying so: its `rms` is None.
    """

    weight_dtype: ClassVar[torch.dtype | None] = None
    """Of the weight; None: the model's."""

    def __init__(self, size: int, eps: float, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = self.empty(size, device=ctx.device, dtype=self.weight_dtype or ctx.dtype)
        self.eps = eps
        self.bind(ctx, size)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls) and "rms" not in vars(cls):
            cls.rms = None  # type: ignore[assignment]  # what it computes is not what the kernels would

    def bind(self, ctx: BuildContext, size: int) -> None:
        """Bind what computes it; a subclass that computes something else binds that."""
        self._normed = BoundNorm.of(ctx, size)

    @property
    def rms(self) -> RMSScale | None:
        """Weight and epsilon."""
        return RMSScale(self.weight, self.eps)

    def forward(self, x: Tensor | Stream) -> Tensor:
        """Normalise `x`; a stream is added up first, by the same kernel where ranks have shares of it."""
        return self._normed(x, RMSScale(self.weight, self.eps))


class ZeroCenteredRMSNorm(RMSNorm):
    """RMS norm times `1 + weight`, all in float32 (Gemma, Qwen3-Next); `weight` is kept with the one added."""

    weight_dtype = torch.float32

    def bind(self, ctx: BuildContext, size: int) -> None:
        """See `RMSNorm.bind`."""
        self._wide: NormKernel = ctx.operation("wide_rms_norm", H=size)

    def place(self, slot: Slot, tensor: Tensor) -> Tensor:
        return self.weight.copy_(tensor.float() + 1)

    def forward(self, x: Tensor | Stream) -> Tensor:
        """Normalise `x`."""
        return self._wide(x.total() if isinstance(x, Stream) else x, self.weight, self.eps)


class LayerNorm(Layer):
    """Layer norm over `[T, size]`: mean and variance in float32, weight, and unless it has none, bias.

    Source: arXiv:1607.06450.
    """

    suffixes = {"weight": (".weight", ".gamma"), "bias": (".bias", ".beta")}  # noqa: RUF012 - as the base declares it

    def __init__(self, size: int, eps: float, ctx: BuildContext, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = self.empty(size, device=ctx.device, dtype=ctx.dtype)
        self.bias = self.empty(size, device=ctx.device, dtype=ctx.dtype) if bias else None
        self.eps = eps
        self._norm: LayerNormKernel = ctx.operation("layer_norm", H=size)

    def forward(self, x: Tensor | Stream) -> Tensor:
        """Normalise `x`."""
        return self._norm(x.total() if isinstance(x, Stream) else x, self.weight, self.bias, self.eps)


class QKNorm(Layer):
    """RMS norm of each query and key head, one weight `[D]` for all queries and one for all keys.

    `order` is that of the projection's rows: see `Part`. `offset` is added to the weights (1 where they are centred
    around zero).
    """

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        ctx: BuildContext,
        order: tuple[int, ...] | None = None,
        *,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self._order, self._offset = None if order is None else list(order), offset
        heads = {"q": (0, num_qo_heads), "k": (num_qo_heads, num_kv_heads)}
        self._heads = {part: place for part, place in heads.items() if place[1]}
        self.weight = self.empty(num_qo_heads + num_kv_heads, head_dim, device=ctx.device, dtype=ctx.dtype)
        self.eps = eps
        self._norm_rotate: NormRotate = ctx.operation("norm_rotate", D=head_dim)

    def slots(self) -> dict[Slot, tuple[int, ...]]:
        return {Slot("weight", part): (self.weight.shape[1],) for part in self._heads}

    def place(self, slot: Slot, tensor: Tensor) -> Tensor:
        mine = tensor if self._order is None else tensor[self._order]
        mine = mine.float() + self._offset if self._offset else mine
        return self.weight.narrow(0, *self._heads[slot.part]).copy_(mine)  # one weight for all of its heads

    def forward(self, qk: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Normalise `[T, Hq + Hk, D]` and rotate it by the step's cosine and sine."""
        return self._norm_rotate(qk, self.weight, self.eps, *rope)
