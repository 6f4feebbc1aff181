"""Draws tokens on CUDA in two kernels, without sorting and without a list of candidates.

The filters keep the first tokens of one order: by logit, then by id. The first kernel runs the race of a draw among all
tokens of a row, in blocks. Whoever wins it has won among those that are kept, too, if it is one of them; and that takes
one pass over the row: how many stand before it, and with what mass. If it is not, the race is between those before it.
So a row takes two or three passes, where seeking the place at which the order is cut would take twenty.

Where top-k and top-p are both given, the mass of what top-k leaves has to be known first: then that place is found, by
bisection between values that occur.

Sums are taken in a fixed order, so a row's token does not depend on its batch. `draw.draw_filtered` over the whole
vocabulary is the reference. V vocabulary size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.runtime.draw import DrawParams

RACE = 4096
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


@triton.jit
def _keys(seeds, positions, row):
    """As `seeds.row_key`, in 64-bit integers that wrap around."""
    one = tl.arange(0, 1)
    z = tl.load(seeds + row + one) * -7046029254386353131 + tl.load(positions + row + one) * -3335678366873096957
    z += -8306560040656073257
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    z ^= (z >> 31) & 0x1FFFFFFFF
    return z.to(tl.int32), (z >> 32).to(tl.int32)


@triton.jit
def _race(scores, at, key_a, key_b):
    """Add to scores what makes the largest a draw from their distribution."""
    h = _mix(_mix(at ^ key_a) ^ key_b)
    uniform = (((h >> 9) & 0x7FFFFF).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return scores - tl.log(-tl.log(uniform))


# The parameters share a tensor, so the number of rows decides which of them is aligned: no matter for single numbers.
@triton.jit(
    do_not_specialize_on_alignment=["temperatures", "top_ps", "min_ps", "top_ks", "seeds", "positions", "greedy"]
)
def _race_kernel(
    logits, greedy, temperatures, top_ps, min_ps, top_ks, seeds, positions, masses, scores, places, stride, V,
    num_blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """The race within a block of logits: best score and its token, and the mass of the block."""
    row, block = tl.program_id(0), tl.program_id(1)
    out = row * num_blocks + block
    logits += row.to(tl.int64) * stride
    top_p, top_k = tl.load(top_ps + row), tl.load(top_ks + row)
    if (top_p < 1.0) & (top_k > 0) & (top_k < V):
        return  # this row's race begins once it is known where the order is cut
    top = tl.load(logits + tl.load(greedy + row)).to(tl.float32)
    temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    is_drawn = temperature > 0
    temperature = tl.where(is_drawn, temperature, 1.0)
    values = _load(logits, block * BLOCK, V, BLOCK)
    at = block * BLOCK + tl.arange(0, BLOCK)
    found = tl.div_rn(values - top, temperature)
    if min_p > 0:
        found = tl.where((found == 0.0) | (tl.exp(found) >= min_p), found, float("-inf"))
    furthest = tl.max(found, 0)
    # The best token's score is at least -2.9 and the luck of a token less than 16.7: a block further behind has lost.
    if is_drawn & (furthest >= -19.7):
        key_a, key_b = _keys(seeds, positions, row)
        found = _race(found, at, key_a, key_b)
    best = tl.max(found, 0)
    tl.store(scores + out, best)
    tl.store(places + out, tl.min(tl.where((found == best) & (found > float("-inf")), at, V), 0))
    if top_p < 1.0:
        rate = tl.minimum(tl.div_rn(1.4426950408889634, temperature), 1e37)
        tl.store(masses + out, tl.sum(tl.where(values > float("-inf"), tl.exp2((values - top) * rate), 0.0), 0))


@triton.jit
def _before(logits, top, rate, temperature, min_p, place, key_a, key_b, V, BLOCK: tl.constexpr):
    """Number and mass of the tokens that stand before `place` in the order, and who wins the race among them."""
    limit = tl.load(logits + place).to(tl.float32)
    count, mass = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK], tl.int32) + V
    values = _load(logits, 0, V, BLOCK)
    for start in range(0, V, BLOCK):
        following = _load(logits, start + BLOCK, V, BLOCK)
        at = start + tl.arange(0, BLOCK)
        inside = (values > limit) | ((values == limit) & (at < place))
        if tl.max(inside.to(tl.int32), 0) > 0:
            count += inside.to(tl.int32)
            mass += tl.where(inside, tl.exp2((values - top) * rate), 0.0)
            scores = tl.div_rn(values - top, temperature)
            scores = tl.where(inside & ((scores == 0.0) | (tl.exp(scores) >= min_p)), scores, float("-inf"))
            scores = _race(scores, at, key_a, key_b)
            better = scores > best
            best = tl.where(better, scores, best)
            chosen = tl.where(better, at, chosen)
        values = following
    record = tl.max(best, 0)
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(tl.where(best == record, chosen, V), 0)


@triton.jit
def _within(logits, top, rate, temperature, min_p, cut, allowed, ties, key_a, key_b, V, BLOCK: tl.constexpr):
    """Who wins the race among the tokens above `cut` and the first `allowed` of the `ties` that have this logit."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK], tl.int32) + V
    seen = 0
    values = _load(logits, 0, V, BLOCK)
    for start in range(0, V, BLOCK):
        following = _load(logits, start + BLOCK, V, BLOCK)
        at = start + tl.arange(0, BLOCK)
        kept = values >= cut
        if tl.max(kept.to(tl.int32), 0) > 0:
            if allowed < ties:
                tied = (values == cut).to(tl.int32)
                kept = kept & ((tied == 0) | (seen + tl.cumsum(tied, 0) <= allowed))
                seen += tl.sum(tied, 0)
            scores = tl.div_rn(values - top, temperature)
            kept = kept & ((scores == 0.0) | (tl.exp(scores) >= min_p))
            scores = _race(tl.where(kept, scores, float("-inf")), at, key_a, key_b)
            better = scores > best
            best = tl.where(better, scores, best)
            chosen = tl.where(better, at, chosen)
        values = following
    record = tl.max(best, 0)
    return tl.min(tl.where(best == record, chosen, V), 0)


