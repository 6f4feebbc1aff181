"""Token embedding and the output head, which may share its weight."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.contracts.device import is_on_host
from dovetail.contracts.layers import BuildContext, Parallel, RankSums
from dovetail.sdk.layers.base import Layer, Slot
from dovetail.sdk.layers.linear import is_repacked
from dovetail.sdk.layers.ops import invariant
from dovetail.sdk.quantization.forms import Form


class Embedding(Layer):
    """Rows of `weight` `[V, H]` by token id, times `scale`; ranks have some of the rows each, or all of them.

    Args:
        vocab_size: V.
        hidden_size: H.
        ctx: Device, dtype and rank.
        scale: Factor of the rows.
        shard: What ranks divide; None: every rank has all, as is best for a short table.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        ctx: BuildContext,
        *,
        scale: float = 1.0,
        shard: Literal["vocab"] | None = "vocab",
    ) -> None:
        super().__init__()
        self.rows = VocabRows(vocab_size, ctx.parallel if shard == "vocab" else Parallel())
        self.weight = self.empty(self.rows.num, hidden_size, device=ctx.device, dtype=ctx.dtype)
        self.scale, self._sums = scale, ctx.rank_sums(hidden_size)

    def slots(self) -> dict[Slot, tuple[int, ...]]:
        return self.rows.slots(self.weight)

    @property
    def holds(self) -> bool | None:
        return False

    def place(self, slot: Slot, tensor: Tensor) -> Tensor | None:
        return self.rows.place(self.weight, tensor)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows.look_up(self.weight, ids, self._sums)
        return rows if self.scale == 1.0 else rows * self.scale


class VocabRows:
    """This rank's rows of a table of V tokens: the same number on every rank, the last ones perhaps padding.

    Attributes:
        first: The first one's token.
        num: How many there are here.
    """

    def __init__(self, vocab_size: int, parallel: Parallel) -> None:
        self.vocab_size, self.parallel = vocab_size, parallel
        self.num = -(-vocab_size // parallel.size)
        self.first = parallel.rank * self.num

    def slots(self, weight: Tensor) -> dict[Slot, tuple[int, ...]]:
        """See `Layer.slots`."""
        return {Slot("weight"): (self.vocab_size, *weight.shape[1:])}

    def place(self, weight: Tensor, tensor: Tensor) -> Tensor | None:
        """See `Layer.place`; padding rows become zero."""
        there = max(0, min(self.num, self.vocab_size - self.first))
        weight[there:].zero_()
        return weight[:there].copy_(tensor[self.first : self.first + there]) if there else None

    def look_up(self, weight: Tensor, ids: Tensor, sums: RankSums) -> Tensor:
        """Return the rows of tokens `[T]`, `[T, H]`, the same on all ranks, which `sums` adds up."""
        if self.parallel.size == 1:
            return F.embedding(ids, weight)
        local = ids - self.first
        is_here = (local >= 0) & (local < self.num)
        rows = F.embedding(local.clamp(0, self.num - 1), weight)
        return sums(rows.masked_fill(~is_here[:, None], 0))

    def join(self, logits: Tensor) -> Tensor:
        """Return the logits of all tokens `[R, V]`, given those of this rank's, `[R, num]`."""
        if self.parallel.size == 1:
            return logits
        return self.parallel.join(logits)[:, : self.vocab_size].contiguous()


class LMHead(Layer):
    """Logits over the vocabulary, `[R, H]` to `[R, V]`; ranks compute those of some tokens each.

    With `BuildContext.head_form` the weight is quantised once it is read; a tied embedding keeps its numbers.

    Args:
        vocab_size: V.
        hidden_size: H.
        ctx: Device, dtype and rank.
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
        self.scale, self.soft_cap, self._is_invariant = scale, soft_cap, ctx.batch_invariant
        self._tied = [tied] if tied is not None else []  # in a list: not a sub-module of this one
        self.rows = VocabRows(vocab_size, ctx.parallel) if tied is None else tied.rows
        if tied is None:
            self.weight = self.empty(self.rows.num, hidden_size, device=ctx.device, dtype=ctx.dtype)
        place: dict[str, Any] = {"N": self.rows.num, "K": hidden_size}
        self._form: Form | None = ctx.head_form
        self._repacks = self._form is not None or is_repacked(ctx, *place.values())
        op: dict[str, Any] = {"op": "packed_linear", "form": self._form} if self._repacks else {"op": "linear"}
        self._kernel: Any = ctx.operation(**op, **place)
        self._packed: Any = None
        self._whole: Tensor | None = None

    def slots(self) -> dict[Slot, tuple[int, ...]]:
        return {} if self._tied else self.rows.slots(self.weight)

    @property
    def holds(self) -> bool | None:
        return self._whole is not None

    def place(self, slot: Slot, tensor: Tensor) -> Tensor | None:
        if self._is_replaced and tensor.shape == self.weight.shape:
            self._whole = tensor.to(self.weight.dtype)  # only repacked: its place is never touched
            return self._whole
        return self.rows.place(self.weight, tensor)

    @property
    def _is_replaced(self) -> bool:
        """Whether nothing of the weight is left as it was read."""
        return self._repacks and (self._form is not None or not self._kernel.keeps())

    def finalize(self) -> None:
        weight = self._tied[0].weight if self._tied else self.weight
        if self._repacks:
            whole = (weight if self._whole is None else self._whole).detach()
            tensors = {"weight": whole} if self._form is None else self._form.quantise(whole)
            self._packed, self._whole = self._kernel.pack(tensors), None
            if not self._tied and self._is_replaced:
                del self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self._product(hidden)
        logits = logits if self.scale == 1.0 else logits * self.scale
        if (cap := self.soft_cap) is not None:
            is_by_row = self._is_invariant and is_on_host(logits.device)
            apply = invariant.by_rows if is_by_row else invariant.at_once
            logits = apply(logits, lambda rows: torch.tanh(rows / cap) * cap)
        return self.rows.join(logits)

    def _product(self, hidden: Tensor) -> Tensor:
        weight = self._packed if self._repacks else self._tied[0].weight if self._tied else self.weight
        logits: Tensor = self._kernel(hidden, weight, None)
        return logits
