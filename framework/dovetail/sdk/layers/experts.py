"""Gated MLPs of which each token goes through some, in plain torch: the reference that faster kernels must equal.

T tokens, H hidden size, E experts, K experts chosen for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.layers import Act, BuildContext, Part, Stream
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.ops.reference import LinearKernel
from dovetail.sdk.layers.shards import gated

ROW_BYTES = 16
"""Rows of a grouped product take a multiple of so many."""


MAX_SORTED = 8192
"""Choices of tokens up to which our own kernels are faster than torch's grouped product, on an H200."""


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
        self.bias, self._is_invariant = None, ctx.batch_invariant
        self._linear: LinearKernel = F.linear
        if self._is_invariant:
            self._linear = ctx.operation("linear", N=self.local_out, K=self.local_in)
        self.make_weight(ctx)
        if bias:
            self.store("bias", ctx.dtype, granule=None)

    def make_weight(self, ctx: BuildContext) -> None:
        """Make the parameters that hold the weights; a quantisation overrides it and `of_expert`."""
        self.store("weight", ctx.dtype)

    def of_expert(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Return the weight `[out, in]` of one of this rank's experts."""
        return self.weight[expert]

    def finalize(self) -> None:
        """Where ranks add up shares of one expert, the first one adds the bias."""
        if self.is_share and self.local_experts == self.num_experts and self.parallel.rank > 0:
            self.bias = None

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """Multiply by one of this rank's experts."""
        return self._linear(x, self.of_expert(expert, x.dtype), None if self.bias is None else self.bias[expert])

    def of_rows(self, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows by their experts' plain weights.

        Args:
            x: `[N, in]`, sorted by expert.
            experts: `[N]`, each row's.
            ends: `[E]` int32, how many rows there are up to each expert's last one.
        """
        y: Tensor = F.grouped_mm(x, self.weight.transpose(-1, -2), offs=ends)
        return y if self.bias is None else y + self.bias[experts]


class GatedExperts(nn.Module):
    """See `dovetail.contracts.layers.Experts`. On CUDA nothing is read on the host, so steps can be recorded.

    Plain matrices: rows are sorted by expert, and each expert computes those that chose it. Otherwise every expert of
    this rank computes every token, and the weights pick: that takes E / K times as long as it must. On CPU each expert
    computes those that chose it, too.
    """

    matrix: ClassVar[type[ExpertMatrix]] = ExpertMatrix
    """What its two matrices are; a quantisation has its own."""

    def __init__(
        self,
        ctx: BuildContext,
        path: str,
        num: int,
        top_k: int,
        hidden: int,
        inner: int,
        *,
        act: Act,
        bias: bool,
        weigh: Literal["output", "input"],
        shard: Literal["inner", "expert"],
    ) -> None:
        super().__init__()
        parts = (Part("gate", inner), Part("up", inner))
        cut: tuple[Literal["out", "expert"], Literal["in", "expert"]] = (
            ("expert", "expert") if shard == "expert" else ("out", "in")
        )
        self.gate_up = self.matrix(ctx, f"{path}.gate_up", num, hidden, parts, bias=bias, shard=cut[0])
        self.down = self.matrix(ctx, f"{path}.down", num, inner, (Part("", hidden),), bias=bias, shard=cut[1])
        self._act, self._weigh = gated(path, act, parts) or act, weigh
        self._gate = ctx.operation("act_and_mul", F=self.gate_up.local_out // 2, act=self._act)
        self._parallel, self._top_k, self._is_invariant = ctx.parallel, top_k, ctx.batch_invariant

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, *, add: Stream | None = None) -> Tensor | Stream:
        if ids.shape[-1] != self._top_k:
            raise ValueError(f"{ids.shape[-1]} experts for each token, {self._top_k} were asked for")
        if self._is_for_triton(x, ids):
            return self._fused(x, ids, weights, add)
        groups = self._is_groupable(x) and not self._is_invariant
        out = self._grouped(x, ids, weights) if groups else self._each(x, ids, weights)
        if add is not None:
            return add.plus_share(out, self._parallel)
        return self._parallel.sum(out)

    def _is_for_triton(self, x: Tensor, ids: Tensor) -> bool:
        if not x.is_cuda or self.matrix is not ExpertMatrix or not len(x) or self._is_invariant:
            return False
        return ids.numel() <= MAX_SORTED or not self._is_groupable(x)

    def _fused(self, x: Tensor, ids: Tensor, weights: Tensor, add: Stream | None) -> Tensor | Stream:
        """In our own kernels, which add to the stream themselves unless ranks have shares of it."""
        residual = self._residual(add)
        return self._added(self._made(x.contiguous(), ids, weights, residual), add, residual)

    def _residual(self, add: Stream | None) -> Tensor | None:
        """What kernels add to what they make: the stream, unless ranks have shares of it."""
        return add.total() if add is not None and self._parallel.size == 1 else None

    def _added(self, out: Tensor, add: Stream | None, residual: Tensor | None) -> Tensor | Stream:
        """Add to the stream what kernels made, with `residual` in it or not."""
        if add is None:
            return self._parallel.sum(out)
        if residual is None:
            return add.plus_share(out, self._parallel)
        add.value = out
        return add

    def _made(self, x: Tensor, ids: Tensor, shares: Tensor, residual: Tensor | None) -> Tensor:
        """What the kernels make of tokens, added to `residual`."""
        from dovetail.sdk.layers.ops.experts import ExpertWeights, gated_experts  # imports Triton

        up, down = self.gate_up, self.down
        of = ExpertWeights(
            up.weight, down.weight, up.bias, down.bias, up.first_expert, self._act, self._weigh == "input"
        )
        return gated_experts(x, ids, shares, of, residual)

    def _is_groupable(self, x: Tensor) -> bool:
        if self.matrix is not ExpertMatrix or (x.device.type != "cpu" and x.dtype != torch.bfloat16):
            return False  # torch's grouped product of other types cannot be recorded in a graph
        is_whole = self.gate_up.local_experts == self.gate_up.num_experts
        widths = (self.gate_up.local_in, self.gate_up.local_out, self.down.local_in, self.down.local_out)
        return is_whole and all(width * x.element_size() % ROW_BYTES == 0 for width in widths)

    def _grouped(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """One row for each choice, sorted by expert."""
        num, order = self.gate_up.local_experts, ids.flatten().argsort(stable=True)
        chosen, rows, weight = ids.flatten()[order], order // self._top_k, weights.flatten()[order, None].to(x.dtype)
        ends = (chosen[None] <= torch.arange(num, device=x.device)[:, None]).sum(1, dtype=torch.int32)
        given = x[rows] * weight if self._weigh == "input" else x[rows]
        y = self.down.of_rows(self._gate(self.gate_up.of_rows(given, chosen, ends)), chosen, ends)
        y = y if self._weigh == "input" else y * weight
        # A token's experts are added up in the order of its choice, whoever else is in the batch.
        return torch.empty_like(y).index_copy_(0, order, y).view(*ids.shape, y.shape[-1]).sum(1)

    def _each(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Every expert computes every token; on CPU, those that chose it."""
        out = torch.zeros_like(x)
        for local in range(self.gate_up.local_experts):
            chosen = ids == self.gate_up.first_expert + local
            weight, has_chosen = (weights * chosen).sum(-1, keepdim=True).to(x.dtype), chosen.any(-1)
            if x.device.type == "cpu":  # nothing waits on the host there
                rows = has_chosen.nonzero()[:, 0]
                if len(rows):
                    out[rows] += self._of_one(local, x[rows], weight[rows])
            else:
                out = out + self._of_one(local, x, weight).where(has_chosen[:, None], 0)
        return out

    def _of_one(self, local: int, x: Tensor, weight: Tensor) -> Tensor:
        """What one expert makes of rows, times their weights."""
        given = x * weight if self._weigh == "input" else x
        y: Tensor = self.down(self._gate(self.gate_up(given, local)), local)
        return y if self._weigh == "input" else y * weight
