"""Draws tokens on CUDA in a few kernels, without sorting and without a list of candidates.

The filters keep the first tokens of one order: by logit, then by id. The first kernel runs the race of a draw among all
tokens of a row, in blocks. Whoever wins it has won among those that are kept, too, if it is one of them; and that takes
one pass over the row: how many stand before it, and with what mass. If it is not, the race is between those before it.
So a row takes two or three passes, where seeking the place at which the order is cut would take twenty. The first
`ROUNDS` of these passes are made in blocks as well, a kernel each; what is still open then, one program of the last
kernel settles. With top-p 0.9 that is one draw in a hundred.

Where top-k is at most `LISTED`, the candidates are collected instead: those that are no less than the k-th of the
largest logits of stretches of `PEAK` tokens, for at least k tokens are. There are hardly more than k of them, and of
few tokens everything is known. Where there are more than `CANDIDATES`, or top-k is larger and top-p is given, too, the
mass of what top-k leaves has to be known first: then that place is found, by bisection between values that occur.

Sums are taken in a fixed order, so a row's token does not depend on its batch. `dovetail.sdk.draws.draw_filtered`
over the whole vocabulary is the reference. V vocabulary size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.sdk.rows import DrawParams

SAMPLE_BLOCK = 4096
BLOCK = 8192
ROUNDS, FEW_ROWS = 2, 64
"""Passes that are made in blocks, for up to so many rows: more of them fill the device by themselves. A launch that has
nothing left to do takes a few microseconds."""
LISTED, PEAK, CANDIDATES = 64, 128, 512
"""Largest top-k for which candidates are collected, tokens of which one gives the limit, and most candidates."""


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
def order_keys(values, at):
    """Numbers that are ordered as tokens are: a rank that orders as logits do, over the id turned round."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    ranks = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ranks << 32) | (0x7FFFFFFF - at).to(tl.int64)


