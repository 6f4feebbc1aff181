"""Paged decode attention with grouped heads, split over the keys (FlashDecoding, arXiv:2311.01282), in one launch.

Grid (request, KV head, split). A program takes tiles `split, split + NUM_SPLITS, …` of its request, so that a short
request spreads over splits too and one graph serves every length. The last of a head's programs to finish adds the
splits up, in fixed order. The group's query heads fill the 16 rows that a matrix instruction needs. All lengths are
read on the device.

From the fused projection (`decode_qkv`) the kernel also normalises and rotates queries and the new key, and split 0
writes the new key and value to the pool; it takes them from registers, so that nobody reads what this step wrote. So
the first tile can be loaded before the kernel that makes the projection has finished.

Where groups of rows share a prefix (`prefix.py`), each row starts behind it, and the last program adds its part.

B requests, Hq and Hk query and KV heads, G = Hq / Hk, D and Dv widths of keys and values, P page size, S device rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.attention import AttentionLayer, ForwardBatch
from dovetail_backends.kernels.triton.pdl import launch_options
from dovetail_backends.triton.eight_bits import by_unit, quantised, unpacked, unpacked_words
from dovetail_backends.triton.kv import Pair, Scales, block_of_width, scale_arguments
from dovetail_backends.triton.prefix import PrefixScratch, SharedPrefix, attend_prefix
from dovetail_backends.triton.tiles import capped, load_pages, load_tile, merged, rotated, with_sinks

LOG2E = 1.4426950408889634


@triton.jit
def _from_projection(
    token, queries, k, v, weight, c, s, k_scale, v_scale, slots, b, head, scale, eps, stride_qh,
    stride_page, stride_token, stride_head, stride_scale_page, stride_scale_token,
    HQ: tl.constexpr, HK: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    P: tl.constexpr, NORM: tl.constexpr, CAP: tl.constexpr, SCALED: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Take the new key and value, both D wide, from the projection, write them to the pool, and attend them."""
    d = tl.arange(0, BLOCK_D)
    mine = HQ + head + tl.arange(0, 1)
    key = rotated(token, weight, c, s, mine, mine >= 0, eps, stride_qh, D, BLOCK_D, NORM, False)
    value = tl.load(token + ((HQ + HK + head) * stride_qh + d)[None, :], mask=(d < D)[None, :], other=0.0)
    slot = tl.load(slots + b)
    new_key, new_value = key, value
    if SCALED:  # it is attended as it is stored
        new_key, key_scale = quantised(key, E4M3)
        new_value, value_scale = quantised(value, E4M3)
        key = unpacked(new_key, tl.float32, E4M3) * by_unit(key_scale, E4M3)[:, None]
        value = unpacked(new_value, tl.float32, E4M3) * by_unit(value_scale, E4M3)[:, None]
    if slot >= 0:
        target = slot // P * stride_page + slot % P * stride_token + head * stride_head + d[None, :]
        tl.store(k + target, new_key, mask=(d < D)[None, :])
        tl.store(v + target, new_value, mask=(d < D)[None, :])
        if SCALED:
            place = slot // P * stride_scale_page + slot % P * stride_scale_token + head + tl.arange(0, 1)
            tl.store(k_scale + place, key_scale)
            tl.store(v_scale + place, value_scale)
    best = tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1) * scale
    if CAP > 0:
        best = capped(best, CAP)
    total = tl.full([BLOCK_G], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32) + value.to(tl.float32)
    return best, total, acc


