"""Paged prefill attention: each request's new tokens over its cached prefix and themselves.

After FlashAttention-2, arXiv:2307.08691. Grid (tile of query rows, KV head). A tile's rows are pairs of token and query
head of one group, so that a key block is read once for the whole group. Keys and values, also the new ones, come from
the pool, or from a copy of what a long prompt sees of it, without pages (`contiguous`): P is 0 then.

The tiles of all requests are numbered through: request r, whose new tokens begin at s, has the numbers from
`s G // BLOCK_M + r` on. So many are always enough for it, whatever the lengths are; a few remain idle. A program finds
its request by looking at all starts at once. Nothing here depends on lengths that the host knows, so that one graph
serves all ways to divide its tokens among requests.

T tokens, Hq and Hk query and KV heads, G = Hq / Hk, D and Dv widths of keys and values, P page size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.attention import AttentionLayer, ForwardBatch
from dovetail_backends.kernels.triton.launch import shared_bytes
from dovetail_backends.kernels.triton.pdl import launch_options
from dovetail_backends.triton.contiguous import Contiguous, copies, is_worth_it
from dovetail_backends.triton.eight_bits import by_unit, unpacked
from dovetail_backends.triton.kv import Pair, Scales, block_of_width, scale_arguments
from dovetail_backends.triton.tiles import capped, load_heads, load_whole, of_values, with_sinks

LOG2E = 1.4426950408889634


@triton.jit
def _attend_tile(
    queries, k, v, table, at, head, length, place, low, high, best, total, acc, scale, k_scale, v_scale,
    stride_page, stride_token, stride_head, stride_scale_page, stride_scale_token,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, P: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr, IMAGES: tl.constexpr, MASKED: tl.constexpr,
    CAP: tl.constexpr, SCALED: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Attend the keys `at … at + BLOCK_N - 1`; without MASKED, every row of the tile sees all of them.

    `table` is the request's row of the page table; without pages, where its first key stands. With IMAGES, a row sees
    the places `low … high - 1`, too.
    """
    places = at + tl.arange(0, BLOCK_N)
    inside = places < length
    if P == 0:
        pages, offsets = tl.zeros([BLOCK_N], tl.int64), table + places
    elif MASKED:
        pages, offsets = tl.load(table + places // P, mask=inside, other=0).to(tl.int64), places % P
    else:
        pages, offsets = tl.load(table + places // P).to(tl.int64), places % P
    if MASKED:
        keys = load_heads(k, pages, offsets, head, stride_page, stride_token, stride_head, inside, D, BLOCK_D)
    else:
        keys = load_whole(k, pages, offsets, head, stride_page, stride_token, stride_head, D, BLOCK_D)
    if SCALED:
        scale_at = pages * stride_scale_page + offsets * stride_scale_token + head
        keys = unpacked(keys, queries.dtype, E4M3)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if SCALED:
        scores *= by_unit(tl.load(k_scale + scale_at, mask=inside, other=0.0), E4M3)[None, :]
    if CAP > 0:
        scores = capped(scores * scale, CAP)
        scale = 1.0
    if MASKED:
        seen = inside[None, :] & (places[None, :] <= place[:, None])
        if WINDOW > 0:
            seen &= places[None, :] > place[:, None] - WINDOW
        if SPAN > 0:
            seen &= places[None, :] >= (place // SPAN * SPAN)[:, None]
        if IMAGES:
            seen |= (places[None, :] >= low[:, None]) & (places[None, :] < high[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(best, tl.max(scores, 1) * scale)
    shift = new
    if MASKED:
        # A row that has seen nothing yet keeps -inf: subtract 0 there, or exp2(-inf + inf) is NaN.
        shift = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores * scale - shift[:, None])
    shrink = tl.exp2(best - shift)
    page_of_v, token_of_v = of_values(stride_page, D, DV), of_values(stride_token, D, DV)
    head_of_v = of_values(stride_head, D, DV)
    if MASKED:
        values = load_heads(v, pages, offsets, head, page_of_v, token_of_v, head_of_v, inside, DV, BLOCK_V)
    else:
        values = load_whole(v, pages, offsets, head, page_of_v, token_of_v, head_of_v, DV, BLOCK_V)
    total = total * shrink + tl.sum(weights, 1)
    if SCALED:
        values = unpacked(values, queries.dtype, E4M3)
        weights *= by_unit(tl.load(v_scale + scale_at, mask=inside, other=0.0), E4M3)[None, :]
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new, total, acc


@triton.jit(do_not_specialize=["first_request", "first_token", "num", "first_head"])
def _extend_kernel(
    q, k, v, page_table, rows, seq_lens, q_starts, key_starts, spans, sinks, out, k_scale, v_scale,
    scale, first_request, first_token, num, first_head,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_table, stride_page, stride_token, stride_head,
    stride_scale_page, stride_scale_token,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
    SPAN: tl.constexpr, IMAGES: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr, SCALED: tl.constexpr,
    E4M3: tl.constexpr, FIXED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    number, head = tl.program_id(0), tl.program_id(1)
    r = tl.arange(0, BLOCK_R)
    starts = tl.load(q_starts + first_request + r, mask=r < num, other=0) - first_token
    begun = (r < num) & (starts * G // BLOCK_M + r <= number)
    request = first_request + tl.sum(begun.to(tl.int32), 0) - 1
    start, end = tl.load(q_starts + request), tl.load(q_starts + request + 1)
    num_new = end - start
    # Later tiles see more keys: they go first, so that the short ones fill the gaps at the end.
    before = (start - first_token) * G // BLOCK_M + request - first_request
    tile = (num_new * G + BLOCK_M - 1) // BLOCK_M - 1 - (number - before)
    if tile < 0:
        return
    length = tl.load(seq_lens + request).to(tl.int32)
    if P == 0:
        table = tl.load(key_starts + request - first_request).to(tl.int32)
    else:
        table = page_table + tl.load(rows + request) * stride_table
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row = tile * BLOCK_M + m
    token, heads = row // G, (first_head + head) * G + row % G
    live = token < num_new
    place = length - num_new + token
    q_at = (start - first_token + token).to(tl.int64)
    mask = live[:, None] & (d < D)[None, :]
    queries = tl.load(q + q_at[:, None] * stride_qt + heads[:, None] * stride_qh + d[None, :], mask=mask, other=0.0)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    lowest = length - num_new + tile * BLOCK_M // G
    highest = tl.minimum(length - num_new + (tile * BLOCK_M + BLOCK_M - 1) // G, length - 1)
    low, high = place, place
    if IMAGES:
        low = tl.load(spans + (start + token) * 2, mask=live, other=length).to(tl.int32)
        high = tl.load(spans + (start + token) * 2 + 1, mask=live, other=0).to(tl.int32)
        highest = tl.maximum(highest, tl.max(high, 0) - 1)
    first = 0
    seen_by_all = (lowest + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        first = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        if IMAGES:
            first = tl.minimum(first, tl.min(low, 0) // BLOCK_N * BLOCK_N)
        seen_by_all = first
    if SPAN > 0:
        first = lowest // SPAN * SPAN // BLOCK_N * BLOCK_N
        seen_by_all = first
    if FIXED:  # every tile of keys by the same instructions, whichever rows are in the tile of queries
        seen_by_all = first
    for at in tl.range(first, seen_by_all, BLOCK_N, num_stages=STAGES):
        best, total, acc = _attend_tile(
            queries, k, v, table, at, head, length, place, low, high, best, total, acc, scale, k_scale, v_scale,
            stride_page, stride_token, stride_head, stride_scale_page, stride_scale_token,
            D, BLOCK_D, DV, BLOCK_V, P, BLOCK_N, WINDOW, SPAN, IMAGES, False, CAP, SCALED, E4M3,
        )  # fmt: skip
    for at in tl.range(seen_by_all, highest + 1, BLOCK_N, num_stages=STAGES):
        best, total, acc = _attend_tile(
            queries, k, v, table, at, head, length, place, low, high, best, total, acc, scale, k_scale, v_scale,
            stride_page, stride_token, stride_head, stride_scale_page, stride_scale_token,
            D, BLOCK_D, DV, BLOCK_V, P, BLOCK_N, WINDOW, SPAN, IMAGES, True, CAP, SCALED, E4M3,
        )  # fmt: skip
    if SINKS:
        total, acc = with_sinks(sinks, heads, live, best, total, acc)
    total = tl.where(live, total, 1.0)
    result, e = (acc / total[:, None]).to(out.dtype.element_ty), tl.arange(0, BLOCK_V)
    written = live[:, None] & (e < DV)[None, :]
    tl.store(out + q_at[:, None] * stride_ot + heads[:, None] * stride_oh + e[None, :], result, mask=written)


Tile = tuple[int, int, int, int]
"""BLOCK_M, BLOCK_N, warps, stages."""


def choose_tile(
    rows: int, dim: int, dtype: torch.dtype, shared: int, *, is_scaled: bool = False, has_two_widths: bool = False,
    is_paged: bool = True,
) -> Tile:  # fmt: skip
    """Tile for `rows` pairs of token and head in the longest chunk, measured on an H200 with Triton 3.6.

    Above a width of 256 it is what compiles for compute capability 9.0 without spilling.

    Args:
        rows: Pairs.
        dim: Width of keys or of values, whichever is more.
        dtype: Of queries.
        shared: Bytes of shared memory; a tile that does not fit gives way to a small one.
        is_scaled: Keys and values have 8 bits.
        has_two_widths: Keys are loaded in other blocks than values. In 8 bits, 64 queries by 64 keys with four warps
            then read other pages than the table names (keys 64, values 32 or 16 wide); 32 keys do not.
        is_paged: Keys are looked up in pages. Without, 64 keys are as fast as 128 where heads are 128 wide, and faster
            where they are narrower.
    """
    if dim > 256:
        if dtype.itemsize > 2:
            return 16, 16, 16, 1
        return 16 if rows <= 16 else 32, 16 if is_scaled else 32, 8, 2
    if rows <= 16:
        return 16, 64 if dim <= 128 else 32, 4, 2
    if dtype.itemsize > 2 or dim > 128 or (is_scaled and has_two_widths):
        return 64, 32, 4, 2
    if rows > 1024:
        block_m, block_n, warps, stages = (128, 64, 8, 3) if dim <= 64 or not is_paged else (128, 128, 8, 3)
        if (block_m + 2 * stages * block_n) * triton.next_power_of_2(dim) * dtype.itemsize <= shared:
            return block_m, block_n, warps, stages
    return 64, 64, 4, 2


FIXED_ROWS = 64
"""Longest chunk for which the tile is chosen where it must not depend on the chunks."""


def block_of(num: int) -> int:
    """How many starts a program looks at. Hardly any variants: each is compiled, and looking costs next to nothing."""
    return 1 if num == 1 else max(1024, triton.next_power_of_2(num))


def extend(
    q: Tensor,
    kv: Pair,
    layer: AttentionLayer,
    batch: ForwardBatch,
    out: Tensor,
    longest: int,
    tile: Tile | None = None,
    scales: Scales | None = None,
    *,
    requests: tuple[int, int] | None = None,
    is_fixed: bool = False,
) -> None:
    """Attend the prefill chunks of a batch.

    Args:
        q: `[T', Hq, D]`, the tokens after the decode rows, heads contiguous in D.
        kv: This layer of the pool; the new tokens are already in it.
        layer: The layer's facts; its scale is positive.
        batch: The whole batch; requests `num_decode …` are attended.
        out: `[T', Hq, Dv]`, written in full.
        longest: Most new tokens of one request, by which the tile is chosen; an upper bound will do.
        tile: From `choose_tile` if not given.
        scales: Of the numbers of a pool in 8 bits.
        requests: The first that is attended, and the one behind the last; `q` and `out` are of their tokens. From
            `num_decode` on if not given.
        is_fixed: With one tile for all calls, a token has the same bits in any chunk, and as a decode row. Tiles that a
            query does not see add nothing, exactly.
    """
    if requests is None and scales is None and not is_fixed and is_worth_it(layer, batch, longest, q.dtype):
        for copy in copies(kv, layer, batch):
            _launch(q, kv, layer, batch, out, longest, tile, None, copy=copy)
    else:
        _launch(q, kv, layer, batch, out, longest, tile, scales, requests=requests, is_fixed=is_fixed)


def _launch(
    q: Tensor,
    kv: Pair,
    layer: AttentionLayer,
    batch: ForwardBatch,
    out: Tensor,
    longest: int,
    tile: Tile | None,
    scales: Scales | None,
    *,
    requests: tuple[int, int] | None = None,
    is_fixed: bool = False,
    copy: Contiguous | None = None,
) -> None:
    """Launch the kernel for all heads, or for those of a copy."""
    first, stop = requests or (batch.num_decode, batch.num_requests)
    d, dv, (k, v) = layer.qk_dim, layer.v_dim, copy.kv if copy is not None else kv
    scale_tensors, scale_strides, kinds = scale_arguments(scales, q)
    group = q.shape[1] // layer.num_kv_heads
    num = stop - first
    has_images = layer.spans and batch.spans is not None
    block_d, block_v = block_of_width(d), block_of_width(dv)
    block_m, block_n, warps, stages = tile or choose_tile(
        longest * group, max(d, dv), q.dtype, shared_bytes(q.device),
        is_scaled=scales is not None, has_two_widths=block_d != block_v, is_paged=copy is None,
    )  # fmt: skip
    if copy is not None:
        num_heads, first_head, starts, page_size = len(k), copy.first_head, copy.starts, 0
        strides = 0, k.stride(1), k.stride(0)
    else:
        num_heads, first_head, starts, page_size = layer.num_kv_heads, 0, batch.seq_lens, k.shape[1]
        strides = k.stride(0), k.stride(1), k.stride(2)
    _extend_kernel[(triton.cdiv(q.shape[0] * group, block_m) + num, num_heads)](
        q, k, v, batch.page_table, batch.rows, batch.seq_lens, batch.q_starts, starts,
        batch.spans if has_images else q,
        layer.sinks if layer.sinks is not None else q, out, *scale_tensors,
        layer.scale * LOG2E, first, first, num, first_head,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), batch.page_table.stride(0),
        *strides, *scale_strides, G=group, D=d, BLOCK_D=block_d, DV=dv, BLOCK_V=block_v,
        P=page_size, BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages,
        BLOCK_R=block_of(max(2, num) if is_fixed or copy is not None else num),
        WINDOW=layer.sliding_window or 0,
        SPAN=layer.chunk_size or 0, IMAGES=has_images, SINKS=layer.sinks is not None,
        CAP=(layer.soft_cap or 0.0) * LOG2E,
        FIXED=is_fixed, num_warps=warps, **kinds, **launch_options(q),
    )  # fmt: skip