@triton.jit
def _among_candidates(
    keys, num, top, rate, temperature, top_p, min_p, k, key_a, key_b, V, LISTED: tl.constexpr, CANDIDATES: tl.constexpr
):
    """Who wins the race among the `k` best of a row's candidates, of which top-p and min-p keep the first."""
    at = tl.arange(0, CANDIDATES)
    left = tl.load(keys + at, mask=at < num, other=-0x7FFFFFFFFFFFFFFF)
    lane = tl.arange(0, LISTED)
    order = tl.full([LISTED], -0x7FFFFFFFFFFFFFFF, tl.int64)
    for i in range(0, k):
        best = tl.max(left, 0)
        order = tl.where(lane == i, best, order)
        left = tl.where(left == best, -0x7FFFFFFFFFFFFFFF, left)
    ranks = (order >> 32).to(tl.int32)
    values = tl.where(ranks < 0, ranks ^ 0x7FFFFFFF, ranks).to(tl.float32, bitcast=True)
    tokens = 0x7FFFFFFF - (order & 0x7FFFFFFF).to(tl.int32)
    is_there = (lane < k) & (lane < num)
    found = tl.div_rn(values - top, temperature)
    masses = tl.where(is_there, tl.exp2((values - top) * rate), 0.0)
    before = tl.cumsum(masses, 0) - masses
    target = tl.where(top_p < 1.0, top_p * tl.sum(masses, 0), float("inf"))
    kept = is_there & ((lane == 0) | (before < target))
    kept = kept & ((found == 0.0) | (tl.exp(found) >= min_p))
    scores = _noisy(tl.where(kept, found, float("-inf")), tokens, key_a, key_b)
    scores = tl.where(kept, scores, float("-inf"))
    return tl.min(tl.where(kept & (scores == tl.max(scores, 0)), tokens, V), 0)


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
def _noisy(scores, at, key_a, key_b):
    """Add to scores what makes the largest a draw from their distribution."""
    h = _mix(_mix(at ^ key_a) ^ key_b)
    uniform = (((h >> 9) & 0x7FFFFF).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return scores - tl.log(-tl.log(uniform))


SINGLE = [
    *("temperatures", "top_ps", "min_ps", "top_ks", "seeds", "positions", "greedy"),
    *("masses", "scores", "places", "passes", "tested"),
]
"""What is read and written a number at a time, or from any place on: there is no variant for tensors that are aligned.
Several share a tensor, so that the number of rows decides which of them are. For sizes there is none either."""


@triton.jit(do_not_specialize=["num_blocks", "num_rows"], do_not_specialize_on_alignment=SINGLE)
def _sample_kernel(
    logits, greedy, temperatures, top_ps, min_ps, top_ks, seeds, positions, masses, scores, places, peaks, stride, V,
    num_blocks, LISTED: tl.constexpr, PEAK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The race within a block of logits: best score and its token, and the mass of the block; or its peaks."""
    row, block = tl.program_id(0), tl.program_id(1)
    out = row * num_blocks + block
    logits += row.to(tl.int64) * stride
    top_p, top_k = tl.load(top_ps + row), tl.load(top_ks + row)
    temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    is_drawn = temperature > 0
    if _is_listed(temperature, top_k, V, LISTED):
        values = _load(logits, block * BLOCK, V, BLOCK)
        values = tl.where(values == values, values, float("-inf"))
        found = tl.max(tl.reshape(values, (BLOCK // PEAK, PEAK)), 1)
        tl.store(peaks + out * (BLOCK // PEAK) + tl.arange(0, BLOCK // PEAK), found)
        return
    if (top_p < 1.0) & (top_k > 0) & (top_k < V):
        return  # this row's race begins once it is known where the order is cut
    top = tl.load(logits + tl.load(greedy + row)).to(tl.float32)
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
        found = _noisy(found, at, key_a, key_b)
    best = tl.max(found, 0)
    tl.store(scores + out, best)
    tl.store(places + out, tl.min(tl.where((found == best) & (found > float("-inf")), at, V), 0))
    if top_p < 1.0:
        rate = tl.minimum(tl.div_rn(1.4426950408889634, temperature), 1e37)
        tl.store(masses + out, tl.sum(tl.where(values > float("-inf"), tl.exp2((values - top) * rate), 0.0), 0))


@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ks"])
def _limit_kernel(
    temperatures, top_ks, peaks, limits, counts, V, num_peaks, LISTED: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """The largest of a row's peaks from which on there are `top_k` of them; minus infinity if there are fewer."""
    row = tl.program_id(0)
    top_k = tl.load(top_ks + row)
    if _is_listed(tl.load(temperatures + row), top_k, V, LISTED):
        at = tl.arange(0, PEAKS)
        found = tl.load(peaks + row * num_peaks + at, mask=at < num_peaks, other=float("-inf"))
        limit = tl.max(found, 0)
        count = tl.sum((found >= limit).to(tl.int32), 0)
        while (count < top_k) & (limit > float("-inf")):
            limit = tl.max(tl.where(found < limit, found, float("-inf")), 0)
            count = tl.sum((found >= limit).to(tl.int32), 0)
        tl.store(limits + row, limit)
        tl.store(counts + row, 0)


@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ks"])
def _collect_kernel(
    logits, temperatures, top_ks, limits, counts, lists, stride, V,
    LISTED: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The candidates of a block. They come in any order: what orders them is in their keys."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _is_listed(tl.load(temperatures + row), tl.load(top_ks + row), V, LISTED):
        values = _load(logits + row * stride, block * BLOCK, V, BLOCK)
        inside = (values >= tl.load(limits + row)) & (values > float("-inf"))
        num = tl.sum(inside.to(tl.int32), 0)
        if num > 0:
            places = tl.atomic_add(counts + row, num) + tl.cumsum(inside.to(tl.int32), 0) - 1
            keys = order_keys(values, block * BLOCK + tl.arange(0, BLOCK))
            tl.store(lists + row * CANDIDATES + places, keys, mask=inside & (places < CANDIDATES))


@triton.jit
def _is_listed(temperature, top_k, V, LISTED: tl.constexpr):
    """Whether a row's candidates are collected."""
    return (temperature > 0) & (top_k > 0) & (top_k < V) & (top_k <= LISTED)


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
            scores = _noisy(scores, at, key_a, key_b)
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
            scores = _noisy(tl.where(kept, scores, float("-inf")), at, key_a, key_b)
            better = scores > best
            best = tl.where(better, scores, best)
            chosen = tl.where(better, at, chosen)
        values = following
    record = tl.max(best, 0)
    return tl.min(tl.where(best == record, chosen, V), 0)


@triton.jit
def _winner(scores, places, first, num_blocks, V, BLOCKS: tl.constexpr):
    """The token of the best score among some blocks', the lowest id among equals; V if there is none."""
    at = tl.arange(0, BLOCKS)
    found = tl.load(scores + first + at, mask=at < num_blocks, other=float("-inf"))
    tokens = tl.load(places + first + at, mask=at < num_blocks, other=V)
    return tl.min(tl.where(found == tl.max(found, 0), tokens, V), 0)


@triton.jit
def _sum(values, first, num_blocks, BLOCKS: tl.constexpr):
    at = tl.arange(0, BLOCKS)
    return tl.sum(tl.load(values + first + at, mask=at < num_blocks, other=0), 0)


@triton.jit
def _is_kept(num, mass, wanted, target):
    """Whether a token is, before which `num` stand with this mass."""
    return (num == 0) | ((num < wanted) & (mass < target))


@triton.jit
def _decision(place, taken, size, first, num_blocks, wanted, target, V, BLOCKS: tl.constexpr):
    """What a pass in blocks, `taken` `[4, R, num_blocks]` with `size` numbers of each kind, says of a place.

    Returns:
        The place if it is kept, else who wins among those before it; and whether it is still open if that one is kept.
    """
    floats = taken.to(tl.pointer_type(tl.float32))
    num, mass = _sum(taken, first, num_blocks, BLOCKS), _sum(floats + size, first, num_blocks, BLOCKS)
    is_kept = _is_kept(num, mass, wanted, target)
    following = _winner(floats + 2 * size, taken + 3 * size, first, num_blocks, V, BLOCKS)
    return tl.where(is_kept, place, following), tl.where(is_kept | (following >= V), 0, 1)


@triton.jit(do_not_specialize=["num_blocks", "num_rows"], do_not_specialize_on_alignment=SINGLE)
def _round_kernel(
    logits, greedy, temperatures, top_ps, min_ps, top_ks, seeds, positions, masses, scores, places, passes, tested,
    stride, V, num_blocks, num_rows,
    ROUND: tl.constexpr, LISTED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A pass over a block of a row: of the tokens before the place that is tested, number, mass and the race's winner.

    `passes` `[ROUNDS, 4, R, num_blocks]` takes these, the latter as score and token; `tested` `[ROUNDS, 2, R]` the
    place, and whether it is open.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    top_p, top_k = tl.load(top_ps + row), tl.load(top_ks + row)
    by_p, by_k = top_p < 1.0, (top_k > 0) & (top_k < V)
    if (temperature <= 0) | (by_p == by_k) | (by_k & (top_k <= LISTED)):
        return  # nothing is filtered, or the candidates are collected, or the place of the cut is sought
    first, size = row * num_blocks, num_rows * num_blocks
    wanted = tl.where(by_k, top_k, V).to(tl.int32)
    target = float("inf")
    if by_p:
        target = top_p * _sum(masses, first, num_blocks, BLOCKS)
    mine = tested + ROUND * 2 * num_rows + row
    if ROUND == 0:
        place = _winner(scores, places, first, num_blocks, V, BLOCKS)
        is_open = (place < V).to(tl.int32)
    else:
        place, is_open = tl.load(mine - 2 * num_rows), tl.load(mine - num_rows)
        if is_open > 0:
            taken = passes + (ROUND - 1) * 4 * size
            place, is_open = _decision(place, taken, size, first, num_blocks, wanted, target, V, BLOCKS)
    if block == 0:
        tl.store(mine, place)
        tl.store(mine + num_rows, is_open)
    if is_open > 0:
        logits += row.to(tl.int64) * stride
        top = tl.load(logits + tl.load(greedy + row)).to(tl.float32)
        limit = tl.load(logits + place).to(tl.float32)
        rate = tl.minimum(tl.div_rn(1.4426950408889634, temperature), 1e37)
        values = _load(logits, block * BLOCK, V, BLOCK)
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = (values > limit) | ((values == limit) & (at < place))
        num = tl.sum(inside.to(tl.int32), 0)
        mass, best, chosen = 0.0, float("-inf"), V
        if num > 0:
            mass = tl.sum(tl.where(inside, tl.exp2((values - top) * rate), 0.0), 0)
            found = tl.div_rn(values - top, temperature)
            found = tl.where(inside & ((found == 0.0) | (tl.exp(found) >= tl.load(min_ps + row))), found, float("-inf"))
            key_a, key_b = _keys(seeds, positions, row)
            found = _noisy(found, at, key_a, key_b)
            best = tl.max(found, 0)
            chosen = tl.min(tl.where((found == best) & (found > float("-inf")), at, V), 0)
        out = passes + ROUND * 4 * size + first + block
        tl.store(out, num)
        tl.store(out.to(tl.pointer_type(tl.float32)) + size, mass)
        tl.store(out.to(tl.pointer_type(tl.float32)) + 2 * size, best)
        tl.store(out + 3 * size, chosen)


@triton.jit(do_not_specialize=["num_blocks", "num_rows"], do_not_specialize_on_alignment=SINGLE)
def _settle_kernel(
    logits, greedy, temperatures, top_ps, min_ps, top_ks, seeds, positions, masses, scores, places, passes, tested,
    counts, lists, out, stride, V, num_blocks, num_rows,
    ROUNDS: tl.constexpr, LISTED: tl.constexpr, CANDIDATES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
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
    first, size = row * num_blocks, num_rows * num_blocks
    num = CANDIDATES + 1
    if _is_listed(temperature, top_k, V, LISTED) & is_drawn:
        num = tl.load(counts + row)
    if num <= CANDIDATES:
        place = _among_candidates(
            lists + row.to(tl.int64) * CANDIDATES, num, top, rate, temperature, top_p, min_p, top_k.to(tl.int32),
            key_a, key_b, V, LISTED, CANDIDATES,
        )  # fmt: skip
    elif by_k & (by_p | (top_k <= LISTED)):
        if is_drawn:
            cut, allowed, ties = _limits(logits, top, rate, top_p, top_k, V, BLOCK)
            place = _within(logits, top, rate, temperature, min_p, cut, allowed, ties, key_a, key_b, V, BLOCK)
    elif is_drawn & (by_p | by_k):
        target = float("inf")
        if by_p:
            target = top_p * _sum(masses, first, num_blocks, BLOCKS)
        wanted = tl.where(by_k, top_k, V).to(tl.int32)
        if ROUNDS == 0:
            place = _winner(scores, places, first, num_blocks, V, BLOCKS)
            searching = (place < V).to(tl.int32)
        else:
            last = tested + (ROUNDS - 1) * 2 * num_rows + row
            place, searching = tl.load(last), tl.load(last + num_rows)
            if searching > 0:
                taken = passes + (ROUNDS - 1) * 4 * size
                place, searching = _decision(place, taken, size, first, num_blocks, wanted, target, V, BLOCKS)
        while searching > 0:
            num, mass, following = _before(logits, top, rate, temperature, min_p, place, key_a, key_b, V, BLOCK)
            is_kept = _is_kept(num, mass, wanted, target)
            searching = tl.where(is_kept | (following >= V), 0, 1)
            place = tl.where(is_kept, place, following)
    else:
        place = _winner(scores, places, first, num_blocks, V, BLOCKS)
    tl.store(out + row, tl.where(place < V, place, 0).to(tl.int64))


@triton.jit
def _mix(h):
    """As `random._mix`."""
    h = (h ^ ((h >> 16) & 0xFFFF)) * -2048144789
    h = (h ^ ((h >> 13) & 0x7FFFF)) * -1028477387
    return h ^ ((h >> 16) & 0xFFFF)


def draw(
    logits: Tensor,
    p: DrawParams,
    greedy: Tensor | None = None,
    *,
    batch_invariant: bool = False,
    sample_block: int | None = None,
    block: int | None = None,
) -> Tensor:
    """Draw one token per row of `[R, V]` logits: `[R]` int64. Fit for a CUDA graph; rows may be strided.

    Args:
        logits: Any float dtype.
        p: Parameters by row; rows whose temperature is 0 take the best token.
        greedy: `[R]` int64, the best token of each row, where it is known.
        batch_invariant: A row's draw must not depend on how many rows there are, down to how its probabilities are
            summed.
        sample_block: Logits of one program of the first kernel; `SAMPLE_BLOCK` if not given.
        block: Logits that the last works on at once; `BLOCK` if not given.

    Of a row without any finite logit, token 0 comes back.
    """
    sample_block, block = sample_block or SAMPLE_BLOCK, block or BLOCK
    rows, vocab = logits.shape
    greedy = logits.argmax(dim=-1) if greedy is None else greedy
    num_blocks = triton.cdiv(vocab, sample_block)
    masses, scores = torch.empty(2, rows, num_blocks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, num_blocks, dtype=torch.int32, device=logits.device)
    # Rounds sum probabilities by blocks, the last kernel does by larger ones: where that must not tell, one of both.
    rounds, peak = ROUNDS if rows <= FEW_ROWS and not batch_invariant else 0, min(PEAK, sample_block // 4)
    passes = torch.empty(rounds, 4, rows, num_blocks, dtype=torch.int32, device=logits.device)
    tested = torch.empty(rounds, 2, rows, dtype=torch.int32, device=logits.device)
    num_peaks = num_blocks * (sample_block // peak)
    peaks = torch.empty(rows, num_peaks, dtype=torch.float32, device=logits.device)
    limits = torch.empty(rows, dtype=torch.float32, device=logits.device)
    counts = torch.empty(rows, dtype=torch.int32, device=logits.device)
    lists = torch.empty(rows, CANDIDATES, dtype=torch.int64, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    of_row = (logits, greedy, p.temperature, p.top_p, p.min_p, p.top_k, p.seeds, p.positions, masses, scores, places)
    stride, blocks, warps = logits.stride(0), triton.next_power_of_2(num_blocks), max(1, min(8, sample_block // 256))
    _sample_kernel[(rows, num_blocks)](
        *of_row, peaks, stride, vocab, num_blocks, LISTED=LISTED, PEAK=peak, BLOCK=sample_block, num_warps=warps
    )
    _limit_kernel[(rows,)](
        p.temperature, p.top_k, peaks, limits, counts, vocab, num_peaks,
        LISTED=LISTED, PEAKS=triton.next_power_of_2(num_peaks), num_warps=4,
    )  # fmt: skip
    _collect_kernel[(rows, num_blocks)](
        logits, p.temperature, p.top_k, limits, counts, lists, stride, vocab,
        LISTED=LISTED, CANDIDATES=CANDIDATES, BLOCK=sample_block, num_warps=warps,
    )  # fmt: skip
    for num in range(rounds):
        _round_kernel[(rows, num_blocks)](
            *of_row, passes, tested, stride, vocab, num_blocks, rows,
            ROUND=num, LISTED=LISTED, BLOCKS=blocks, BLOCK=sample_block, num_warps=warps,
        )  # fmt: skip
    _settle_kernel[(rows,)](
        *of_row, passes, tested, counts, lists, out, stride, vocab, num_blocks, rows,
        ROUNDS=rounds, LISTED=LISTED, CANDIDATES=CANDIDATES, BLOCKS=blocks, BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
    )  # fmt: skip
    return out


def draw_rows(logits: Tensor, greedy: Tensor, *params: Tensor, batch_invariant: bool) -> Tensor:
    """See `dovetail.sdk.draws.draw`."""
    return draw(logits, DrawParams(*params), greedy, batch_invariant=batch_invariant)