@triton.jit
def _attend_tile(
    queries, keys, values, key_scales, value_scales, inside, best, total, acc, scale,
    CAP: tl.constexpr, SCALED: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Attend the tokens of a tile that are `inside`."""
    if SCALED:
        keys, values = unpacked_words(keys, queries.dtype, E4M3), unpacked_words(values, queries.dtype, E4M3)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if SCALED:
        scores *= key_scales[None, :]
    if CAP > 0:
        scores = capped(scores, CAP)
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new = tl.maximum(best, tl.max(scores, 1))
    shares = tl.exp2(scores - new[:, None])
    shrink = tl.exp2(best - new)
    total = total * shrink + tl.sum(shares, 1)
    if SCALED:
        shares *= value_scales[None, :]
    acc = acc * shrink[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="ieee")
    return new, total, acc


@triton.jit
def _add_up(
    part, part_max, part_sum, counter, base, split, used, live, acc, best, total,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, NUM_SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Leave a split's result; the last of a head's programs gets the sum of all, and true."""
    base, d = base.to(tl.int32), tl.arange(0, BLOCK_V)
    tl.store(part + (base + split).to(tl.int64)[:, None] * DV + d[None, :], acc, mask=live[:, None] & (d < DV)[None, :])
    tl.store(part_max + base + split, best, mask=live)
    tl.store(part_sum + base + split, total, mask=live)
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == used - 1
    if is_last:
        tl.store(counter, 0)
        acc, best, total = merged(part, part_max, part_sum, base, live, used, DV, BLOCK_V, NUM_SPLITS, CHUNK)
    return is_last, acc, best, total


@triton.jit
def _with_prefix(
    prefix, prefix_max, prefix_sum, first, b, heads, live, acc, best, total,
    HQ: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, PREFIX_N: tl.constexpr, PREFIX_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Add what the row's group found in the tokens before `first`."""
    some = tl.minimum(first // PREFIX_N, PREFIX_SPLITS)
    whose = ((b * HQ + heads) * PREFIX_SPLITS).to(tl.int32)
    above, peak, weights = merged(
        prefix, prefix_max, prefix_sum, whose, live, some, DV, BLOCK_V, PREFIX_SPLITS, CHUNK
    )  # fmt: skip
    top = tl.maximum(best, peak)
    acc = acc * tl.exp2(best - top)[:, None] + above * tl.exp2(peak - top)[:, None]
    return acc, top, total * tl.exp2(best - top) + weights * tl.exp2(peak - top)


@triton.jit
def _decode_kernel(
    q, k, v, page_table, rows, seq_lens, slots, weight, cos, sin, sinks, part, part_max, part_sum, arrived, out,
    behind, prefix, prefix_max, prefix_sum, k_scale, v_scale,
    scale, eps, stride_qb, stride_qh, stride_ob, stride_oh, stride_table,
    stride_page, stride_token, stride_head, stride_scale_page, stride_scale_token,
    HQ: tl.constexpr, HK: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr, SINKS: tl.constexpr, FUSED: tl.constexpr,
    NORM: tl.constexpr, SHARED: tl.constexpr, PREFIX_N: tl.constexpr, PREFIX_SPLITS: tl.constexpr, CAP: tl.constexpr,
    SCALED: tl.constexpr, E4M3: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        if not FUSED:
            gdc_wait()
    G: tl.constexpr = HQ // HK
    b, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + b).to(tl.int32)
    table = page_table + tl.load(rows + b) * stride_table
    end = length - 1 if FUSED else length
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    if SPAN > 0:  # it sees the tokens of its own chunk
        first = (length - 1) // SPAN * SPAN
    if SHARED:
        # Written by an ordinary launch of this step, like the lengths: complete before any kernel that is launched
        # early can start.
        first = tl.load(behind + b)
    first_tile = first // BLOCK_N
    end_tile = (end + BLOCK_N - 1) // BLOCK_N
    used = tl.minimum(tl.maximum(end_tile - first_tile, 1), NUM_SPLITS)
    if split >= used:
        return
    tile = first_tile + split
    pages = load_pages(table, tile, first, end, P, BLOCK_N)
    keys, values, key_scales, value_scales = load_tile(
        k, v, k_scale, v_scale, pages, tile, first, end, head, stride_page, stride_token, stride_head,
        stride_scale_page, stride_scale_token, P, D, BLOCK_D, DV, BLOCK_V, BLOCK_N, SCALED, E4M3,
    )  # fmt: skip
    pages = load_pages(table, tile + NUM_SPLITS, first, end, P, BLOCK_N)
    if PDL and FUSED:
        gdc_wait()
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    heads, live = head * G + g, g < G
    best = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    token = q + b * stride_qb
    if FUSED:
        c, s = cos + b * D, sin + b * D
        queries = rotated(token, weight, c, s, heads, live, eps, stride_qh, D, BLOCK_D, NORM, False)
        if split == 0:
            best, total, acc = _from_projection(
                token, queries, k, v, weight, c, s, k_scale, v_scale, slots, b, head, scale, eps, stride_qh,
                stride_page, stride_token, stride_head, stride_scale_page, stride_scale_token,
                HQ, HK, BLOCK_G, D, BLOCK_D, P, NORM, CAP, SCALED, E4M3,
            )  # fmt: skip
    else:
        q_mask = live[:, None] & (d < D)[None, :]
        queries = tl.load(token + heads[:, None] * stride_qh + d[None, :], mask=q_mask, other=0.0)
    for tile in range(first_tile + split, end_tile, NUM_SPLITS):
        # The next tile, and the pages of the one after it, are on their way while this one is computed.
        next_keys, next_values, next_key_scales, next_value_scales = load_tile(
            k, v, k_scale, v_scale, pages, tile + NUM_SPLITS, first, end, head, stride_page, stride_token,
            stride_head, stride_scale_page, stride_scale_token, P, D, BLOCK_D, DV, BLOCK_V, BLOCK_N, SCALED, E4M3,
        )  # fmt: skip
        pages = load_pages(table, tile + 2 * NUM_SPLITS, first, end, P, BLOCK_N)
        places = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (places < end) & (places >= first)
        best, total, acc = _attend_tile(
            queries, keys, values, key_scales, value_scales, inside, best, total, acc, scale, CAP, SCALED, E4M3
        )  # fmt: skip
        keys, values, key_scales, value_scales = next_keys, next_values, next_key_scales, next_value_scales
    is_last = used == 1
    if NUM_SPLITS > 1:  # noqa: SIM102 (this is known when compiling, the next is not)
        if used > 1:
            is_last, acc, best, total = _add_up(
                part, part_max, part_sum, arrived + b * HK + head, (b * HQ + heads) * NUM_SPLITS, split, used, live,
                acc, best, total, DV, BLOCK_V, NUM_SPLITS, CHUNK,
            )  # fmt: skip
    if is_last:
        if SHARED:  # noqa: SIM102 (as above)
            if first > 0:
                acc, best, total = _with_prefix(
                    prefix, prefix_max, prefix_sum, first, b, heads, live, acc, best, total,
                    HQ, DV, BLOCK_V, PREFIX_N, PREFIX_SPLITS, CHUNK,
                )  # fmt: skip
        if SINKS:
            total, acc = with_sinks(sinks, heads, live, best, total, acc)
        total = tl.where(live, total, 1.0)
        result, e = (acc / total[:, None]).to(out.dtype.element_ty), tl.arange(0, BLOCK_V)
        mask = live[:, None] & (e < DV)[None, :]
        tl.store(out + b * stride_ob + heads[:, None] * stride_oh + e[None, :], result, mask=mask)


class DecodeScratch:
    """Partial results of the splits by batch size, allocated on first use."""

    def __init__(self, num_qo_heads: int, num_kv_heads: int, v_dim: int, device: torch.device) -> None:
        self._heads, self._kv_heads, self._dim, self._device = num_qo_heads, num_kv_heads, v_dim, device
        self._buffers: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def get(self, batch: int, splits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return partial outputs `[B, Hq, splits, Dv]`, maxima and sums `[B, Hq, splits]`, float32, and counters.

        The counters `[B, Hk]` int32 say how many splits of a head are done; they are zero between kernels.
        """
        if batch not in self._buffers:
            shape = (batch, self._heads, splits)
            self._buffers[batch] = (
                torch.empty(*shape, self._dim, dtype=torch.float32, device=self._device),
                torch.empty(shape, dtype=torch.float32, device=self._device),
                torch.empty(shape, dtype=torch.float32, device=self._device),
                torch.zeros(batch, self._kv_heads, dtype=torch.int32, device=self._device),
            )
        return self._buffers[batch]


@dataclass(frozen=True, slots=True)
class SplitShape:
    """How a batch is cut: splits per request and KV head, tokens per tile, warps."""

    splits: int
    block_n: int
    warps: int


def choose_shape(batch: int, kv_heads: int, dim: int) -> SplitShape:
    """Enough programs to fill a large GPU about four times; tiles as measured on an H200 with Triton 3.6."""
    pairs = batch * kv_heads
    splits = max(1, min(64, triton.next_power_of_2(max(1, 512 // pairs))))
    if dim <= 64:
        return SplitShape(splits, 64, 4 if pairs < 512 else 2)
    if dim <= 128:
        return SplitShape(splits, 64, 8) if pairs <= 32 else SplitShape(splits, 32, 2)
    return (
        SplitShape(splits, 32, 4) if dim <= 256 else SplitShape(splits, 16, 8)
    )  # the latter by what compiles without spilling


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What groups of a step's rows share, and where partial results over it go."""

    shared: SharedPrefix
    scratch: PrefixScratch


def decode(
    q: Tensor,
    kv: Pair,
    layer: AttentionLayer,
    batch: ForwardBatch,
    scratch: DecodeScratch,
    out: Tensor,
    prefixes: Prefixes | None = None,
    scales: Scales | None = None,
) -> None:
    """Attend one token per request.

    Args:
        q: `[B, Hq, D]`, heads contiguous in D.
        kv: This layer of the pool; the new token is already in it.
        layer: The layer's facts.
        batch: Lengths and page table of the first B requests.
        scratch: Buffers for the splits.
        out: `[B, Hq, Dv]`, written in full.
        prefixes: What rows share, to be read once.
        scales: Of the numbers of a pool in 8 bits.
    """
    _launch(q, kv, layer, batch, scratch, out, None, (q, q), prefixes, scales, is_fused=False)


def decode_qkv(
    qkv: Tensor,
    norm: tuple[Tensor, float] | None,
    rope: tuple[Tensor, Tensor],
    kv: Pair,
    layer: AttentionLayer,
    batch: ForwardBatch,
    scratch: DecodeScratch,
    out: Tensor,
    prefixes: Prefixes | None = None,
    scales: Scales | None = None,
) -> None:
    """Attend one token per request straight from the projection: norm, rotation, write to the pool, attention.

    Args:
        qkv: `[B, Hq + 2 Hk, D]`: queries, keys, values; heads contiguous in D.
        norm: Weight `[Hq + Hk, D]` and epsilon of the RMS norm of query and key heads, or None.
        rope: Cosine and sine `[B, 1, D]`, contiguous.
        kv: This layer of the pool, without the new tokens; keys and values are equally wide.
        layer: The layer's facts.
        batch: All of its requests decode.
        scratch: Buffers for the splits.
        out: `[B, Hq, D]`, written in full.
        prefixes: What rows share, to be read once.
        scales: Of the numbers of a pool in 8 bits.
    """
    _launch(qkv, kv, layer, batch, scratch, out, norm, rope, prefixes, scales, is_fused=True)


def _launch(
    q: Tensor,
    kv: Pair,
    layer: AttentionLayer,
    batch: ForwardBatch,
    scratch: DecodeScratch,
    out: Tensor,
    norm: tuple[Tensor, float] | None,
    rope: tuple[Tensor, Tensor],
    prefixes: Prefixes | None,
    scales: Scales | None,
    *,
    is_fused: bool,
) -> None:
    scale_tensors, scale_strides, kinds = scale_arguments(scales, q)
    num, hq, hk, (k, v) = q.shape[0], layer.num_qo_heads, layer.num_kv_heads, kv
    shape = choose_shape(num, hk, max(layer.qk_dim, layer.v_dim))
    block_g, block_v = max(16, triton.next_power_of_2(hq // hk)), block_of_width(layer.v_dim)
    part, part_max, part_sum, arrived = scratch.get(num, shape.splits)
    behind, (prefix, prefix_max, prefix_sum), cut = q, (q, q, q), {"SHARED": False, "PREFIX_N": 1, "PREFIX_SPLITS": 1}
    # Under a window, and within chunks, rows of different lengths see different parts of a prefix: each reads its own.
    if prefixes is not None and layer.sliding_window is None and layer.chunk_size is None:
        behind = prefixes.shared.behind
        parts = attend_prefix(
            q, kv, layer, batch, prefixes.shared, prefixes.scratch, norm, rope, scales, is_fused=is_fused
        )  # fmt: skip
        prefix, prefix_max, prefix_sum = parts.part, parts.part_max, parts.part_sum
        cut = {"SHARED": True, "PREFIX_N": parts.block_n, "PREFIX_SPLITS": parts.splits}
    _decode_kernel[(num, hk, shape.splits)](
        q, k, v, batch.page_table, batch.rows, batch.seq_lens, batch.kv_slots, q if norm is None else norm[0], *rope,
        q if layer.sinks is None else layer.sinks, part, part_max, part_sum, arrived, out,
        behind, prefix, prefix_max, prefix_sum, *scale_tensors,
        layer.scale * LOG2E, 0.0 if norm is None else norm[1], q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        batch.page_table.stride(0), *k.stride()[:3], *scale_strides,
        HQ=hq, HK=hk, BLOCK_G=block_g, D=layer.qk_dim, BLOCK_D=block_of_width(layer.qk_dim), DV=layer.v_dim,
        BLOCK_V=block_v, P=k.shape[1], BLOCK_N=shape.block_n,
        NUM_SPLITS=shape.splits, CHUNK=max(1, min(8, 8192 // (block_g * block_v))), WINDOW=layer.sliding_window or 0,
        SPAN=layer.chunk_size or 0, SINKS=layer.sinks is not None, FUSED=is_fused, NORM=norm is not None,
        CAP=(layer.soft_cap or 0.0) * LOG2E,
        num_warps=shape.warps, **cut, **kinds, **launch_options(q),
    )  # fmt: skip
