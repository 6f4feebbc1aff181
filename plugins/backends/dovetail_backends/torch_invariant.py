"""Attention in plain torch whose result for a token depends on that token and what is before it alone, to the last bit.

A token is computed in the block of `QUERIES` places that it stands in, counted from the beginning of its request, over
blocks of `KEYS` keys, from the first one on. All products have one shape, `BLOCKS` blocks of queries and one block of
keys each, whatever the step has: a prompt's chunk, a decode row, many of them. What a query does not see changes
nothing: weights of zero are added, and the largest score stays what it is. So tokens that stand in a block, or keys
that stand behind a token, do not matter.

n blocks, Hq and Hk query and KV heads, G = Hq / Hk, D head dim, L keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.contracts.attention import AttentionLayer

QUERIES, KEYS, BLOCKS = 16, 128, 4
SERIAL = 16384
"""Numbers that torch gives to one thread: of more, each thread has a share that need not end with a vector."""

Seen = Callable[[Tensor, Tensor], Tensor]
"""Maps places of queries `[…, 1]` and of keys `[KEYS]` to which keys are seen."""


def num_keys_for(num: int) -> int:
    """Return how many keys a request of `num` tokens is computed over: whole blocks."""
    return -(-num // KEYS) * KEYS


def chunk_blocks(q: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Cut the queries of a chunk into blocks.

    Args:
        q: `[T, Hq, D]`.
        first: Place of its first token.

    Returns:
        `[n, QUERIES, Hq, D]`, zero where there is no token of the chunk; and the place of each block's first one `[n]`.
    """
    before = first % QUERIES
    after = -(before + len(q)) % QUERIES
    padded = F.pad(q, (0, 0, 0, 0, before, after))
    starts = torch.arange(first - before, first + len(q) + after, QUERIES, device=q.device)
    return padded.view(-1, QUERIES, *q.shape[1:]), starts