@triton.jit(
    do_not_specialize_on_alignment=["temperatures", "top_ps", "min_ps", "top_ks", "seeds", "positions", "greedy"]
)
def _settle_kernel(
    logits, greedy, temperatures, top_ps, min_ps, top_ks, seeds, positions, masses, scores, places, out, stride, V,
    num_blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The winner of a row's race, if the filters keep it; else the best of those before it, and so on."""
    row = tl.program_id(0)
    temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    top_p, top_k = tl.load(top_ps + row), tl.load(top_ks + row)
    by_p, by_k = top_p < 1.0, (top_k > 0) & (top_k < V)
    is_drawn = temperature > 0
    temperature = tl.where(is_drawn, temperature, 1.0)
    logits += row.to(tl.int64) * stride
    best = tl.load(greedy + row).to(tl.int32)
    top = tl.load(logits + best).to(tl.float32)
    rate = tl.minimum(tl.div_rn(1.4426950408889634, temperature), 1e37)
    key_a, key_b = _keys(seeds, positions, row)
    place = best
    if by_p & by_k:
        if is_drawn:
            cut, allowed, ties = _limits(logits, top, rate, top_p, top_k, V, BLOCK)
            place = _within(logits, top, rate, temperature, min_p, cut, allowed, ties, key_a, key_b, V, BLOCK)
    else:
        blocks = row * num_blocks + tl.arange(0, BLOCKS)
        inside = tl.arange(0, BLOCKS) < num_blocks
        found = tl.load(scores + blocks, mask=inside, other=float("-inf"))
        tokens = tl.load(places + blocks, mask=inside, other=V)
        place = tl.min(tl.where(found == tl.max(found, 0), tokens, V), 0)
        target = float("inf")
        if by_p:
            target = top_p * tl.sum(tl.load(masses + blocks, mask=inside, other=0.0), 0)
        wanted = tl.where(by_k, top_k, V).to(tl.int32)
        searching = (is_drawn & (by_p | by_k) & (place < V)).to(tl.int32)
        while searching > 0:
            num, mass, following = _before(logits, top, rate, temperature, min_p, place, key_a, key_b, V, BLOCK)
            is_kept = (num == 0) | ((num < wanted) & (mass < target))
            searching = tl.where(is_kept | (following >= V), 0, 1)
            place = tl.where(is_kept, place, following)
    tl.store(out + row, tl.where(place < V, place, 0).to(tl.int64))


@triton.jit
def _mix(h):
    """As `random._mix`."""
    h = (h ^ ((h >> 16) & 0xFFFF)) * -2048144789
    h = (h ^ ((h >> 13) & 0x7FFFF)) * -1028477387
    return h ^ ((h >> 16) & 0xFFFF)


def draw(
    logits: Tensor, p: DrawParams, greedy: Tensor | None = None, *, race: int = RACE, block: int = BLOCK
) -> Tensor:
    """Draw one token per row of `[R, V]` logits: `[R]` int64. Fit for a CUDA graph; rows may be strided.

    Args:
        logits: Any float dtype.
        p: Parameters by row; rows whose temperature is 0 take the best token.
        greedy: `[R]` int64, the best token of each row, where it is known.
        race: Logits of one program of the first kernel.
        block: Logits that the second works on at once.

    Of a row without any finite logit, token 0 comes back.
    """
    rows, vocab = logits.shape
    greedy = logits.argmax(dim=-1) if greedy is None else greedy
    num_blocks = triton.cdiv(vocab, race)
    masses, scores = torch.empty(2, rows, num_blocks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, num_blocks, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    stride = logits.stride(0)
    _race_kernel[(rows, num_blocks)](
        logits, greedy, p.temperature, p.top_p, p.min_p, p.top_k, p.seeds, p.positions, masses, scores, places, stride,
        vocab, num_blocks, BLOCK=race, num_warps=max(1, min(8, race // 256)),
    )  # fmt: skip
    _settle_kernel[(rows,)](
        logits, greedy, p.temperature, p.top_p, p.min_p, p.top_k, p.seeds, p.positions, masses, scores, places, out,
        stride, vocab, num_blocks, BLOCKS=triton.next_power_of_2(num_blocks), BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
    )  # fmt: skip
    return out
