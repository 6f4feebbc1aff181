"""Multi-head latent attention: the cache has one short row for each token, of which keys and values are products.

A row is `c` `[r]`, of which all heads' keys and values are products, and a key for the position `[d]`, rotated, which
all heads share. A query is taken to the space of the rows (`q W_kᵀ`, "absorbed"), heads attend to the rows themselves,
and what they find is taken to their values by `W_v`: keys and values of heads are not made. Where they are
less work, as for long chunks of prompts, a backend may make them, and queries stay as they are.

Source: DeepSeek-V2, arXiv:2405.04434.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dovetail.contracts.attention import AttentionLayer, ForwardBatch
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.device import is_on_host
from dovetail.contracts.layers import BuildContext, Norm, Part, Stream
from dovetail.sdk.layers.attention import attend_cached
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.ops.invariant import at_once, by_rows, in_blocks
from dovetail.sdk.layers.rope import head_order

EPS = 1e-6
"""Of the norms of latent rows, whatever the others have."""


class LatentHeads(Matrix):
    """What makes keys and values of latent rows, `[Hq (nope + v), r]`: used from both sides."""

    weight: Tensor

    def __init__(self, ctx: BuildContext, rank: int, heads: int, nope: int, v_dim: int) -> None:
        width = nope + v_dim
        super().__init__(ctx, ctx.path, rank, (Part("", heads * width, width),), "out")
        self.store("weight", ctx.dtype)
        self._split = [nope, v_dim]

    def by_head(self) -> Tensor:
        """Return all of this rank's heads, `[Hq, nope + v, r]`."""
        return self.weight.view(-1, sum(self._split), self.in_features)

    def split(self) -> tuple[Tensor, ...]:
        """Return `W_k` `[Hq, nope, r]` and `W_v` `[Hq, v, r]` of this rank's heads."""
        return torch.split(self.by_head(), self._split, dim=1)


