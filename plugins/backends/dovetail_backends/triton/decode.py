"""Paged decode attention with grouped heads, split over the keys (FlashDecoding, arXiv:2311.01282).

Grid (request, KV head, split). A program takes tiles `split, split + NUM_SPLITS, …` of its request, so that a short
request spreads over splits too and one graph serves every length; a second kernel adds the splits up in fixed order.
The group's query heads fill the 16 rows that a matrix instruction needs. All lengths are read on the device.

B requests, Hq and Hk query and KV heads, G = Hq / Hk, D head dim, P page size, S device rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.attention import AttentionLayer, ForwardBatch
from dovetail.layers.ops.pdl import launch_options

LOG2E = 1.4426950408889634


@triton.jit
def _split_kernel(
    q, kv, page_table, rows, seq_lens, part, part_max, part_sum,
    scale, stride_qb, stride_qh, stride_table, stride_page, stride_half, stride_token, stride_head,
    HQ: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    P: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + b).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    first_tile = first // BLOCK_N
    num_tiles = (length + BLOCK_N - 1) // BLOCK_N - first_tile
    if split >= num_tiles:
        return
    table = page_table + tl.load(rows + b) * stride_table
    g, d, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    heads = head * G + g
    q_mask = (g < G)[:, None] & (d < D)[None, :]
    queries = tl.load(q + b.to(tl.int64) * stride_qb + heads[:, None] * stride_qh + d[None, :], mask=q_mask, other=0.0)
    best = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for tile in range(first_tile + split, first_tile + num_tiles, NUM_SPLITS):
        places = tile * BLOCK_N + n
        inside = (places < length) & (places >= first)
        pages = tl.load(table + places // P, mask=inside, other=0).to(tl.int64)
        base = kv + pages * stride_page + (places % P) * stride_token + head * stride_head
        load = inside[:, None] & (d < D)[None, :]
        keys = tl.load(base[:, None] + d[None, :], mask=load, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(best - new)
        values = tl.load(base[:, None] + stride_half + d[None, :], mask=load, other=0.0)
        out = out * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        best = new
    at = (b * HQ + heads) * NUM_SPLITS + split
    tl.store(part + at.to(tl.int64)[:, None] * D + d[None, :], out, mask=q_mask)
    tl.store(part_max + at, best, mask=g < G)
    tl.store(part_sum + at, total, mask=g < G)


@triton.jit
def _merge_kernel(
    part, part_max, part_sum, seq_lens, sinks, out, stride_ob, stride_oh,
    HQ: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(seq_lens + b).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    num = tl.minimum((length + BLOCK_N - 1) // BLOCK_N - first // BLOCK_N, NUM_SPLITS)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    at = (b * HQ + head) * NUM_SPLITS + s
    maxima = tl.load(part_max + at, mask=s < num, other=float("-inf"))
    best = tl.max(maxima, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        best = tl.maximum(best, sink)
    shares = tl.exp2(maxima - best)
    total = tl.sum(shares * tl.load(part_sum + at, mask=s < num, other=0.0), 0)
    if SINKS:
        total += tl.exp2(sink - best)
    mask = (s < num)[:, None] & (d < D)[None, :]
    parts = tl.load(part + at.to(tl.int64)[:, None] * D + d[None, :], mask=mask, other=0.0)
    merged = tl.sum(parts * shares[:, None], 0) / total
    tl.store(out + b.to(tl.int64) * stride_ob + head * stride_oh + d, merged.to(out.dtype.element_ty), mask=d < D)


class DecodeScratch:
    """Partial results of the splits, allocated once for the largest batch. The number of splits falls as B grows."""

    def __init__(self, num_qo_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
        self._heads, self._kv_heads, self._dim, self._device = num_qo_heads, num_kv_heads, head_dim, device
        self._buffers: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def num_splits(self, batch: int) -> int:
        """Splits per request and KV head: enough programs to fill a large GPU about four times, 64 at most."""
        return max(1, min(64, triton.next_power_of_2(max(1, 512 // (batch * self._kv_heads)))))

    def get(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return partial outputs `[B, Hq, splits, D]`, maxima and sums `[B, Hq, splits]`, float32."""
        key = (batch, self.num_splits(batch))
        if key not in self._buffers:
            shape = (batch, self._heads, key[1])
            self._buffers[key] = (
                torch.empty(*shape, self._dim, dtype=torch.float32, device=self._device),
                torch.empty(shape, dtype=torch.float32, device=self._device),
                torch.empty(shape, dtype=torch.float32, device=self._device),
            )
        return self._buffers[key]


def decode(
    q: Tensor, kv: Tensor, layer: AttentionLayer, batch: ForwardBatch, scratch: DecodeScratch, out: Tensor
) -> None:
    """Attend one token per request.

    Args:
        q: `[B, Hq, D]`, heads contiguous in D.
        kv: `[N, 2, P, Hk, D]`, this layer of the pool; the new token is already in it.
        layer: The layer's facts.
        batch: Lengths and page table of the first B requests.
        scratch: Buffers for the splits.
        out: `[B, Hq, D]`, written in full.
    """
    num, hq, d = q.shape
    group = hq // layer.num_kv_heads
    part, part_max, part_sum = scratch.get(num)
    splits = scratch.num_splits(num)
    block_d, block_n = max(16, triton.next_power_of_2(d)), 64 if d <= 128 else 32
    window = layer.sliding_window or 0
    _split_kernel[(num, layer.num_kv_heads, splits)](
        q, kv, batch.page_table, batch.rows, batch.seq_lens, part, part_max, part_sum,
        layer.scale * LOG2E, q.stride(0), q.stride(1), batch.page_table.stride(0),
        kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        HQ=hq, G=group, BLOCK_G=max(16, triton.next_power_of_2(group)), D=d, BLOCK_D=block_d,
        P=kv.shape[2], BLOCK_N=block_n, NUM_SPLITS=splits, WINDOW=window, num_warps=4, num_stages=2,
        **launch_options(q),
    )  # fmt: skip
    _merge_kernel[(num, hq)](
        part, part_max, part_sum, batch.seq_lens, layer.sinks if layer.sinks is not None else part_max, out,
        out.stride(0), out.stride(1),
        HQ=hq, D=d, BLOCK_D=block_d, BLOCK_N=block_n, NUM_SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits),
        WINDOW=window, SINKS=layer.sinks is not None, num_warps=2, **launch_options(q),
    )  # fmt: skip
