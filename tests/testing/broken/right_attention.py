"""Attention backends without a fault, one for each way to serve: the seeded faults are made from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, Phase
from dovetail.contracts.needs import AttentionCaps
from dovetail.sdk.layers.ops import reference
from dovetail_testing.conformance.attention_reference import RIGHT, Mistake, attend


class Right(AttentionBackend):
    """A slow right backend. What it computes for a graph depends on nothing that `plan` has seen."""

    caps = AttentionCaps(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32"}),
        head_dims=frozenset({8, 16}),
        sliding_window=True,
        chunked=True,
        sinks=True,
        soft_cap=True,
        bidirectional=True,
        mixers=frozenset({"kv", "latent"}),
        unequal_dims=True,
        graph="decode",
        batch_invariant=True,
    )
    mistake: Mistake = RIGHT

    def __init__(self, config: Any, kv_pool: Any, device: torch.device) -> None:
        self.kv_pool = kv_pool
        self.lens: list[tuple[int, int]] = []
        self.is_recording = False

    def plan(self, batch: ForwardBatch, phase: Phase) -> None:
        self.is_recording = phase is Phase.CAPTURE
        if batch.seq_lens_cpu:
            self.lens = list(zip(batch.seq_lens_cpu, batch.q_lens_cpu, strict=True))

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, out: Any) -> None:
        if not layer.causal:
            whole = zip(*(x.split(batch.q_lens_cpu) for x in (q, k, v)), strict=True)
            out.copy_(torch.cat([attend(*one, layer, self.mistake) for one in whole]))
        elif self.is_recording:
            self.record(q, layer, batch, out, range(batch.num_decode, batch.num_requests))
        else:
            self.attend(q, layer, batch, out, range(batch.num_decode, batch.num_requests))

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, out: Any) -> None:
        if self.is_recording:
            self.record(q, layer, batch, out, range(batch.num_decode))
        else:
            self.attend(q, layer, batch, out, range(batch.num_decode))

    def record(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor, requests: range) -> None:
        """Every request over all that its page table could hold, masked by what the device says."""
        size, (k, v) = self.kv_pool.page_size, (self.kv_pool.tensor(layer.index, name) for name in "kv")
        first, tokens = requests.start, torch.arange(q.shape[0])
        places = torch.arange(batch.page_table.shape[1] * size)
        out.zero_()
        for number in requests:
            begin, end = (batch.q_starts.narrow(0, number + i, 1) - batch.q_starts.narrow(0, first, 1) for i in (0, 1))
            length = batch.seq_lens.narrow(0, number, 1).long()
            table = batch.page_table.index_select(0, batch.rows.narrow(0, number, 1)).view(-1)
            pages = torch.where(places < length, table[places // size].long(), 0)
            queries = (self.last_place(batch, number, length, end) + tokens)[:, None]
            seen = (places <= queries) & (places < length)
            if layer.sliding_window is not None:
                seen = seen & (places > queries - layer.sliding_window)
            if layer.chunk_size is not None:
                seen = seen & (places >= queries - queries % layer.chunk_size)
            result = scored(q, k[pages, places % size], v[pages, places % size], layer, seen)
            mine = (tokens >= begin) & (tokens < end)
            out.copy_(torch.where(mine[:, None, None], result, out.double()))

    def last_place(self, batch: ForwardBatch, number: int, length: Tensor, end: Tensor) -> Tensor:
        """Place of the batch's first token, counted as if it were the request's."""
        return length - end

    def attend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor, requests: range) -> None:
        start = 0
        for number in requests:
            num_all, new = self.lens[number]
            keys, values = self.gather(layer, batch, number, num_all)
            self.one(q[start : start + new], keys, values, layer, out[start : start + new])
            start += new

    def gather(self, layer: AttentionLayer, batch: ForwardBatch, number: int, num: int) -> tuple[Tensor, Tensor]:
        size, (k, v) = self.kv_pool.page_size, (self.kv_pool.tensor(layer.index, name) for name in "kv")
        places = torch.arange(num)
        table = batch.page_table.index_select(0, batch.rows.narrow(0, number, 1)).view(-1)
        pages = table[places // size].long()
        return k[pages, places % size], v[pages, places % size]

    def one(self, q: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        if self.mistake is RIGHT:
            out.copy_(right(q, keys, values, layer))
        else:
            out.copy_(attend(q, keys, values, layer, self.mistake))


def right(q: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer) -> Tensor:
    """Attention without any value read on the host."""
    num_new, num_all = q.shape[0], keys.shape[0]
    places = torch.arange(num_all)
    queries = places[num_all - num_new :, None]
    seen = places <= queries
    if layer.sliding_window is not None:
        seen = seen & (places > queries - layer.sliding_window)
    if layer.chunk_size is not None:
        seen = seen & (places >= queries - queries % layer.chunk_size)
    return scored(q, keys, values, layer, seen)


def scored(q: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, seen: Tensor) -> Tensor:
    """Attention over the keys that each query sees; `-1e30` in place of infinity, as some rows may see none."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1, output_size=q.shape[1]) for x in (keys, values))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), keys) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    scores = scores.masked_fill(~seen, -1e30)
    if layer.sinks is not None:
        scores = torch.cat((scores, layer.sinks.double()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1)[..., : len(keys)], values)