class LatentAttention(nn.Module):
    """Latent attention over the rows of a layer whose mixer is `latent`.

    Args:
        config: The model's; the layer's `v_dim` is r, and `qk_dim` r + d.
        index: Layer number.
        ctx: Device, dtype, rank and path.
        nope: Width of a head's queries and keys without the rotated part.
        v_dim: Width of a head's values.
        q_rank: Width of the latent row of queries; None: they are made of the stream in one product.
        bias: On the products that make latent rows, and the output.
        gate: Whether a token weighs what each of its heads finds.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        ctx: BuildContext,
        *,
        nope: int,
        v_dim: int,
        q_rank: int | None = None,
        bias: bool = False,
        gate: bool = False,
    ) -> None:
        super().__init__()
        spec, hidden = config.layer(index), config.hidden_size
        self.rank, self.rope, self.nope, self.v_dim = spec.v_dim, spec.qk_dim - spec.v_dim, nope, v_dim
        heads = spec.num_qo_heads
        turned = head_order(config.rope_of(index), self.rope)
        width, row = nope + self.rope, self.rank + self.rope
        queries = (Part("", heads * width, width, order=_behind(nope, turned)),)
        self.q_a = self.q_a_norm = None
        if q_rank is not None:
            self.q_a, self.q_a_norm = ctx.linear("q_a", hidden, q_rank, bias=bias), RMSNorm(q_rank, EPS, ctx)
        self.q = ctx.linear("q", hidden if q_rank is None else q_rank, queries, shard="out")
        self.kv_a = ctx.linear("kv_a", hidden, (Part("", row, row, order=_behind(self.rank, turned)),), bias=bias)
        self.kv_a_norm = RMSNorm(self.rank, EPS, ctx)
        self.kv_b = LatentHeads(ctx.at("kv_b"), self.rank, heads, nope, v_dim)
        self.out = ctx.linear("out", heads * v_dim, hidden, bias=bias, shard="in")
        self.gate = ctx.linear("gate", hidden, heads, shard="out") if gate else None
        self.layer = AttentionLayer.of(spec, ctx.parallel.size)
        self._latent_rows = ctx.operation("latent_rows", R=self.rank, D=self.rope)
        self._is_invariant = ctx.batch_invariant
        self._shares = by_rows if ctx.batch_invariant and is_on_host(ctx.device) else at_once

    def forward(
        self,
        x: Tensor | Stream,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        *,
        norm: Norm | None = None,
        add: Stream | None = None,
        scale: float = 1.0,
    ) -> Tensor | Stream:
        """Map `[T, H]` to `[T, H]`; `rope` is the step's cosine and sine, the rest is as for a `Linear`."""
        x = x.total() if isinstance(x, Stream) else x
        x = x if norm is None else norm(x)
        q = self.q(x) if self.q_a is None else self.q(self.q_a(x), norm=self.q_a_norm)
        q = q.view(x.shape[0], -1, self.nope + self.rope)
        queries, row = self._latent_rows(q, self.kv_a(x), self.kv_a_norm.weight, self.kv_a_norm.eps, *rope)
        values = q.new_empty(x.shape[0], q.shape[1], self.v_dim)
        self._attend(q, queries, row, batch, values)
        if self.gate is not None:
            values = values * self._shares(self.gate(x).float(), torch.sigmoid).to(values.dtype)[..., None]
        return self.out(values.flatten(1), add=add, scale=scale)

    def _attend(self, q: Tensor, queries: Tensor, row: Tensor, batch: ForwardBatch, out: Tensor) -> None:
        """Write what heads find, `[T, Hq, v]`.

        Args:
            q: `[T, Hq, nope + d]`, not rotated yet; written to.
            queries: `[T, Hq, r + d]`, of which the rotated part is there, and the absorbed one is written here.
            row: `[T, 1, r + d]`, for the cache.
            batch: The step's batch.
            out: Written in full.
        """
        backend, n = batch.attention, batch.num_decode
        backend.write_kv(self.layer, row, row[..., : self.rank], batch)
        if self._is_invariant:
            self._attend_absorbed(q, queries, row, batch, out)
            return
        if n < batch.num_requests and batch.seq_lens_cpu:
            q[n:, :, self.nope :] = queries[n:, :, self.rank :]
            if backend.forward_extend_latent(q[n:], self.kv_b.by_head(), self.layer, batch, out[n:]):
                q, queries, row, out = q[:n], queries[:n], row[:n], out[:n]
        if not len(q):
            return
        to_keys, to_values = self.kv_b.split()
        torch.bmm(q[..., : self.nope].transpose(0, 1), to_keys, out=queries[..., : self.rank].transpose(0, 1))
        found = attend_cached(self.layer, queries, row, row[..., : self.rank], batch)
        torch.bmm(found.transpose(0, 1), to_values.transpose(1, 2), out=out.transpose(0, 1))

    def _attend_absorbed(self, q: Tensor, queries: Tensor, row: Tensor, batch: ForwardBatch, out: Tensor) -> None:
        """As `_attend`, every token in one form and by products of one shape, whatever the step has beside it."""
        own = batch.attention.batch_of(self.layer.index, batch)
        if own.attention.forward_latent(q, queries, self.kv_b.by_head(), self.layer, own, out):
            return
        to_keys, to_values = self.kv_b.split()
        queries[..., : self.rank] = by_heads(q[..., : self.nope], to_keys)
        found = attend_cached(self.layer, queries, row, row[..., : self.rank], batch)
        out.copy_(by_heads(found, to_values.transpose(1, 2)))


def _behind(num: int, order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the order of a unit whose first `num` rows stay, and whose others have `order`."""
    return None if order is None else (*range(num), *(num + place for place in order))


def by_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head of `x` `[T, N, in]` by its matrix of `weight` `[N, in, out]`; returns `[T, N, out]`.

    Rows do not depend on how many there are: see `in_blocks`.
    """
    num_heads, num_in, num_out = weight.shape

    def product(rows: Tensor) -> Tensor:
        split = rows.view(-1, num_heads, num_in).transpose(0, 1)
        return torch.bmm(split, weight).transpose(0, 1).flatten(1)

    return in_blocks(x.flatten(1), product).view(len(x), num_heads, num_out)
