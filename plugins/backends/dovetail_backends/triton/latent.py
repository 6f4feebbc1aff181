"""Attention over latent rows (MLA, arXiv:2405.04434): one row a token is every head's key, its first numbers the value.

Decode is split over the keys as in `decode.py`, prefill cut into tiles as in `extend.py`; here all query heads read the
one row, so 16 of them stand in a tile, and a row is loaded once for scores and values.

B requests, Hq query heads, D width of a row, of which R are the value, P page size.
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
from dovetail_backends.triton.decode import LOG2E, DecodeScratch
from dovetail_backends.triton.eight_bits import by_unit, unpacked
from dovetail_backends.triton.extend import block_of
from dovetail_backends.triton.kv import Scales, scale_arguments
from dovetail_backends.triton.tiles import capped, merged, with_sinks

HEADS = 16
"""Rows that a matrix instruction needs."""


@triton.jit
def _load_rows(
    cache, scales, table, at, first, end, like, stride_page, stride_token, stride_scale_page, stride_scale_token,
    R: tl.constexpr, REST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, P: tl.constexpr,
    BLOCK_N: tl.constexpr, SCALED: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Rows of the tokens `at …` in `first … end - 1`: value `[BLOCK_N, BLOCK_R]`, the rest, and scales."""
    places = at + tl.arange(0, BLOCK_N)
    inside = (places < end) & (places >= first)
    pages = tl.load(table + places // P, mask=inside, other=0).to(tl.int64)
    base = (cache + pages * stride_page + (places % P) * stride_token)[:, None]
    r, e = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_E)[None, :]
    values = tl.load(base + r, mask=inside[:, None] & (r < R), other=0.0)
    rest = tl.load(base + R + e, mask=inside[:, None] & (e < REST), other=0.0)
    if SCALED:
        scale = tl.load(scales + pages * stride_scale_page + (places % P) * stride_scale_token, mask=inside, other=0.0)
        row_scales = by_unit(scale, E4M3)
        values, rest = unpacked(values, like.dtype, E4M3), unpacked(rest, like.dtype, E4M3)
    else:
        row_scales = tl.full([BLOCK_N], 1.0, tl.float32)
    return values, rest, row_scales


