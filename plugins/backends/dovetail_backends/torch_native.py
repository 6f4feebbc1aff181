"""Attention in plain torch on any device: pages gathered, then scaled-dot-product attention. The reference.

What a token gets does not depend on what it is computed with: alone or beside others, in a chunk of a prompt or as a
decode row, with how many tokens cached. On CPU that holds to the last bit in bfloat16, so that a request that is
computed again, after a retraction or in another engine, goes on as it would have: see `num_keys_for`. It holds where
torch's products of few rows round as those of many do. On an AMD EPYC with avx512_bf16 and no AMX they do not: there a
chunk of three tokens has other bits in one row of eleven, a decode row in one of seven hundred; where it is so, chunks
are computed by `torch_blocks`, which is faster. Long chunks of latent layers are left out, which `latent_heads` serves.
With `batch_invariant` it holds everywhere, in any dtype, by `torch_invariant`, which is slower.

B requests, T tokens, Hq and Hk query and KV heads, G = Hq / Hk, D head dim, P page size, L keys. Where keys and values
differ in width, D is the larger: see `torch_layouts`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, KVPool, Phase
from dovetail.contracts.cache import SCALED_DTYPES
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.device import is_on_host
from dovetail.contracts.needs import AttentionCaps
from dovetail_backends import torch_blocks, torch_invariant
from dovetail_backends.latent_heads import extend_by_heads
from dovetail_backends.torch_layouts import NoPages, make_layout, widened

MAX_GROUPS = 2
SIMILAR = 0.7
"""Decode rows share a padded block as long as the shortest has this share of the longest's tokens."""
SMALL_KEYS, SMALL_STEP = 256, 16
"""Up to so many keys are computed in steps of so many, more in steps of `SMALL_KEYS`."""
PIECE, BLOCK = 1024, 512
"""Queries of a chunk that are computed at once, and keys that torch's attention on CPU takes at a time: of those that
no query of a piece sees, whole blocks are left out, which changes no bit."""


Bounds = tuple[int | None, int | None]
"""Sliding window and chunk of a layer."""
UNBOUNDED: Bounds = (None, None)


@dataclass(slots=True, eq=False)
class DecodeGroup:
    """Decode rows of similar length, padded to the longest.

    Attributes:
        rows: Their places among the decode rows, `[n]`; None for all of them in order.
        wanted: What is gathered of the pages, as the layout says it.
        num_keys: L, so many of what the pages hold are computed with.
        lens: `[n]` tokens of each.
        is_even: All have as many tokens: nothing to mask.
        bias: Additive mask by sliding window and chunk, made by the first layer that needs it.
    """

    rows: Tensor | None
    wanted: Tensor
    num_keys: int
    lens: Tensor
    is_even: bool
    bias: dict[Bounds, Tensor | None] = field(default_factory=dict)


