"""Attention of long prompt chunks on a CPU, by blocks of keys and oneDNN's products.

torch's own attention on CPU multiplies by MKL, which has no fast product in bfloat16 on processors of other vendors:
on a Zen 5 core it does 80 to 90 GFLOP/s, where oneDNN does 460, or 240 with float32 results. So a chunk is multiplied
block by block here. As there, scores and sums are float32 and weights bfloat16; what a block adds is rounded, too. Keys
and values are read once, a block at a time, so memory does not depend on the length of the prefix.

A query gets other bits than from torch's own attention, which decode rows take. `few_rows_round_as_many` says whether
there is anything to lose.

T new tokens, n keys of a block, Hq and Hk query and KV heads, G = Hq / Hk, D and Dv widths of a key and a value.

Source: FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.contracts.attention import AttentionLayer

KEYS = 512
"""Keys of a block, at most."""
ROWS = 1024
"""Queries of all heads of a KV head that are multiplied at once: with `KEYS`, their scores stay in the cache."""
SHORTEST = 1024
"""New tokens from which a chunk is computed so. Shorter ones gain little, and a reply that goes on after a restart is
computed again as a chunk: by torch's own attention its numbers come closest to those of decode rows."""
UNSEEN = -1e30
"""Score of a key that is not seen. Infinity would leave NaN where a row sees no key of its first block."""
LOG2_E = math.log2(math.e)

Read = Callable[[int, int], tuple[Tensor, Tensor]]
"""Returns keys `[Hk, n, D]` and values `[Hk, n, Dv]` of the places from the first number to before the second."""
Seen = Callable[[Tensor, Tensor], Tensor]
"""Maps places of queries `[t, 1]` and of keys `[n]` to which keys are seen, `[t, n]`."""
Start = Callable[[int], int]
"""Returns the first place that a query sees, no less for a later query."""


@lru_cache(maxsize=1)
def is_faster() -> bool:
    """Whether chunks in bfloat16 gain, and lose no equality of bits that torch's own attention would keep."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and not few_rows_round_as_many()


def few_rows_round_as_many() -> bool:
    """Whether torch's own attention in bfloat16 says the same of three queries as of them among all, on this CPU."""
    rng, num = torch.Generator().manual_seed(0), 384
    q, k, v = (torch.randn(1, 2, num, 64, generator=rng).bfloat16() for _ in range(3))
    reach = torch.full((num, num), float("-inf"), dtype=torch.bfloat16).triu(1)
    whole = F.scaled_dot_product_attention(q, k, v, attn_mask=reach)
    few = [
        F.scaled_dot_product_attention(q[:, :, at : at + 3], k, v, attn_mask=reach[at : at + 3])
        for at in range(0, num, 3)
    ]
    return torch.equal(torch.cat(few, dim=2), whole)


