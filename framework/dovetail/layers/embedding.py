"""Token embedding and the output head, which may share its weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.contracts.layers import BuildContext
from dovetail.layers import ops
from dovetail.layers.base import Layer
from dovetail.layers.linear import can_prepack, packed_linear, prepack


class Embedding(Layer):
    """Rows of `weight` `[V, H]` by token id, times `scale`."""

    def __init__(self, vocab_size: int, hidden_size: int, ctx: BuildContext, *, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = self.empty(vocab_size, hidden_size, device=ctx.device, dtype=ctx.dtype)
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.weight)
        return rows if self.scale == 1.0 else rows * self.scale


class LMHead(Layer):
    """Logits over the vocabulary, `[R, H]` to `[R, V]`.

    Args:
        vocab_size: V.
        hidden_size: H.
        ctx: Device and dtype.
        tied: The embedding whose weight is used; then nothing is loaded.
        scale: Factor of the logits.
        soft_cap: Logits become `soft_cap * tanh(logit / soft_cap)`; None: they stay.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        ctx: BuildContext,
        tied: Embedding | None = None,
        *,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.soft_cap = scale, soft_cap
        self._tied = [tied] if tied is not None else []  # in a list: not a sub-module of this one
        if tied is None:
            self.weight = self.empty(vocab_size, hidden_size, device=ctx.device, dtype=ctx.dtype)
        self._packed: Tensor | None = None

    def finalize(self) -> None:
        weight = self._tied[0].weight if self._tied else self.weight
        if can_prepack(weight):
            self._packed = prepack(weight)
            if not self._tied:
                del self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self._product(hidden)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap

    def _product(self, hidden: Tensor) -> Tensor:
        if self._packed is not None:
            return packed_linear(hidden, self._packed, None)
        return ops.linear(hidden, self._tied[0].weight if self._tied else self.weight, None)
