"""What the kernels for decode rows are made of: a token's heads from the projection, tiles of the pool, merged splits.

D and DV widths of keys and values, P page size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail_backends.triton.eight_bits import by_unit


@triton.jit
def rotated(
    x, weight, cos, sin, heads, live, eps, stride_head, D: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Heads `heads` `[R]` of a token's projection, normalised and rotated as `ops.norm_rotate` does: `[R, BLOCK_D]`.

    With TOKENS each head is of a token of its own: `x`, `cos` and `sin` are `[R, 1]`.
    """
    d = tl.arange(0, BLOCK_D)
    partner = tl.where(d < D // 2, d + D // 2, d - D // 2)
    mask = live[:, None] & (d < D)[None, :]
    value = tl.load(x + heads[:, None] * stride_head + d[None, :], mask=mask, other=0.0)
    a = value.to(tl.float32)
    b = tl.load(x + heads[:, None] * stride_head + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(a * a, 1) / D + eps)
        w_a = tl.load(weight + heads[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        w_b = tl.load(weight + heads[:, None] * D + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        a = ((a * factor[:, None]).to(value.dtype).to(tl.float32) * w_a).to(value.dtype).to(tl.float32)
        b = ((b * factor[:, None]).to(value.dtype).to(tl.float32) * w_b).to(value.dtype).to(tl.float32)
    if TOKENS:
        c = tl.load(cos + d[None, :], mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + d[None, :], mask=mask, other=0.0).to(tl.float32)
        result = a * c + b * s
    else:
        c = tl.load(cos + d, mask=d < D, other=0.0).to(tl.float32)
        s = tl.load(sin + d, mask=d < D, other=0.0).to(tl.float32)
        result = a * c[None, :] + b * s[None, :]
    return result.to(value.dtype)


@triton.jit
def load_pages(table, tile, first, end, P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of each of a tile's tokens that is within `first … end - 1`."""
    places = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(table + places // P, mask=(places < end) & (places >= first), other=0)


@triton.jit
def of_values(stride, D: tl.constexpr, DV: tl.constexpr):
    """The stride of values where that of keys is `stride`: see `kv.Pair`."""
    return stride if D == DV else stride // D * DV


@triton.jit
def load_heads(
    source, pages, offsets, head, stride_page, stride_token, stride_head, inside, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of the tokens that are `inside`, `[R, BLOCK]`, at `offsets` `[R]` of `pages` `[R]`."""
    at = tl.arange(0, BLOCK)
    base = source + pages.to(tl.int64) * stride_page + (offsets * stride_token + head * stride_head)
    return tl.load(base[:, None] + at[None, :], mask=inside[:, None] & (at < WIDTH)[None, :], other=0)


@triton.jit
def load_whole(
    source, pages, offsets, head, stride_page, stride_token, stride_head, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `load_heads` where all tokens are there; `pages` is int64."""
    at = tl.arange(0, BLOCK)
    base = source + (pages * stride_page + offsets * stride_token + head * stride_head)[:, None] + at[None, :]
    return tl.load(base) if WIDTH == BLOCK else tl.load(base, mask=(at < WIDTH)[None, :], other=0.0)


@triton.jit
def load_tile(
    k, v, k_scale, v_scale, pages, tile, first, end, head, stride_page, stride_token, stride_head,
    stride_scale_page, stride_scale_token,
    P: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, SCALED: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Keys `[BLOCK_N, BLOCK_D]`, values `[BLOCK_N, BLOCK_V]` and scales of a tile's tokens in `first … end - 1`.

    Scales are by their unit, `[BLOCK_N]` each, or 1 without SCALED. With it, four numbers are a word, int32
    `[BLOCK_N, BLOCK_D / 4]`; strides are those of numbers of keys.
    """
    PER_WORD: tl.constexpr = 4 if SCALED else 1
    places = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (places < end) & (places >= first)
    keys_at, values_at = k, v
    if SCALED:
        keys_at, values_at = k.to(tl.pointer_type(tl.int32)), v.to(tl.pointer_type(tl.int32))
    keys = load_heads(
        keys_at, pages, places % P, head, stride_page // PER_WORD, stride_token // PER_WORD, stride_head // PER_WORD,
        inside, D // PER_WORD, BLOCK_D // PER_WORD,
    )  # fmt: skip
    values = load_heads(
        values_at, pages, places % P, head, of_values(stride_page, D, DV) // PER_WORD,
        of_values(stride_token, D, DV) // PER_WORD, of_values(stride_head, D, DV) // PER_WORD,
        inside, DV // PER_WORD, BLOCK_V // PER_WORD,
    )  # fmt: skip
    key_scales, value_scales = 1.0, 1.0
    if SCALED:
        at = pages.to(tl.int64) * stride_scale_page + (places % P) * stride_scale_token + head
        key_scales = by_unit(tl.load(k_scale + at, mask=inside, other=0.0), E4M3)
        value_scales = by_unit(tl.load(v_scale + at, mask=inside, other=0.0), E4M3)
    return keys, values, key_scales, value_scales


@triton.jit
def merged(
    part, part_max, part_sum, base, live, used,
    D: tl.constexpr, BLOCK_D: tl.constexpr, NUM_SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum of the splits' results, with its maximum and sum of weights; `base` `[R]` is each head's first split."""
    d, s = tl.arange(0, BLOCK_D), tl.arange(0, NUM_SPLITS)
    mask = live[:, None] & (s < used)[None, :]
    maxima = tl.load(part_max + base[:, None] + s[None, :], mask=mask, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(part_sum + base[:, None] + s[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    best = tl.where(live, tl.max(maxima, 1), 0.0)
    total = tl.sum(tl.exp2(maxima - best[:, None]) * sums, 1)
    out = tl.zeros([base.shape[0], BLOCK_D], tl.float32)
    for start in range(0, used, CHUNK):
        at = start + tl.arange(0, CHUNK)
        some = live[:, None] & (at < used)[None, :]
        tops = tl.load(part_max + base[:, None] + at[None, :], mask=some, other=float("-inf"), cache_modifier=".cg")
        shares = tl.exp2(tops - best[:, None])
        wide = some[:, :, None] & (d < D)[None, None, :]
        where = (base[:, None] + at[None, :]).to(tl.int64)[:, :, None] * D + d[None, None, :]
        parts = tl.load(part + where, mask=wide, other=0.0, cache_modifier=".cg")
        out += tl.sum(parts * shares[:, :, None], 1)
    return out, best, total


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """`CAP * tanh(scores / CAP)`; both in units of log2."""
    shrunk = tl.exp(-2.0 / CAP * tl.abs(scores))  # of what cannot overflow
    return tl.where(scores < 0, -CAP, CAP) * (1.0 - shrunk) / (1.0 + shrunk)


@triton.jit
def with_sinks(sinks, heads, live, best, total, acc):
    """One more, valueless key of every head."""
    sink = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
    top = tl.maximum(best, sink)
    shrink = tl.exp2(best - top)
    return total * shrink + tl.exp2(sink - top), acc * shrink[:, None]