@triton.jit
def _attend_rows(
    queries, rest_queries, values, rest, row_scales, seen, best, total, acc, scale,
    CAP: tl.constexpr, REST: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Attend one tile of rows; a query that has seen nothing yet keeps -inf."""
    scores = tl.dot(queries, tl.trans(values), input_precision="ieee")
    if REST > 0:
        scores = tl.dot(rest_queries, tl.trans(rest), scores, input_precision="ieee")
    scores *= scale
    if SCALED:
        scores *= row_scales[None, :]
    if CAP > 0:
        scores = capped(scores, CAP)
    scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(best, tl.max(scores, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    shares = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(best - shift)
    total = total * shrink + tl.sum(shares, 1)
    if SCALED:
        shares *= row_scales[None, :]
    acc = tl.dot(shares.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new, total, acc


@triton.jit
def _decode_kernel(
    q, cache, page_table, rows, seq_lens, sinks, part, part_max, part_sum, arrived, out, scales,
    scale, stride_qb, stride_qh, stride_ob, stride_oh, stride_table, stride_page, stride_token,
    stride_scale_page, stride_scale_token,
    HQ: tl.constexpr, R: tl.constexpr, REST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SPAN: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr, SCALED: tl.constexpr,
    E4M3: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b, block, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + b).to(tl.int32)
    table = page_table + tl.load(rows + b) * stride_table
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    if SPAN > 0:
        first = (length - 1) // SPAN * SPAN
    first_tile = first // BLOCK_N
    end_tile = (length + BLOCK_N - 1) // BLOCK_N
    used = tl.minimum(tl.maximum(end_tile - first_tile, 1), NUM_SPLITS)
    if split >= used:
        return
    heads = block * BLOCK_H + tl.arange(0, BLOCK_H)
    live = heads < HQ
    r, e = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_E)[None, :]
    token = q + b * stride_qb + heads[:, None] * stride_qh
    queries = tl.load(token + r, mask=live[:, None] & (r < R), other=0.0)
    rest_queries = tl.load(token + R + e, mask=live[:, None] & (e < REST), other=0.0)
    best = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
    for tile in tl.range(first_tile + split, end_tile, NUM_SPLITS, num_stages=STAGES):
        at = tile * BLOCK_N
        values, rest, row_scales = _load_rows(
            cache, scales, table, at, first, length, queries, stride_page, stride_token, stride_scale_page,
            stride_scale_token, R, REST, BLOCK_R, BLOCK_E, P, BLOCK_N, SCALED, E4M3,
        )  # fmt: skip
        places = at + tl.arange(0, BLOCK_N)
        seen = ((places < length) & (places >= first))[None, :]
        best, total, acc = _attend_rows(
            queries, rest_queries, values, rest, row_scales, seen, best, total, acc, scale, CAP, REST, SCALED
        )  # fmt: skip
    is_last = used == 1
    if NUM_SPLITS > 1:  # noqa: SIM102 (this is known when compiling, the next is not)
        if used > 1:
            base = ((b * HQ + heads) * NUM_SPLITS).to(tl.int32)
            at = (base + split).to(tl.int64)[:, None] * R + r
            tl.store(part + at, acc, mask=live[:, None] & (r < R))
            tl.store(part_max + base + split, best, mask=live)
            tl.store(part_sum + base + split, total, mask=live)
            tl.debug_barrier()
            counter = arrived + b * tl.num_programs(1) + block
            is_last = tl.atomic_add(counter, 1, sem="acq_rel") == used - 1
            if is_last:
                tl.store(counter, 0)
                acc, best, total = merged(part, part_max, part_sum, base, live, used, R, BLOCK_R, NUM_SPLITS, 1)
    if is_last:
        if SINKS:
            total, acc = with_sinks(sinks, heads, live, best, total, acc)
        result = (acc / tl.where(live, total, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(out + b * stride_ob + heads[:, None] * stride_oh + r, result, mask=live[:, None] & (r < R))


@triton.jit(do_not_specialize=["first_request", "first_token", "num"])
def _extend_kernel(
    q, cache, page_table, rows, seq_lens, q_starts, sinks, out, scales, scale, first_request, first_token, num,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_table, stride_page, stride_token,
    stride_scale_page, stride_scale_token,
    HQ: tl.constexpr, R: tl.constexpr, REST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
    P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SPAN: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr, SCALED: tl.constexpr,
    E4M3: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.program_id(0)
    request_at = tl.arange(0, BLOCK_Q)
    starts = tl.load(q_starts + first_request + request_at, mask=request_at < num, other=0) - first_token
    begun = (request_at < num) & (starts * HQ // BLOCK_M + request_at <= number)
    request = first_request + tl.sum(begun.to(tl.int32), 0) - 1
    start, end = tl.load(q_starts + request), tl.load(q_starts + request + 1)
    num_new = end - start
    before = (start - first_token) * HQ // BLOCK_M + request - first_request
    tile = (num_new * HQ + BLOCK_M - 1) // BLOCK_M - 1 - (number - before)
    if tile < 0:
        return
    length = tl.load(seq_lens + request).to(tl.int32)
    table = page_table + tl.load(rows + request) * stride_table
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token, heads = row // HQ, row % HQ
    live = token < num_new
    place = length - num_new + token
    q_at = (start - first_token + token).to(tl.int64)
    r, e = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_E)[None, :]
    mine = q + q_at[:, None] * stride_qt + heads[:, None] * stride_qh
    queries = tl.load(mine + r, mask=live[:, None] & (r < R), other=0.0)
    rest_queries = tl.load(mine + R + e, mask=live[:, None] & (e < REST), other=0.0)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    highest = tl.minimum(length - num_new + (tile * BLOCK_M + BLOCK_M - 1) // HQ, length - 1)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - num_new + tile * BLOCK_M // HQ - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    if SPAN > 0:
        first = (length - num_new + tile * BLOCK_M // HQ) // SPAN * SPAN // BLOCK_N * BLOCK_N
    for at in tl.range(first, highest + 1, BLOCK_N, num_stages=STAGES):
        values, rest, row_scales = _load_rows(
            cache, scales, table, at, 0, length, queries, stride_page, stride_token, stride_scale_page,
            stride_scale_token, R, REST, BLOCK_R, BLOCK_E, P, BLOCK_N, SCALED, E4M3,
        )  # fmt: skip
        places = at + tl.arange(0, BLOCK_N)
        seen = (places < length)[None, :] & (places[None, :] <= place[:, None])
        if WINDOW > 0:
            seen &= places[None, :] > place[:, None] - WINDOW
        if SPAN > 0:
            seen &= places[None, :] >= (place // SPAN * SPAN)[:, None]
        best, total, acc = _attend_rows(
            queries, rest_queries, values, rest, row_scales, seen, best, total, acc, scale, CAP, REST, SCALED
        )  # fmt: skip
    if SINKS:
        total, acc = with_sinks(sinks, heads, live, best, total, acc)
    result = (acc / tl.where(live, total, 1.0)[:, None]).to(out.dtype.element_ty)
    tl.store(out + q_at[:, None] * stride_ot + heads[:, None] * stride_oh + r, result, mask=live[:, None] & (r < R))


def blocks(num_qo_heads: int) -> int:
    """Blocks of query heads, each of which a decode program takes."""
    return -(-num_qo_heads // HEADS)


def _facts(layer: AttentionLayer, cache: Tensor) -> dict[str, object]:
    """Constants of both kernels."""
    rest = layer.qk_dim - layer.v_dim
    return {
        "HQ": layer.num_qo_heads,
        "R": layer.v_dim,
        "REST": rest,
        "BLOCK_R": max(16, triton.next_power_of_2(layer.v_dim)),
        "BLOCK_E": max(16, triton.next_power_of_2(rest)),
        "P": cache.shape[1],
        "WINDOW": layer.sliding_window or 0,
        "SPAN": layer.chunk_size or 0,
        "SINKS": layer.sinks is not None,
        "CAP": (layer.soft_cap or 0.0) * LOG2E,
    }


def decode(
    q: Tensor,
    cache: Tensor,
    layer: AttentionLayer,
    batch: ForwardBatch,
    scratch: DecodeScratch,
    out: Tensor,
    scales: Scales | None = None,
) -> None:
    """Attend one token per request.

    Args:
        q: `[B, Hq, D]`, heads contiguous in D.
        cache: `[N, P, D]`, this layer's rows; the new token's is already in it.
        layer: The layer's facts.
        batch: Lengths and page table of the first B requests.
        scratch: Buffers for the splits, of as many KV heads as there are blocks of 16 query heads.
        out: `[B, Hq, R]`, written in full.
        scales: Of rows in 8 bits.
    """
    (row_scales, _), scale_strides, kinds = scale_arguments(scales, q)
    num, num_blocks = q.shape[0], blocks(layer.num_qo_heads)
    splits = max(1, min(64, triton.next_power_of_2(max(1, 512 // (num * num_blocks)))))
    part, part_max, part_sum, arrived = scratch.get(num, splits)
    _decode_kernel[(num, num_blocks, splits)](
        q, cache, batch.page_table, batch.rows, batch.seq_lens, q if layer.sinks is None else layer.sinks,
        part, part_max, part_sum, arrived, out, row_scales,
        layer.scale * LOG2E, q.stride(0), q.stride(1), out.stride(0), out.stride(1), batch.page_table.stride(0),
        cache.stride(0), cache.stride(1), *scale_strides, BLOCK_H=HEADS, BLOCK_N=32, NUM_SPLITS=splits, STAGES=2,
        num_warps=4, **_facts(layer, cache), **kinds, **launch_options(q),
    )  # fmt: skip


def extend(
    q: Tensor,
    cache: Tensor,
    layer: AttentionLayer,
    batch: ForwardBatch,
    out: Tensor,
    longest: int,
    scales: Scales | None = None,
    *,
    requests: tuple[int, int] | None = None,
) -> None:
    """Attend the prefill chunks of a batch.

    With one `longest` for all calls there is one tile, and a token has the same bits in any chunk, and as a decode row:
    every tile of keys takes the same instructions, and what a query does not see adds nothing, exactly.

    Args:
        q: `[T', Hq, D]`, the tokens after the decode rows, heads contiguous in D.
        cache: `[N, P, D]`, this layer's rows; the new tokens' are already in it.
        layer: The layer's facts; its scale is positive.
        batch: The whole batch; requests `num_decode …` are attended.
        out: `[T', Hq, R]`, written in full.
        longest: Most new tokens of one request, by which the tile is chosen; an upper bound will do.
        scales: Of rows in 8 bits.
        requests: The first that is attended, and the one behind the last; `q` and `out` are of their tokens.
    """
    (row_scales, _), scale_strides, kinds = scale_arguments(scales, q)
    first, stop = requests or (batch.num_decode, batch.num_requests)
    num = stop - first
    block_m, block_n, warps, stages = choose_tile(longest * layer.num_qo_heads, layer.qk_dim, q.dtype, q.device)
    _extend_kernel[(triton.cdiv(q.shape[0] * layer.num_qo_heads, block_m) + num,)](
        q, cache, batch.page_table, batch.rows, batch.seq_lens, batch.q_starts,
        q if layer.sinks is None else layer.sinks, out, row_scales,
        layer.scale * LOG2E, first, first, num,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), batch.page_table.stride(0),
        cache.stride(0), cache.stride(1), *scale_strides,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_Q=block_of(num), STAGES=stages,
        num_warps=warps, **_facts(layer, cache), **kinds, **launch_options(q),
    )  # fmt: skip


def choose_tile(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps and stages for `rows` pairs of token and head in the longest chunk."""
    block_m, block_n, warps, stages = 64, 32, 8, 2
    needed = (block_m + 2 * stages * block_n) * triton.next_power_of_2(dim) * dtype.itemsize
    if rows <= HEADS or 0 < shared_bytes(device) < needed:
        return HEADS, 16 if dtype.itemsize > 2 else 32, 4, 1 if dtype.itemsize > 2 else 2
    return block_m, block_n, warps, stages
