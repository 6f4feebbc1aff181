"""What stands before and behind a draw in a graph: masks, penalties and biases; counts and log probabilities.

`dovetail.sdk.draws` is the reference: this does the same for the rows of a captured step, from what the device knows
of them. Four kernels around those of the draw: `adjust` and `gather` before it, `rank` and `pack_logprobs` behind it.

B rows of the batch, S device rows, V vocabulary size, W = ceil(V / 32) words of a mask, N slots of counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.sdk.rows import MAX_BIAS, MAX_STOPS, MAX_TOP, PACKED, DrawParams, RowTable
from dovetail_backends.kernels.triton.draw import _load, draw, order_keys

BLOCK = 4096
"""Logits that one program adjusts."""
RANKED = 8192
"""Logits whose most likely tokens one program lists."""


@triton.jit
def _adjust_kernel(
    logits, rows, lines, masks, seq_lens, num_prompt, min_tokens, stops, floats, slots, num_bias, said, read,
    bias_ids, bias, out, values, places,
    V, W, stride, num_rows, num_blocks, MAX_STOPS: tl.constexpr, MAX_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a row's logits with its mask, penalties, biases and bans; the best of these, and its lowest id."""
    i, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + i)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    x = tl.load(logits + i * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    line = tl.load(lines + i).to(tl.int64)
    yields = line < -1  # a minimum length, to a mask of nothing but ends
    line = tl.where(yields, -2 - line, line)
    if line >= 0:
        words = tl.load(masks + line * W + at // 32, mask=inside, other=0)
        x = tl.where(((words >> (at % 32)) & 1) == 0, x + float("-inf"), x)  # infinity becomes NaN
    slot = tl.load(slots + row)
    if slot >= 0:
        frequency, presence = tl.load(floats + 3 * num_rows + row), tl.load(floats + 4 * num_rows + row)
        repetition = tl.load(floats + 5 * num_rows + row)
        num = tl.load(said + slot * V + at, mask=inside, other=0)
        was_read = tl.load(read + slot * V + at, mask=inside, other=0) != 0
        scaled = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(was_read | (num > 0), scaled, x)
        x -= frequency * num.to(tl.float32) + tl.where(num > 0, presence, 0.0)
    for j in range(0, tl.load(num_bias + row).to(tl.int32)):
        token = tl.load(bias_ids + row * MAX_BIAS + j)
        x = tl.where(at == token, x + tl.load(bias + row * MAX_BIAS + j), x)
    is_early = tl.load(seq_lens + row) - tl.load(num_prompt + row) < tl.load(min_tokens + row)
    if is_early & (not yields):
        for j in range(0, MAX_STOPS):
            x = tl.where(at == tl.load(stops + row * MAX_STOPS + j), x + float("-inf"), x)
    tl.store(out + i * V + at, x, mask=inside)
    x = tl.where(x != x, float("-inf"), x)
    best = tl.max(x, 0)
    tl.store(values + i * num_blocks + block, best)
    tl.store(places + i * num_blocks + block, tl.min(tl.where((x == best) & inside, at, V - 1), 0))


def adjust(
    logits: Tensor,
    rows: Tensor,
    lines: Tensor,
    masks: Tensor,
    seq_lens: Tensor,
    table: RowTable,
    said: Tensor,
    read: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Apply masks, penalties, biases and minimum lengths.

    Args:
        logits: `[B, V]`, any float dtype; not changed.
        rows: `[B]` int64, device rows.
        lines: `[B]` int32, which of the masks each row has.
        masks: `[K, W]` int32, a bit for each token that is allowed.
        seq_lens: `[S]` int64, as for `gather`.
        table: Of the device rows.
        said: `[N, V]` int32, what slots have said.
        read: `[N, V]` bool, what they have read.

    Returns:
        `[B, V]` float32; and for `gather` the best value of each block and its place.
    """
    num, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, BLOCK)
    out = torch.empty(num, vocab, dtype=torch.float32, device=logits.device)
    values = torch.empty(num, num_blocks, dtype=torch.float32, device=logits.device)
    places = torch.empty(num, num_blocks, dtype=torch.int32, device=logits.device)
    _adjust_kernel[(num, num_blocks)](
        logits, rows, lines, masks, seq_lens, table.number("num_prompt"), table.number("min_tokens"), table.stops,
        table.floats, table.number("slot"), table.number("num_bias"),
        said, read.view(torch.uint8), table.bias_ids, table.bias, out, values, places,
        vocab, masks.shape[1], logits.stride(0), table.floats.shape[1], num_blocks,
        MAX_STOPS=MAX_STOPS, MAX_BIAS=MAX_BIAS, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return out, (values, places)


SINGLE = ["temperatures", "top_ps", "min_ps", "top_ks", "seeds", "positions", "values", "places", "greedy"]
"""As `draw.SINGLE`."""


@triton.jit(do_not_specialize=["num", "num_rows", "num_blocks"], do_not_specialize_on_alignment=SINGLE)
def _gather_kernel(
    rows, seq_lens, floats, numbers, temperatures, top_ps, min_ps, top_ks, seeds, positions, values, places, greedy,
    num, num_rows, V, num_blocks, HAS_BEST: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """What draws the next token of a row; and the best of its adjusted logits."""
    i = tl.program_id(0)
    row = tl.load(rows + i)
    tl.store(temperatures + i, tl.load(floats + row))
    tl.store(top_ps + i, tl.load(floats + num_rows + row))
    tl.store(min_ps + i, tl.load(floats + 2 * num_rows + row))
    tl.store(top_ks + i, tl.load(numbers + row))
    tl.store(seeds + i, tl.load(numbers + num_rows + row))
    tl.store(positions + i, tl.load(seq_lens + row) - tl.load(numbers + 2 * num_rows + row))
    if HAS_BEST:
        at = tl.arange(0, BLOCKS)
        inside = at < num_blocks
        x = tl.load(values + i * num_blocks + at, mask=inside, other=float("-inf"))
        place = tl.load(places + i * num_blocks + at, mask=inside, other=V - 1)
        tl.store(greedy + i, tl.min(tl.where(x == tl.max(x, 0), place, V - 1), 0).to(tl.int64))


def gather(
    rows: Tensor,
    seq_lens: Tensor,
    floats: Tensor,
    numbers: Tensor,
    best: tuple[Tensor, Tensor] | None,
    vocab: int,
) -> tuple[DrawParams, Tensor]:
    """Gather what draws for device rows `[B]` take.

    Args:
        rows: `[B]` int64.
        seq_lens: `[S]` int64, tokens of each device row; so many more than its prompt has has it generated.
        floats: `[F, S]`, of the device rows.
        numbers: `[N, S]`.
        best: What `adjust` found, or None.
        vocab: V.

    Returns:
        Parameters of B rows, and with `best` the best token of each, `[B]` int64.
    """
    num = rows.shape[0]
    p = DrawParams.uninitialised(num, rows.device)
    greedy = torch.empty(num, dtype=torch.int64, device=rows.device)
    values, places = best or (greedy, greedy)
    num_blocks = values.shape[1] if best else 1
    _gather_kernel[(num,)](
        rows, seq_lens, floats, numbers, *p.tensors(), values, places, greedy,
        num, floats.shape[1], vocab, num_blocks,
        HAS_BEST=best is not None, BLOCKS=triton.next_power_of_2(num_blocks), num_warps=1,
    )  # fmt: skip
    return p, greedy


@triton.jit
def _rank_kernel(logits, rows, num_top, tops, sums, lists, V, stride, num_blocks, LISTED: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Of a block of a row whose log probabilities are asked for: largest logit, sum, and the most likely tokens."""
    i, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num = tl.load(num_top + tl.load(rows + i)).to(tl.int32)
    if num < 0:
        return
    x = _load(logits + i * stride, block * BLOCK, V, BLOCK)
    top = tl.max(x, 0)
    tl.store(tops + i * num_blocks + block, top)
    tl.store(sums + i * num_blocks + block, tl.sum(tl.where(x > float("-inf"), tl.exp(x - top), 0.0), 0))
    at = block * BLOCK + tl.arange(0, BLOCK)
    keys = tl.where(at < V, order_keys(x, at), -0x7FFFFFFFFFFFFFFF)
    for j in range(0, tl.minimum(num, LISTED)):
        best = tl.max(keys, 0)
        tl.store(lists + (i * num_blocks + block) * LISTED + j, best)
        keys = tl.where(keys == best, -0x7FFFFFFFFFFFFFFF, keys)


@triton.jit
def _pack_logprobs_kernel(
    logits, rows, ids, next_ids, slots, num_top, said, tops, sums, lists, out, spare, V, stride, num_blocks,
    LISTED: tl.constexpr, BLOCKS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Let a row go on behind its token, count this, and say what is asked for of its log probability."""
    i = tl.program_id(0).to(tl.int64)
    row, token = tl.load(rows + i), tl.load(ids + i)
    if row != spare:
        tl.store(next_ids + row, token)
        slot = tl.load(slots + row)
        if slot >= 0:
            tl.store(said + slot * V + token, tl.load(said + slot * V + token) + 1)
    num = tl.load(num_top + row).to(tl.int32)
    if num < 0:
        return
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    tops_here = tl.load(tops + i * num_blocks + block, mask=inside, other=float("-inf"))
    top = tl.max(tops_here, 0)
    parts = tl.load(sums + i * num_blocks + block, mask=inside, other=0.0)
    whole = tl.log(tl.sum(tl.where(parts > 0, parts * tl.exp(tops_here - top), 0.0), 0))
    out += i * PACKED
    floats = out.to(tl.pointer_type(tl.float32))
    tl.store(out, token.to(tl.int32))
    tl.store(floats + 1, tl.load(logits + i * stride + token).to(tl.float32) - top - whole)
    lists += (i * num_blocks + block) * LISTED
    heads = tl.load(lists, mask=inside, other=-0x7FFFFFFFFFFFFFFF)
    taken = tl.zeros([BLOCKS], tl.int32)
    for j in range(0, tl.minimum(num, LISTED)):
        best = tl.max(heads, 0)
        rank = (best >> 32).to(tl.int32)
        value = tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)
        tl.store(floats + 2 + j, value - top - whole)
        tl.store(out + 2 + LISTED + j, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32))
        mine = heads == best
        taken += mine.to(tl.int32)
        following = tl.load(lists + taken, mask=mine & (taken < num), other=-0x7FFFFFFFFFFFFFFF)
        heads = tl.where(mine, following, heads)


def pack_logprobs(
    logits: Tensor, rows: Tensor, ids: Tensor, next_ids: Tensor, table: RowTable, said: Tensor, spare: int
) -> Tensor:
    """Take tokens as the next inputs of their rows, count them, and rank what is asked for.

    Args:
        logits: `[B, V]`, the model's own.
        rows: `[B]` int64, device rows.
        ids: `[B]` int64, their tokens.
        next_ids: `[S]` int64, changed, but for the spare row's.
        table: Of the device rows.
        said: `[N, V]` int32, changed for rows whose tokens are counted.
        spare: The row of padding.

    Returns:
        `[B, PACKED]` int32, for rows with `num_top` of 0 or more: the token, the bits of its log probability and of
        those of the `num_top` most likely tokens, best first, and from column `2 + MAX_TOP` on these tokens.
    """
    num, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, RANKED)
    tops, sums = torch.empty(2, num, num_blocks, dtype=torch.float32, device=logits.device)
    lists = torch.empty(num, num_blocks, MAX_TOP, dtype=torch.int64, device=logits.device)
    out = torch.empty(num, PACKED, dtype=torch.int32, device=logits.device)
    _rank_kernel[(num, num_blocks)](
        logits, rows, table.number("num_top"), tops, sums, lists, vocab, logits.stride(0), num_blocks,
        LISTED=MAX_TOP, BLOCK=RANKED, num_warps=8,
    )  # fmt: skip
    _pack_logprobs_kernel[(num,)](
        logits, rows, ids, next_ids, table.number("slot"), table.number("num_top"), said, tops, sums, lists, out,
        spare, vocab, logits.stride(0), num_blocks,
        LISTED=MAX_TOP, BLOCKS=triton.next_power_of_2(num_blocks), PACKED=PACKED, num_warps=1,
    )  # fmt: skip
    return out


def draw_plainly(
    logits: Tensor, greedy: Tensor, rows: Tensor, next_ids: Tensor, seq_lens: Tensor, floats: Tensor, numbers: Tensor,
    *, batch_invariant: bool,
) -> Tensor:  # fmt: skip
    """See `dovetail.sdk.draws.draw_plainly`."""
    p, _ = gather(rows, seq_lens, floats, numbers, None, logits.shape[1])
    ids = draw(logits, p, greedy, batch_invariant=batch_invariant)
    next_ids.index_copy_(0, rows, ids)
    return ids


def draw_adjusted(
    logits: Tensor, rows: Tensor, lines: Tensor, masks: Tensor, next_ids: Tensor, seq_lens: Tensor, floats: Tensor,
    numbers: Tensor, stops: Tensor, bias_ids: Tensor, bias: Tensor, said: Tensor, read: Tensor, spare: int,
    *, batch_invariant: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `dovetail.sdk.draws.draw_adjusted`."""
    table = RowTable(floats, numbers, stops, bias_ids, bias)
    adjusted, best = adjust(logits, rows, lines, masks, seq_lens, table, said, read)
    p, greedy = gather(rows, seq_lens, floats, numbers, best, logits.shape[1])
    ids = draw(adjusted, p, greedy, batch_invariant=batch_invariant)
    return ids, pack_logprobs(logits, rows, ids, next_ids, table, said, spare)