class TorchNativeBackend(AttentionBackend):
    """Gathers each request's pages into a dense block and calls `scaled_dot_product_attention`."""

    caps = AttentionCaps(
        devices=frozenset({"cpu", "cuda", "*"}),
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
        sliding_window=True,
        chunked=True,
        sinks=True,
        soft_cap=True,
        bidirectional=True,
        spans=True,
        mixers=frozenset({"kv", "latent"}),
        unequal_dims=True,
        needs_cpu_lens=True,
        cache_dtypes=frozenset(SCALED_DTYPES),
        batch_invariant=True,
    )

    def __init__(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> None:
        self.kv_pool = kv_pool
        self.device = device
        self._groups: list[DecodeGroup] = []
        self._whole: dict[tuple[int, int, Bounds], Tensor] = {}
        self._spans: dict[int, Tensor] = {}
        # Where layers see what is behind a token, nothing is cached.
        self._layout = make_layout(config.layers[0], kv_pool, device) if config.layers[0].causal else NoPages()

    def plan(self, batch: ForwardBatch, phase: Phase) -> None:
        """Group the decode rows by length, and find where the step's keys and values go."""
        self._layout.plan(batch.kv_slots)
        self._whole, self._spans = {}, spans_of(batch)
        lens = batch.seq_lens_cpu[: batch.num_decode]
        groups = torch_invariant.groups(lens) if self.batch_invariant else similar_lengths(lens)
        self._groups = [self._group(batch, lens, rows) for rows in groups]

    def _group(self, batch: ForwardBatch, lens: list[int], rows: list[int]) -> DecodeGroup:
        num_keys = self._num_keys(max(lens[i] for i in rows))
        is_even = all(lens[i] == num_keys for i in rows)
        index = None if len(rows) == len(lens) else torch.tensor(rows, device=self.device)
        at = slice(0, len(lens)) if index is None else index
        pages = self._wanted(batch, batch.rows[at], num_keys)
        return DecodeGroup(index, pages, num_keys, batch.seq_lens[at], is_even)

    def _num_keys(self, num: int) -> int:
        """Return how many keys a block of `num` is padded to."""
        return torch_invariant.num_keys_for(num) if self.batch_invariant else num_keys_for(num)

    def _wanted(self, batch: ForwardBatch, rows: Tensor, num_keys: int) -> Tensor:
        """Find the pages of `num_keys` tokens of device rows `rows` `[n]`; the null page where a table ends."""
        num = -(-num_keys // self.kv_pool.page_size)
        pages = batch.page_table[rows, :num].long()
        return self._layout.wanted(F.pad(pages, (0, num - pages.shape[1])))

    def write_kv(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """As the default, to rows found once per step."""
        self._layout.write(layer, k, v)

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        """Rows of similar length at once; a group's query heads stand as G rows over one KV head."""
        for group in self._groups:
            if group.rows is None:
                out.copy_(self._decode_group(q, layer, group))
            else:
                out.index_copy_(0, group.rows, self._decode_group(q.index_select(0, group.rows), layer, group))

    def _decode_group(self, q: Tensor, layer: AttentionLayer, group: DecodeGroup) -> Tensor:
        """Attend the rows of one group: `[n, Hq, D]` to `[n, Hq, Dv]`."""
        n, hk = q.shape[0], layer.num_kv_heads
        found = self._layout.gather(layer, group.wanted, n, group.num_keys)
        if self.batch_invariant:
            blocks, starts = torch_invariant.row_blocks(widened(q, found[0].shape[-1]), group.lens.long() - 1)
            attended = self._attend_blocks(blocks, starts, *found, group.lens, layer)
            return attended[torch.arange(n, device=q.device), group.lens.long() - 1 - starts, :, : layer.v_dim]
        keys, values = (x.to(q.dtype) for x in found)
        q, d = widened(q, keys.shape[-1]), keys.shape[-1]
        mask = self._decode_mask(bounds(layer), q.dtype, group)
        if is_plain(layer):
            attended = attend_rows(q.view(n, hk, -1, d), keys, values, mask, layer.scale).reshape(n, -1, d)
        else:
            attended = attend_written_out(q.view(n, -1, 1, d), keys, values, mask, layer).reshape(n, -1, d)
        return attended[..., : layer.v_dim]

    def _attend_blocks(
        self, blocks: Tensor, starts: Tensor, keys: Tensor, values: Tensor, lens: Tensor, layer: AttentionLayer
    ) -> Tensor:
        """See `torch_invariant.attend_blocks`."""
        reach = bounds(layer)
        return torch_invariant.attend_blocks(
            blocks, starts, keys, values, lens, layer, lambda queries, places: within(queries, places, reach)
        )

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        """Prefill chunks one by one, each over its cached prefix and itself; whole prompts where nothing is cached."""
        start = 0
        for index in range(batch.num_decode, batch.num_requests):
            num_new, num_all = batch.q_lens_cpu[index], batch.seq_lens_cpu[index]
            end = start + num_new
            spans = self._spans.get(index) if layer.spans else None
            if self.batch_invariant and layer.causal:
                self._extend_blocks(q[start:end], index, layer, batch, spans, out[start:end])
                start = end
                continue
            fresh = None
            if num_new == num_all and k is not None and v is not None:  # nothing is cached: no page is read
                fresh = self._layout.fresh(layer, k[start:end], v[start:end])
            if spans is None and self._takes_blocks(q, num_new, layer):
                self._extend_by_blocks(q[start:end], fresh, index, layer, batch, out[start:end])
            elif fresh is not None:
                padding = num_keys_for(num_all) - num_all
                keys, values = (F.pad(x, (0, 0, 0, 0, 0, padding)).transpose(0, 1)[None] for x in fresh)
                self._extend_one(q[start:end], keys, values, layer, num_all, spans, out[start:end])
            else:
                num_keys, row = num_keys_for(num_all), batch.rows[index : index + 1]
                both = self._layout.gather(layer, self._wanted(batch, row, num_keys), 1, num_keys)
                keys, values = (x.to(q.dtype) for x in both)
                self._extend_one(q[start:end], keys, values, layer, num_all, spans, out[start:end])
            start = end

    def forward_extend_latent(
        self, q: Tensor, heads: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> bool:
        """Serves long chunks, which round otherwise than short ones."""
        return not self.batch_invariant and extend_by_heads(q, heads, layer, batch, self.kv_pool, out)

    def _extend_blocks(
        self,
        q: Tensor,
        index: int,
        layer: AttentionLayer,
        batch: ForwardBatch,
        spans: Tensor | None,
        out: Tensor,
    ) -> None:
        """Attend the chunk of request `index`, `[n, Hq, D]`, by blocks of places."""
        num_all = batch.seq_lens_cpu[index]
        num_keys = self._num_keys(num_all)
        keys, values = self._layout.gather(
            layer, self._wanted(batch, batch.rows[index : index + 1], num_keys), 1, num_keys
        )
        first = num_all - len(q)
        blocks, starts = torch_invariant.chunk_blocks(widened(q, keys.shape[-1]), first)
        lens = torch.tensor([num_all], device=self.device)
        reach = bounds(layer)

        def seen(queries: Tensor, places: Tensor) -> Tensor:
            if spans is None:
                return within(queries, places, reach)
            at = queries - first
            own = spans[at.clamp(0, len(spans) - 1)[..., 0]]
            return within(queries, places, reach, own.where((at >= 0) & (at < len(spans)), 0))

        attended = torch_invariant.attend_blocks(
            blocks, starts, keys, values, lens, layer, seen, looks_ahead=spans is not None
        ).flatten(0, 1)
        before = first - first // torch_invariant.QUERIES * torch_invariant.QUERIES
        out.copy_(attended[before : before + len(q), :, : layer.v_dim])

    def _takes_blocks(self, q: Tensor, num_new: int, layer: AttentionLayer) -> bool:
        """Whether a chunk is computed by `torch_blocks`."""
        fits = layer.causal and num_new >= torch_blocks.SHORTEST and q.dtype == torch.bfloat16
        return fits and is_on_host(q.device) and torch_blocks.is_faster()

    def _extend_by_blocks(
        self,
        q: Tensor,
        fresh: tuple[Tensor, Tensor] | None,
        index: int,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: Tensor,
    ) -> None:
        """Attend the chunk of request `index`, `[n, Hq, D]`, over what is `fresh` or over pages, read in blocks."""
        num_all, size = batch.seq_lens_cpu[index], self.kv_pool.page_size
        block = max(1, torch_blocks.KEYS // size) * size
        table = batch.page_table[batch.rows[index]]

        def read(at: int, end: int) -> tuple[Tensor, Tensor]:
            if fresh is None:
                pages = self._layout.wanted(table[None, at // size : -(-end // size)].long())
                keys, values = (x[0] for x in self._layout.gather(layer, pages, 1, end - at))
            else:
                keys, values = (x[at:end].transpose(0, 1) for x in fresh)
            return keys[..., : q.shape[2]], values[..., : layer.v_dim]

        first, reach = num_all - len(q), bounds(layer)
        torch_blocks.attend_chunk(
            q, first, read, block, layer, lambda queries, places: within(queries, places, reach),
            lambda query: reach_start(query, reach), out,
        )  # fmt: skip

    def _extend_one(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: AttentionLayer,
        num_all: int,
        spans: Tensor | None,
        out: Tensor,
    ) -> None:
        """Attend one chunk `[n, Hq, D]` over `[1, Hk, L, D]`.

        A long causal one is cut, not within an image: its first queries do not see the last keys, those of a window not
        the first ones, and a mask is of one piece only.
        """
        reach, num_new = bounds(layer), q.shape[0]
        is_whole = num_new == num_all and reach == UNBOUNDED and is_plain(layer) and spans is None
        if not layer.causal or is_whole or num_new <= PIECE:
            self._extend_piece(q, keys, values, layer, num_all, 0, spans, out)
            return
        at, before = 0, num_all - num_new
        while at < num_new:
            end = min(at + PIECE, num_new)
            start, own = reach_start(before + at, reach), None
            if spans is not None:
                end, start = int(spans[end - 1, 1]) - before, min(start, int(spans[at, 0]))
                own = spans[at:end]
            start, past = start // BLOCK * BLOCK, before + end
            seen = slice(start, num_keys_for(past))
            self._extend_piece(q[at:end], keys[:, :, seen], values[:, :, seen], layer, past, start, own, out[at:end])
            at = end

    def _extend_piece(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: AttentionLayer,
        num_all: int,
        start: int,
        spans: Tensor | None,
        out: Tensor,
    ) -> None:
        """Attend the last queries of `num_all` places, `[n, Hq, D]`, over keys `[1, Hk, L, D]` from `start` on."""
        num_new, num_keys, d = q.shape[0], keys.shape[2], keys.shape[3]
        q = widened(q, d)
        queries = q.transpose(0, 1)[None]
        reach = bounds(layer)
        plain_causal = num_new == num_all and reach == UNBOUNDED and is_plain(layer) and num_new > 1 and spans is None
        mask: Tensor | None = None
        if not layer.causal:
            mask, plain_causal = self._whole_mask(num_all, num_keys, reach, q.dtype), False
        elif not plain_causal:
            mask = self._extend_mask(num_new, num_all, num_keys, start, reach, spans, q.dtype)
        if not is_plain(layer):
            attended = attend_written_out(queries, keys, values, mask, layer)
        elif num_new == 1:
            rows = q.view(1, layer.num_kv_heads, -1, d)
            attended = attend_rows(rows, keys, values, mask, layer.scale).reshape(1, -1, 1, d)
        else:
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=plain_causal, scale=layer.scale, enable_gqa=True
            )
        out.copy_(attended[0].transpose(0, 1)[..., : layer.v_dim])

    def _decode_mask(self, reach: Bounds, dtype: torch.dtype, group: DecodeGroup) -> Tensor | None:
        """Additive mask `[n, 1, 1, L]`, the same for all layers that see as far; None if every key is seen."""
        if reach not in group.bias:
            seen = self._seen(group.lens[:, None] - 1, group.num_keys, reach)
            bias = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, float("-inf"))
            group.bias[reach] = None if reach == UNBOUNDED and group.is_even else bias[:, None, None]
        return group.bias[reach]

    def _extend_mask(
        self,
        num_new: int,
        num_all: int,
        num_keys: int,
        start: int,
        reach: Bounds,
        spans: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Additive mask `[num_new, L]` of keys from `start` on: causal, within window and chunk, or of one's image."""
        queries = torch.arange(num_all - num_new, num_all, device=self.device)[:, None]
        seen = within(queries, torch.arange(start, start + num_keys, device=self.device), reach, spans)
        return torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, float("-inf"))

    def _whole_mask(self, num: int, num_keys: int, reach: Bounds, dtype: torch.dtype) -> Tensor:
        """Additive mask `[num, L]` of a prompt whose tokens see what is behind them, too; within the window."""
        key = num, num_keys, reach
        if key not in self._whole:
            places = torch.arange(num_keys, device=self.device)
            seen = (places < num).expand(num, -1)
            if (window := reach[0]) is not None:
                seen = seen & ((places - places[:num, None]).abs() < window)
            self._whole[key] = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, -torch.inf)
        return self._whole[key]

    def _seen(self, queries: Tensor, num_keys: int, reach: Bounds) -> Tensor:
        """Which of the keys queries at places `[n, 1]` see, `[n, L]`."""
        return within(queries, torch.arange(num_keys, device=self.device), reach)


def spans_of(batch: ForwardBatch) -> dict[int, Tensor]:
    """Return the rows of `ForwardBatch.spans` by request, `[n, 2]`, of chunks that have images."""
    if batch.spans is None:
        return {}
    each = torch.split(batch.spans, batch.q_lens_cpu)
    return {index: own for index, own in enumerate(each) if bool((own[:, 1] - own[:, 0] > 1).any())}


def within(queries: Tensor, places: Tensor, reach: Bounds, spans: Tensor | None = None) -> Tensor:
    """Which of the keys at `places` `[L]` queries at places `[…, n, 1]` see, `[…, n, L]`.

    With `spans` `[…, n, 2]` also those of each query's own image.
    """
    window, chunk = reach
    seen = places <= queries
    if window is not None:
        seen &= places > queries - window
    if chunk is not None:
        seen &= places >= queries - queries % chunk
    if spans is not None:
        seen |= (places >= spans[..., :1]) & (places < spans[..., 1:])
    return seen


def reach_start(query: int, reach: Bounds) -> int:
    """Return the first place that a query and those behind it see."""
    window, chunk = reach
    by_window = 0 if window is None else query - window + 1
    by_chunk = 0 if chunk is None else query - query % chunk
    return max(0, by_window, by_chunk)


def bounds(layer: AttentionLayer) -> Bounds:
    """Return how far back the queries of a layer see."""
    return layer.sliding_window, layer.chunk_size


def num_keys_for(num: int) -> int:
    """Return how many keys a block of `num` is padded to, so that padding it further changes no bit of the result.

    torch's attention on CPU takes 512 keys at a time, and its products sum up to 256 of them in one go. With a block of
    any other length what is left over is summed in another order.
    """
    step = SMALL_STEP if num <= SMALL_KEYS else SMALL_KEYS
    return -(-num // step) * step


def attend_rows(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend one token per request; its G query heads stand as rows over one KV head.

    A lone row would be computed by another kernel, which rounds differently: it is computed twice.

    Args:
        q: `[n, Hk, G, D]`.
        keys: `[n, Hk, L, D]`.
        values: `[n, Hk, L, D]`.
        mask: Added to the scores; None for none.
        scale: Of the scores.
    """
    group = q.shape[2]
    rows = q.repeat(1, 1, 2, 1) if group == 1 else q
    return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)[:, :, :group]


def similar_lengths(lens: list[int]) -> list[list[int]]:
    """Split rows into at most `MAX_GROUPS` groups of similar length, so that padding costs little.

    Returns:
        Indices into `lens`; one group in the given order if all are similar.
    """
    order = sorted(range(len(lens)), key=lambda i: -lens[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and (lens[i] >= SIMILAR * lens[groups[-1][0]] or len(groups) == MAX_GROUPS):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups if len(groups) != 1 else [list(range(len(lens)))]


def is_plain(layer: AttentionLayer) -> bool:
    """Whether torch's own attention computes this layer."""
    return layer.sinks is None and layer.soft_cap is None


def attend_written_out(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, layer: AttentionLayer) -> Tensor:
    """Attention with what torch's own has not: capped scores, and one more, valueless key of each query head.

    Args:
        q: `[B, Hq, T, D]`.
        keys: `[B, Hk, L, D]`.
        values: `[B, Hk, L, D]`.
        mask: Added to the scores; None for none.
        layer: Scale, soft cap and sinks.

    Source: Gemma 2, arXiv:2408.00118; gpt-oss model card, arXiv:2508.10925.
    """
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = (q.float() @ keys.transpose(-1, -2)) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if mask is not None:
        scores = scores + mask
    if layer.sinks is None:
        return (scores.softmax(-1) @ values).to(q.dtype)
    extra = layer.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, extra), dim=-1).softmax(-1)[..., :-1]
    return (weights @ values).to(q.dtype)
