"""Root-mean-square norms."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dovetail.contracts.layers import BuildContext, RMSScale, Stream
from dovetail.layers import ops
from dovetail.layers.base import Layer, Slot


class RMSNorm(Layer):
    """RMS norm over `[T, size]`, which kernels may compute themselves.

    A subclass that computes something else is called instead, without saying so: its `rms` is None.
    """

    def __init__(self, size: int, eps: float, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = self.empty(size, device=ctx.device, dtype=ctx.dtype)
        self.eps = eps

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls) and "rms" not in vars(cls):
            cls.rms = None  # type: ignore[assignment]  # what it computes is not what the kernels would

    @property
    def rms(self) -> RMSScale | None:
        """Weight and epsilon."""
        return RMSScale(self.weight, self.eps)

    def forward(self, x: Tensor | Stream) -> Tensor:
        """Normalise `x`; a stream is added up first, by the same kernel where ranks have shares of it."""
        if not isinstance(x, Stream):
            return ops.add_rms_norm(x, None, self.weight, self.eps)[0]
        normed, x.value = ops.add_rms_norm(*x.take_sum(), self.weight, self.eps)
        return normed


class QKNorm(Layer):
    """RMS norm of each query and key head, one weight `[D]` for all queries and one for all keys.

    `order` is that of the projection's rows: see `Part`.
    """

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        ctx: BuildContext,
        order: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self._order = None if order is None else list(order)
        heads = {"q": (0, num_qo_heads), "k": (num_qo_heads, num_kv_heads)}
        self._heads = {part: place for part, place in heads.items() if place[1]}
        self.weight = self.empty(num_qo_heads + num_kv_heads, head_dim, device=ctx.device, dtype=ctx.dtype)
        self.eps = eps

    def slots(self) -> dict[Slot, tuple[int, ...]]:
        return {Slot("weight", part): (self.weight.shape[1],) for part in self._heads}

    def place(self, slot: Slot, tensor: Tensor) -> Tensor:
        mine = tensor if self._order is None else tensor[self._order]
        return self.weight.narrow(0, *self._heads[slot.part]).copy_(mine)  # one weight for all of its heads

    def forward(self, qk: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Normalise `[T, Hq + Hk, D]` and rotate it by the step's cosine and sine."""
        return ops.norm_rotate(qk, self.weight, self.eps, *rope)
