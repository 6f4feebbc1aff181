"""Attention that reads keys in blocks and merges their softmax as it goes.

B requests, T tokens, N new tokens of a request, L keys of a block, Hq and Hk query and KV heads, D head dim.

Source: online softmax, arXiv:1805.02867; FlashAttention, arXiv:2205.14135.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dovetail.contracts import AttentionBackend, AttentionCaps, AttentionLayer, ForwardBatch, KVPool, ModelConfig


@dataclass
class BlockwiseOptions:
    """Settings."""

    block: int = field(default=128, metadata={"help": "Keys read at once, rounded up to whole pages."})


class BlockwiseBackend(AttentionBackend):
    """One request at a time, one block of pages at a time, in float32."""

    Options = BlockwiseOptions
    caps = AttentionCaps(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        sliding_window=True,
        sinks=True,
        needs_cpu_lens=True,
    )

    def __init__(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> None:
        self.kv_pool = kv_pool
        options = self.options or BlockwiseOptions()
        self.pages_per_block = max(1, -(-options.block // kv_pool.page_size))

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        """One new token for each of the first `num_decode` requests."""
        for index in range(batch.num_decode):
            self._attend(q[index : index + 1], layer, batch, index, out[index : index + 1])

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        """Prefill chunks of the other requests."""
        start = 0
        for index in range(batch.num_decode, batch.num_requests):
            end = start + batch.q_lens_cpu[index]
            self._attend(q[start:end], layer, batch, index, out[start:end])
            start = end

    def _attend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch, index: int, out: Tensor) -> None:
        """Attend a request's last N tokens `[N, Hq, D]` over all its keys, causally and within the layer's window."""
        num_new, num_all, size = q.shape[0], batch.seq_lens_cpu[index], self.kv_pool.page_size
        kv, group = self.kv_pool.layer(layer.index), layer.num_qo_heads // layer.num_kv_heads
        queries = q.float().unflatten(1, (layer.num_kv_heads, group)) * layer.scale
        places = torch.arange(num_all - num_new, num_all, device=q.device)
        merged = Merged.empty(queries, layer.sinks)
        first = 0 if layer.sliding_window is None else max(0, num_all - num_new + 1 - layer.sliding_window)
        for page in range(first // size, -(-num_all // size), self.pages_per_block):
            end = min((page + self.pages_per_block) * size, num_all)
            pages = batch.page_table[batch.rows[index], page : -(-end // size)].long()
            keys, values = (kv[pages, half].flatten(0, 1)[: end - page * size].float() for half in (0, 1))
            scores = torch.einsum("nhgd,lhd->nhgl", queries, keys)
            columns = torch.arange(page * size, end, device=q.device)
            hidden = columns > places[:, None]
            if layer.sliding_window is not None:
                hidden |= columns <= places[:, None] - layer.sliding_window
            merged.add(scores.masked_fill_(hidden[:, None, None], float("-inf")), values)
        out.copy_((merged.total / merged.weight[..., None]).flatten(1, 2))


class Merged:
    """What the blocks so far add up to: the largest score, the sum of weights, and the weighted sum of values."""

    def __init__(self, top: Tensor, weight: Tensor, total: Tensor) -> None:
        self.top, self.weight, self.total = top, weight, total

    @classmethod
    def empty(cls, queries: Tensor, sinks: Tensor | None) -> "Merged":
        """Start with nothing; a sink is a key of its own without a value."""
        top = queries.new_full(queries.shape[:-1], -1e30)
        weight = torch.zeros_like(top)
        if sinks is not None:
            top = sinks.float().view(1, *queries.shape[1:3]).expand_as(top).clone()
            weight = torch.ones_like(top)
        return cls(top, weight, torch.zeros_like(queries))

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Take a block: `scores` `[N, Hk, G, L]`, `values` `[L, Hk, D]`."""
        top = torch.maximum(self.top, scores.amax(-1))
        keep, weights = (self.top - top).exp(), (scores - top[..., None]).exp()
        self.top, self.weight = top, self.weight * keep + weights.sum(-1)
        self.total = self.total * keep[..., None] + torch.einsum("nhgl,lhd->nhgd", weights, values)
