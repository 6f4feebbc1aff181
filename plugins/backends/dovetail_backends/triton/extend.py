"""Paged prefill attention: each request's new tokens over its cached prefix and themselves.

After FlashAttention-2, arXiv:2307.08691. Grid (tile of query rows, KV head, request). A tile's rows are pairs of token
and query head of one group, so that a key block is read once for the whole group. Keys and values, also the new ones,
come from the pool.

T tokens, Hq and Hk query and KV heads, G = Hq / Hk, D head dim, P page size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.attention import AttentionLayer, ForwardBatch
from dovetail.layers.ops.pdl import launch_options

LOG2E = 1.4426950408889634


@triton.jit
def _extend_kernel(
    q, kv, page_table, rows, seq_lens, q_starts, sinks, out,
    scale, first_request, first_token,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_table, stride_page, stride_half, stride_token, stride_head,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, head = tl.program_id(0), tl.program_id(1)
    request = tl.program_id(2) + first_request
    start, end = tl.load(q_starts + request), tl.load(q_starts + request + 1)
    num_new = end - start
    if tile * BLOCK_M >= num_new * G:
        return
    length = tl.load(seq_lens + request).to(tl.int32)
    table = page_table + tl.load(rows + request) * stride_table
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    row = tile * BLOCK_M + m
    token, heads = row // G, head * G + row % G
    live = token < num_new
    place = length - num_new + token
    q_at = (start - first_token + token).to(tl.int64)
    mask = live[:, None] & (d < D)[None, :]
    queries = tl.load(q + q_at[:, None] * stride_qt + heads[:, None] * stride_qh + d[None, :], mask=mask, other=0.0)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    lowest = length - num_new + tile * BLOCK_M // G
    highest = tl.minimum(length - num_new + (tile * BLOCK_M + BLOCK_M - 1) // G, length - 1)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    for at in range(first, highest + 1, BLOCK_N):
        places = at + n
        inside = places < length
        pages = tl.load(table + places // P, mask=inside, other=0).to(tl.int64)
        base = kv + pages * stride_page + (places % P) * stride_token + head * stride_head
        load = inside[:, None] & (d < D)[None, :]
        keys = tl.load(base[:, None] + d[None, :], mask=load, other=0.0)
        seen = inside[None, :] & (places[None, :] <= place[:, None])
        if WINDOW > 0:
            seen &= places[None, :] > place[:, None] - WINDOW
        scores = tl.where(seen, tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet keeps -inf: subtract 0 there, or exp2(-inf + inf) is NaN.
        shift = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(best - shift)
        values = tl.load(base[:, None] + stride_half + d[None, :], mask=load, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        best = new
    if SINKS:
        sink = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        final = tl.maximum(best, sink)
        shrink = tl.exp2(best - final)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(sink - final)
    total = tl.where(live, total, 1.0)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + q_at[:, None] * stride_ot + heads[:, None] * stride_oh + d[None, :], result, mask=mask)


def extend(q: Tensor, kv: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor, longest: int) -> None:
    """Attend the prefill chunks of a batch.

    Args:
        q: `[T', Hq, D]`, the tokens after the decode rows, heads contiguous in D.
        kv: `[N, 2, P, Hk, D]`, this layer of the pool; the new tokens are already in it.
        layer: The layer's facts.
        batch: The whole batch; requests `num_decode …` are attended.
        out: `[T', Hq, D]`, written in full.
        longest: Most new tokens of one request; an upper bound will do.
    """
    d, hk = q.shape[2], layer.num_kv_heads
    group = q.shape[1] // hk
    num = batch.num_requests - batch.num_decode
    block_m = 64 if longest * group > 16 else 16
    block_d = max(16, triton.next_power_of_2(d))
    grid = (triton.cdiv(longest * group, block_m), hk, num)
    _extend_kernel[grid](
        q, kv, batch.page_table, batch.rows, batch.seq_lens, batch.q_starts,
        layer.sinks if layer.sinks is not None else q, out,
        layer.scale * LOG2E, batch.num_decode, batch.num_decode,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), batch.page_table.stride(0),
        kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        G=group, D=d, BLOCK_D=block_d, P=kv.shape[2], BLOCK_M=block_m, BLOCK_N=64 if d <= 128 else 32,
        WINDOW=layer.sliding_window or 0, SINKS=layer.sinks is not None, num_warps=4, num_stages=2,
        **launch_options(q),
    )  # fmt: skip