def row_blocks(q: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Put single queries `[n, Hq, D]` at places `[n]` into a block each; returns as `chunk_blocks` does."""
    blocks = q.new_zeros(len(q), QUERIES, *q.shape[1:])
    blocks[torch.arange(len(q), device=q.device), places % QUERIES] = q
    return blocks, places - places % QUERIES


def attend_blocks(
    q: Tensor,
    starts: Tensor,
    keys: Tensor,
    values: Tensor,
    lens: Tensor,
    layer: AttentionLayer,
    seen: Seen,
    *,
    looks_ahead: bool = False,
) -> Tensor:
    """Attend blocks of queries over blocks of keys.

    Args:
        q: `[n, QUERIES, Hq, D]`.
        starts: `[n]`, the place of each block's first token.
        keys: `[n, Hk, L, D]`, or `[1, Hk, L, D]` where all blocks are of one request; L is a multiple of `KEYS`.
        values: As `keys`.
        lens: `[n]` or `[1]`, how many of the keys there are; what stands behind them is not used.
        layer: Scale, soft cap and sinks.
        seen: What queries see, among the keys that are there.
        looks_ahead: Queries may see keys behind them.

    Returns:
        `[n, QUERIES, Hq, D]`, in the dtype of `q`.
    """
    num = len(q)
    found = []
    for at in range(0, num, BLOCKS):
        mine = slice(at, at + BLOCKS)
        of_keys, of_lens = (slice(0, 1) if len(x) == 1 else mine for x in (keys, lens))
        group = _Group(q[mine], starts[mine], lens[of_lens], layer, seen)
        found.append(group.attend(keys[of_keys], values[of_keys], looks_ahead=looks_ahead))
    return torch.cat(found)


class _Group:
    """At most `BLOCKS` blocks of queries, in float32; each row of `[BLOCKS Hk, G QUERIES]` is a query head of a token.

    Products and sums are of `BLOCKS` blocks, zeros among them if need be. What is computed for each number by itself is
    computed for the first blocks alone, those that there are: exponentials cost as much as products.
    """

    def __init__(self, q: Tensor, starts: Tensor, lens: Tensor, layer: AttentionLayer, seen: Seen) -> None:
        self._dtype, self._shape, self._layer, self._seen = q.dtype, q.shape, layer, seen
        hk, d = layer.num_kv_heads, q.shape[-1]
        self._group = q.shape[2] // hk
        filled = F.pad(q.float(), (0, 0, 0, 0, 0, 0, 0, BLOCKS - len(q)))
        split = filled.view(BLOCKS, QUERIES, hk, self._group, d).permute(0, 2, 3, 1, 4)
        self._q = split.reshape(BLOCKS * hk, self._group * QUERIES, d)
        self._places = starts[:, None] + torch.arange(QUERIES, device=q.device)
        self._lens, self._ends = lens[:, None, None], lens.tolist()

    def attend(self, keys: Tensor, values: Tensor, *, looks_ahead: bool) -> Tensor:
        """Attend over `[n, Hk, L, D]` or `[1, Hk, L, D]`, block by block in order; `[n, QUERIES, Hq, D]`."""
        rows, mine = self._q.shape[:2], self._shape[0] * keys.shape[1]
        best = self._q.new_full(rows, float("-inf"))
        total, acc = self._q.new_zeros(rows), torch.zeros_like(self._q)
        # Blocks of keys that no token of the group sees would change nothing.
        last = keys.shape[2] if looks_ahead else min(keys.shape[2], num_keys_for(int(self._places.max()) + 1))
        for at in range(0, last, KEYS):
            of_keys, of_values = (self._block(x, at) for x in (keys, values))
            weights = self._scores(of_keys, at)
            new = torch.maximum(best, weights.amax(-1))
            shift = new.masked_fill(new == float("-inf"), 0.0)  # -inf: nothing seen yet
            exp_(weights[:mine].sub_(shift[:mine, :, None]))
            shrink = exp_(best - shift)
            total = total * shrink + weights.sum(-1)
            acc = acc * shrink[..., None] + torch.bmm(weights, of_values)
            best = new
        return self._result(best, total, acc)

    def _block(self, x: Tensor, at: int) -> Tensor:
        """Cut the keys or values from `at` on, zero where there are none; `[BLOCKS Hk, KEYS, D]`."""
        block = x[:, :, at : at + KEYS].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        for own, end in zip(block, self._ends, strict=True):
            if end < at + KEYS:
                own[:, max(end - at, 0) :] = 0.0
        num = len(block)
        filled = block.expand(BLOCKS, -1, -1, -1) if num == 1 else F.pad(block, (0, 0, 0, 0, 0, 0, 0, BLOCKS - num))
        return filled.reshape(-1, *block.shape[2:])

    def _scores(self, keys: Tensor, at: int) -> Tensor:
        """Scores `[BLOCKS Hk, G QUERIES, KEYS]` over a block of keys, -inf where they are not seen."""
        layer = self._layer
        scores = torch.bmm(self._q, keys.mT)
        mine = scores.view(BLOCKS, layer.num_kv_heads, self._group, QUERIES, KEYS)[: self._shape[0]].mul_(layer.scale)
        if layer.soft_cap is not None:
            in_pieces(mine.div_(layer.soft_cap), torch.tanh_).mul_(layer.soft_cap)
        places = torch.arange(at, at + KEYS, device=keys.device)
        seen = self._seen(self._places[..., None], places) & (places < self._lens)
        # Added, not filled in: that takes a fifth of the time, and scores are finite where no key is.
        mine += torch.zeros(seen.shape, device=keys.device).masked_fill_(~seen, float("-inf"))[:, None, None]
        return scores

    def _result(self, best: Tensor, total: Tensor, acc: Tensor) -> Tensor:
        """Add the sinks, and divide by the sums."""
        hk = self._layer.num_kv_heads
        if self._layer.sinks is not None:
            sinks = self._layer.sinks.float().view(1, hk, self._group, 1)
            sink = sinks.expand(BLOCKS, hk, self._group, QUERIES).reshape_as(best)
            top = torch.maximum(best, sink)
            shrink = exp_(best - top)
            total, acc = total * shrink + exp_(sink - top), acc * shrink[..., None]
        found = acc / total.masked_fill(total == 0, 1.0)[..., None]  # of places without a token
        split = found.view(BLOCKS, hk, self._group, QUERIES, -1)[: self._shape[0]].permute(0, 3, 1, 2, 4)
        return split.reshape(self._shape).to(self._dtype)


def in_pieces(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function in place to a tensor of a multiple of `BLOCKS QUERIES` numbers, so that no vector is cut."""
    for piece in torch.split(x.view(-1), SERIAL):
        function(piece)
    return x


def exp_(x: Tensor) -> Tensor:
    """Exponential, in place."""
    return in_pieces(x, torch.exp_)


def groups(lens: list[int]) -> Iterator[list[int]]:
    """Yield decode rows that are computed together, indices into `lens`: alike ones, so that little is filled up."""
    order = sorted(range(len(lens)), key=lambda i: -lens[i])
    for at in range(0, len(order), BLOCKS):
        yield order[at : at + BLOCKS]
