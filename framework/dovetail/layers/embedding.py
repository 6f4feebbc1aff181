"""Token embedding and the output head, which may share its weight."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dovetail.contracts.layers import BuildContext
from dovetail.layers import ops
from dovetail.layers.base import Layer
from dovetail.layers.linear import can_prepack, packed_linear, prepack


class Embedding(Layer):
    """Rows of `weight` `[V, H]` by token id."""

    def __init__(self, vocab_size: int, hidden_size: int, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = self.empty(vocab_size, hidden_size, device=ctx.device, dtype=ctx.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class LMHead(Layer):
    """Logits over the vocabulary, `[R, H]` to `[R, V]`. With `tied`, uses the embedding's weight and loads nothing."""

    def __init__(self, vocab_size: int, hidden_size: int, ctx: BuildContext, tied: Embedding | None = None) -> None:
        super().__init__()
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
        if self._packed is not None:
            return packed_linear(hidden, self._packed, None)
        return ops.linear(hidden, self._tied[0].weight if self._tied else self.weight, None)