def attend_chunk(
    q: Tensor, first: int, read: Read, block: int, layer: AttentionLayer, seen: Seen, start: Start, out: Tensor
) -> None:
    """Attend a chunk over its prefix and itself.

    Args:
        q: `[T, Hq, D]` bfloat16.
        first: Place of its first token.
        read: Gives keys and values, a block at a time and in order.
        block: Keys of a block; it begins at a multiple of them.
        layer: Scale, soft cap and sinks.
        seen: What queries see of keys that are there.
        start: Says where a query begins to see.
        out: `[T, Hq, Dv]`, is written.
    """
    chunk = _Chunk(q, first, layer, out.shape[2], block)
    last = first + len(q)
    with _float32_by_bfloat16():
        for at in range(start(first) // block * block, last, block):
            keys, values = read(at, min(at + block, last))
            chunk.add(keys.float(), values.to(q.dtype), at, seen, start)
    chunk.finish(out)


class _Chunk:
    """Queries of a chunk `[Hk, T G, D]`, and what they found so far.

    Of each row there are the largest score, the sum of exponentials, and the sum of values, float32.
    """

    def __init__(self, q: Tensor, first: int, layer: AttentionLayer, v_dim: int, block: int) -> None:
        num, hq, d = q.shape
        hk = layer.num_kv_heads
        self._layer, self._first, self._num, self._group = layer, first, num, hq // hk
        self._q = q.reshape(num, hk, self._group, d).transpose(0, 1).reshape(hk, -1, d).float()
        rows = self._q.shape[1]
        self._best = q.new_full((hk, rows, 1), UNSEEN, dtype=torch.float32)
        self._total = torch.zeros_like(self._best)
        self._acc = self._q.new_zeros(hk, rows, v_dim)
        self._step = max(1, ROWS // self._group)
        most = min(self._step, num) * self._group
        self._scores, self._found = self._q.new_empty(most * block), q.new_empty(most, v_dim)
        self._weights = q.new_empty(most * block)
        # What a score is multiplied by, so that it is a power of two.
        self._unit = LOG2_E if layer.soft_cap is None else LOG2_E * layer.soft_cap

    def add(self, keys: Tensor, values: Tensor, at: int, seen: Seen, start: Start) -> None:
        """Attend a block `[Hk, n, …]` of keys and values that begins at place `at`."""
        end = at + keys.shape[1]
        for low in range(max(0, at - self._first), self._num, self._step):
            high = min(low + self._step, self._num)
            first, last = self._first + low, self._first + high - 1
            if end <= start(first):
                continue
            mask = None
            if end - 1 > first or at < start(last):  # else all see the whole block
                queries = torch.arange(first, last + 1, device=keys.device)[:, None]
                sees = seen(queries, torch.arange(at, end, device=keys.device))
                mask = keys.new_zeros(sees.shape).masked_fill_(~sees, UNSEEN)[:, None]
            for head in range(len(keys)):
                self._attend(head, slice(low * self._group, high * self._group), keys[head], values[head], mask)

    def _attend(self, head: int, rows: slice, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        num, width = rows.stop - rows.start, keys.shape[0]
        scores, weights = (x[: num * width].view(num, width) for x in (self._scores, self._weights))
        scale = self._layer.scale * LOG2_E if self._layer.soft_cap is None else self._layer.scale / self._layer.soft_cap
        torch.addmm(scores, self._q[head, rows], keys.mT, beta=0, alpha=scale, out=scores)
        if self._layer.soft_cap is not None:
            scores.tanh_().mul_(self._unit)
        if mask is not None:
            scores.view(-1, self._group, width).add_(mask)
        best, total = self._best[head, rows], self._total[head, rows]
        new = torch.maximum(best, scores.amax(-1, keepdim=True))
        shrink = torch.exp2(best - new)
        scores.sub_(new).exp2_()
        total.mul_(shrink).add_(scores.sum(-1, keepdim=True))
        best.copy_(new)
        found = torch.mm(weights.copy_(scores), values, out=self._found[:num])
        self._acc[head, rows].mul_(shrink).add_(found)

    def finish(self, out: Tensor) -> None:
        """Add the sinks, divide by the sums and write `[T, Hq, Dv]`."""
        if self._layer.sinks is not None:
            sinks = (self._layer.sinks.float() * LOG2_E).view(-1, 1, self._group)
            sinks = sinks.expand(-1, self._num, -1).reshape(self._best.shape)
            top = torch.maximum(self._best, sinks)
            shrink = torch.exp2(self._best - top)
            self._total = self._total * shrink + torch.exp2(sinks - top)
            self._acc *= shrink
        self._acc /= self._total
        split = self._acc.view(self._layer.num_kv_heads, self._num, self._group, -1)
        out.view(self._num, self._layer.num_kv_heads, self._group, -1).copy_(split.transpose(0, 1))


@contextmanager
def _float32_by_bfloat16() -> Iterator[None]:
    """Have products of float32 take bfloat16 instructions: the numbers given here are bfloat16's, the sums float32."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