class Prefilling(Right):
    """Records prefills too."""

    caps = replace(Right.caps, graph="mixed")


class SeesImages(Right):
    """Has tokens of an image see all of it."""

    caps = replace(Right.caps, spans=True, batch_invariant=False)

    def attend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor, requests: range) -> None:
        start, first = 0, int(batch.q_starts[requests.start])
        for number in requests:
            num_all, new = self.lens[number]
            keys, values = self.gather(layer, batch, number, num_all)
            spans = () if batch.spans is None else batch.spans[first + start : first + start + new].tolist()
            own = sorted({(low, end) for low, end in spans if end - low > 1})
            out[start : start + new] = attend(q[start : start + new], keys, values, layer, self.mistake, own)
            start += new


class FromProjection(Right):
    """Serves from the projection by the single steps."""

    rotates, writes = True, True

    def forward_decode_qkv(self, qkv: Any, norm: Any, rope: Any, layer: Any, batch: Any, out: Any) -> bool:
        hq, hk = layer.num_qo_heads, layer.num_kv_heads
        weight, eps = (None, 0.0) if norm is None else norm
        qk = reference.norm_rotate(qkv[:, : hq + hk], weight, eps, *rope) if self.rotates else qkv
        live = batch.kv_slots >= 0
        k, v = qk[:, hq : hq + hk], qkv[:, hq + hk :]
        pages, offsets = batch.kv_slots // self.kv_pool.page_size, batch.kv_slots % self.kv_pool.page_size
        kv = self.kv_pool.layer(layer.index)
        before = kv.clone()
        last = (batch.seq_lens.long() - 1) // self.kv_pool.page_size
        pages = torch.where(live, pages, batch.page_table[batch.rows, last].long())
        offsets = torch.where(live, offsets, (batch.seq_lens.long() - 1) % self.kv_pool.page_size)
        kv[pages, 0, offsets], kv[pages, 1, offsets] = k, v
        self.forward_decode(qk[:, :hq], k, v, layer, batch, out)
        if self.writes:
            kv[pages[~live], :, offsets[~live]] = before[pages[~live], :, offsets[~live]]
        else:
            kv.copy_(before)
        return True


class MakesHeads(Right):
    """Serves chunks of latent layers by keys and values of heads."""

    forgets_rest = False

    def forward_extend_latent(self, q: Any, heads: Any, layer: Any, batch: Any, out: Any) -> bool:
        start, made = 0, heads.shape[1] - out.shape[2]
        for number in range(batch.num_decode, batch.num_requests):
            end = start + batch.q_lens_cpu[number]
            rows = self.gather(layer, batch, number, batch.seq_lens_cpu[number])[0][:, 0]
            both = torch.einsum("lr,hwr->lhw", rows[:, : layer.v_dim], heads)
            rest = rows[:, None, layer.v_dim :].expand(-1, heads.shape[0], -1)
            keys = torch.cat((both[..., :made], rest * (not self.forgets_rest)), dim=-1)
            each = replace(layer, latent=False, num_kv_heads=layer.num_qo_heads, v_dim=out.shape[2])
            out[start:end] = attend(q[start:end], keys, both[..., made:], each, self.mistake)
            start = end
        return True


class LargePages(Right):
    """Its kernels take pages of 32 and 64 tokens, and no others."""

    caps = replace(Right.caps, page_sizes=frozenset({32, 64}))

    def __init__(self, config: Any, kv_pool: Any, device: torch.device) -> None:
        if kv_pool.page_size not in (32, 64):
            raise ValueError(f"pages of {kv_pool.page_size} tokens")
        super().__init__(config, kv_pool, device)


class Sharing(Right):
    """With the hint, a row takes its first `num_common` keys from the row before it: right if they are the same."""

    def num_common(self, batch: ForwardBatch, number: int) -> int:
        table = batch.page_table[batch.rows]
        most = min(self.lens[number][0], self.lens[number - 1][0]) - 1
        pages = -(-most // self.kv_pool.page_size)
        same = (table[number, :pages] == table[number - 1, :pages]).long().cumprod(0).sum()
        return min(most, int(same) * self.kv_pool.page_size)

    def gather(self, layer: AttentionLayer, batch: ForwardBatch, number: int, num: int) -> tuple[Tensor, Tensor]:
        keys, values = super().gather(layer, batch, number, num)
        if not batch.shares_prefixes or not 0 < number < batch.num_decode:
            return keys, values
        common = self.num_common(batch, number)
        first = super().gather(layer, batch, number - 1, common)
        return torch.cat((first[0], keys[common:])), torch.cat((first[1], values[common:]))
