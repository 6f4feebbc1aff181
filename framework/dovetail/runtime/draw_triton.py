"""Draws tokens on CUDA in one kernel, one program per row, without sorting and without a list of candidates.

The filters keep the first tokens of one order: by logit, then by id. So all that is sought is where that order is cut:
the least logit that is kept, and how many of the tokens that have exactly this one. It is found by bisection between
values that occur, a pass over the row a step: about as many as the binary logarithm of the number of different logits.
Sums are taken in a fixed order, so a row's token does not depend on its batch.

`draw.draw_filtered` over the whole vocabulary is the reference. V vocabulary size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.runtime.draw import DrawParams

BLOCK = 8192


@triton.jit
def _load(logits, start, V, BLOCK: tl.constexpr):
    """A block of logits, minus infinity past the end. Passes load a block ahead of what they compute."""
    at = start + tl.arange(0, BLOCK)
    return tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _from(logits, top, rate, limit, V, BLOCK: tl.constexpr):
    """Of the tokens with a logit of at least `limit`: number, mass, least logit; and the largest logit below."""
    count, mass = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    least, below = tl.full([BLOCK], float("inf"), tl.float32), tl.full([BLOCK], float("-inf"), tl.float32)
    values = _load(logits, 0, V, BLOCK)
    for start in range(0, V, BLOCK):
        following = _load(logits, start + BLOCK, V, BLOCK)
        inside = values >= limit
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp2((values - top) * rate), 0.0)
        least = tl.minimum(least, tl.where(inside, values, float("inf")))
        below = tl.maximum(below, tl.where(inside, float("-inf"), values))
        values = following
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(least, 0), tl.max(below, 0)


@triton.jit
def _cut(logits, top, rate, low, low_count, need_count, need_mass, V, BLOCK: tl.constexpr):
    """Largest logit from which on there are `need_count` tokens with a mass of `need_mass`; at least `low`.

    Returns:
        The logit, how many tokens have it, and the number and mass of those above.
    """
    high = top  # the largest logit not ruled out; `count` and `mass` are those of the tokens above it
    count, mass = 0, 0.0
    while low < high:
        middle = low * 0.5 + high * 0.5
        if middle <= low:
            middle = high
        n, m, least, below = _from(logits, top, rate, middle, V, BLOCK)
        if (n >= need_count) & (m >= need_mass):
            low = least
            low_count = n
        else:
            high = below
            count = n
            mass = m
    return low, low_count - count, count, mass


@triton.jit
def _limits(logits, top, rate, top_p, top_k, V, BLOCK: tl.constexpr):
    """Least logit that top-k and top-p keep, how many tokens with it are kept, and how many there are."""
    num, whole, cut, _ = _from(logits, top, rate, -3.4028234663852886e38, V, BLOCK)
    allowed, ties = V, 0
    if (top_k > 0) & (top_k < num):
        wanted = top_k.to(tl.int32)
        cut, ties, count, mass = _cut(logits, top, rate, cut, num, wanted, -1.0, V, BLOCK)
        allowed = wanted - count
        num = count + ties
        whole = mass + allowed.to(tl.float32) * tl.exp2((cut - top) * rate)
    if top_p < 1.0:
        target = top_p * whole
        nucleus, ties, count, mass = _cut(logits, top, rate, cut, num, 1, target, V, BLOCK)
        fitting = tl.maximum(tl.ceil(tl.div_rn(target - mass, tl.exp2((nucleus - top) * rate))), 1.0)
        fitting = tl.minimum(fitting, ties.to(tl.float32)).to(tl.int32)
        allowed = tl.where(nucleus > cut, fitting, tl.minimum(fitting, allowed))
        cut = nucleus
    return cut, allowed, ties


# The parameters share a tensor, so the number of rows decides which of them is aligned: no matter for single numbers.
@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ps", "min_ps", "top_ks", "keys"])
def _draw_kernel(
    logits, temperatures, top_ps, min_ps, top_ks, keys, out, stride, V, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    temperature = tl.load(temperatures + row)
    top_p, min_p, top_k = tl.load(top_ps + row), tl.load(min_ps + row), tl.load(top_ks + row)
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    values = _load(logits, 0, V, BLOCK)
    for start in range(0, V, BLOCK):
        following = _load(logits, start + BLOCK, V, BLOCK)
        peaks = tl.maximum(peaks, values)
        values = following
    top = tl.max(peaks, 0)
    is_drawn = temperature > 0
    temperature = tl.where(is_drawn, temperature, 1.0)
    cut, allowed, ties = -3.4028234663852886e38, V, 0
    if is_drawn & ((top_p < 1.0) | ((top_k > 0) & (top_k < V))):
        rate = tl.minimum(tl.div_rn(1.4426950408889634, temperature), 1e37)
        cut, allowed, ties = _limits(logits, top, rate, top_p, top_k, V, BLOCK)
    key_a, key_b = tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK], tl.int32) + V
    seen, record = 0, float("-inf")
    values = _load(logits, 0, V, BLOCK)
    for start in range(0, V, BLOCK):
        following = _load(logits, start + BLOCK, V, BLOCK)
        at = start + tl.arange(0, BLOCK)
        scores = tl.div_rn(values - top, temperature)
        kept = (values >= cut) & ((scores == 0.0) | (tl.exp(scores) >= min_p))
        if allowed < ties:
            tied = (values == cut).to(tl.int32)
            kept = kept & ((tied == 0) | (seen + tl.cumsum(tied, 0) <= allowed))
            seen += tl.sum(tied, 0)
        scores = tl.where(kept, scores, float("-inf"))
        # The luck of a token is less than 16.7: a block whose best score is further behind need not be drawn.
        if tl.max(scores, 0) + 16.7 >= record:
            if is_drawn:
                h = _mix(_mix(at ^ key_a) ^ key_b)
                uniform = (((h >> 9) & 0x7FFFFF).to(tl.float32) + 0.5) * 1.1920928955078125e-07
                scores -= tl.log(-tl.log(uniform))
            better = scores > best
            best = tl.where(better, scores, best)
            chosen = tl.where(better, at, chosen)
            record = tl.max(best, 0)
        values = following
    winner = tl.min(tl.where(best == record, chosen, V), 0)
    tl.store(out + row, tl.where(winner < V, winner, 0).to(tl.int64))


@triton.jit
def _mix(h):
    """As `random._mix`."""
    h = (h ^ ((h >> 16) & 0xFFFF)) * -2048144789
    h = (h ^ ((h >> 13) & 0x7FFFF)) * -1028477387
    return h ^ ((h >> 16) & 0xFFFF)


def draw(logits: Tensor, p: DrawParams, block: int = BLOCK) -> Tensor:
    """Draw one token per row of `[R, V]` logits: `[R]` int64. Fit for a CUDA graph; rows may be strided.

    Rows whose temperature is 0 take the best token. Of a row without any finite logit, token 0 comes back.
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _draw_kernel[(rows,)](
        logits, p.temperature, p.top_p, p.min_p, p.top_k, p.keys, out, logits.stride(0), vocab,
        BLOCK=block, num_warps=max(1, min(16, block // 256)),
    )  # fmt: skip
    return out
