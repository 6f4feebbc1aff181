"""Draws tokens from logits with temperature, top-k, top-p and min-p, in plain torch; and all that stands around a draw.

Meanings of operations of `dovetail.contracts.kernels.OPS`. T rows, V vocabulary size, K candidates, S device rows. A
row draws by the exponential race: the token with the largest `logit / temperature - log(e)` wins, `e` being a unit
exponential of (seed, position, token). The score of a token does not depend on the filters or on the other rows;
filters only say which tokens take part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.contracts.seeds import MIX_A, MIX_B, OFFSET, POSITION_FACTOR, SEED_FACTOR, signed64
from dovetail.sdk.rows import MAX_BIAS, MAX_TOP, NOTHING, DrawParams, RowTable
from dovetail.sdk.step import allowed_by

CANDIDATES = 1024
"""Rows whose filters leave at most this many tokens are never sorted in full."""
BLOCK = 1 << 19
"""Logits that are worked on at once on the CPU: what is made of them stays in its caches and needs no fresh pages."""


# Random numbers by counting: a draw is a function of (seed, position, token), of nothing else.
#
# So a seeded request draws the same tokens whatever else is in its batch, on CPU and GPU alike. 32-bit integer
# arithmetic only, which every device does the same way; the finalizer is MurmurHash3's (Austin Appleby, public domain).


def exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    """Unit exponential numbers, one per row and token.

    Args:
        keys: `[R, 2]` int32 from `row_keys`.
        tokens: `[V]` or `[R, K]` int32 token ids.

    Returns:
        `[R, V]` or `[R, K]` float32, each above zero. `argmax(p / e)` draws from `p` (the exponential race).
    """
    h = _mix(tokens ^ keys[:, :1])
    h = _mix(h ^ keys[:, 1:])
    uniform = ((h >> 9 & 0x7FFFFF).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(uniform)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """As `seeds.row_key`, of rows: `[R]` and `[R]` int64 to `[R, 2]` int32. 64-bit integers wrap around."""
    z = seeds * signed64(SEED_FACTOR) + positions * signed64(POSITION_FACTOR) + signed64(OFFSET)
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * signed64(MIX_A)
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * signed64(MIX_B)
    z = z ^ (z >> 31 & (1 << 33) - 1)
    return z.view(torch.int32).view(-1, 2)


def _mix(h: Tensor) -> Tensor:
    h = (h ^ (h >> 16 & 0xFFFF)) * -2048144789  # 0x85EBCA6B
    h = (h ^ (h >> 13 & 0x7FFFF)) * -1028477387  # 0xC2B2AE35
    return h ^ (h >> 16 & 0xFFFF)


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """`(logits - max) / temperature` `[R, V]` float32; the maximum first: a tiny temperature must not overflow."""
    safe = torch.where(temperature > 0, temperature, 1.0)
    return (logits - logits.max(dim=-1, keepdim=True).values) / safe[:, None]


def draw(
    logits: Tensor,
    greedy: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Draw one token per row, `[T, V]` to `[T]` int64.

    Args:
        logits: Any float dtype; not changed.
        greedy: `[T]` int64, the best token of each row; rows with temperature 0 take it.
        temperature: `[T]` float32, as the next five: see `DrawParams`.
        top_p: `[T]` float32.
        min_p: `[T]` float32.
        top_k: `[T]` int64.
        seeds: `[T]` int64.
        positions: `[T]` int64.
    """
    p = DrawParams(temperature, top_p, min_p, top_k, seeds, positions)
    rows = max(1, BLOCK // logits.shape[-1]) if logits.is_cpu else len(logits)
    parts = [_draw_block(logits[i : i + rows], p.rows(slice(i, i + rows))) for i in range(0, len(logits), max(1, rows))]
    found = parts[0] if len(parts) == 1 else torch.cat([greedy[:0], *parts])
    return torch.where(temperature > 0, found, greedy)


def _draw_block(logits: Tensor, p: DrawParams) -> Tensor:
    scores = scaled(logits.float(), p.temperature)
    on = _is_filtered(p)
    if not on.any():
        return draw_any(scores, p)
    found = draw_short(scores, p, min(CANDIDATES, logits.shape[-1]))
    return found if on.all() else torch.where(on, found, draw_any(scores, p))


def draw_short(scores: Tensor, p: DrawParams, width: int) -> Tensor:
    """`draw_filtered` with a short list of candidates, and with all tokens for the rows where it is too short."""
    found, enough = draw_filtered(scores, p, width)
    again = torch.nonzero(_is_filtered(p) & ~enough)[:, 0]
    if len(again) == 0:
        return found
    return found.index_copy(0, again, draw_filtered(scores[again], p.rows(again), scores.shape[-1])[0])


def _is_filtered(p: DrawParams) -> Tensor:
    return (p.top_k > 0) | (p.top_p < 1) | (p.min_p > 0)


def draw_any(scores: Tensor, p: DrawParams) -> Tensor:
    """Draw from all tokens; `[R, V]` scaled logits to `[R]` int64."""
    tokens = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    return (scores - exponentials(row_keys(p.seeds, p.positions), tokens).log()).argmax(dim=-1)


def draw_filtered(scores: Tensor, p: DrawParams, width: int) -> tuple[Tensor, Tensor]:
    """Draw from what the filters leave of the `width` best tokens.

    Returns:
        Tokens `[R]` int64, and `[R]` bool: whether the filters of the row provably cut within `width` tokens. Where
        not, the token is not valid and the row has to be drawn again with a larger width.
    """
    vocab = scores.shape[-1]
    best, tokens = _ordered(scores, width)
    probs = (best - scores.logsumexp(dim=-1, keepdim=True)).exp()
    races = best - exponentials(row_keys(p.seeds, p.positions), tokens.to(torch.int32)).log()
    kept = keep_mask(probs, p)
    chosen = torch.where(kept, races, float("-inf")).argmax(dim=-1, keepdim=True)
    # Where the last candidate's equals are kept, some of them may be missing from the list.
    is_clear = ~(kept & (best == best[:, -1:])).any(dim=-1)
    return tokens.gather(1, chosen)[:, 0], _enough(probs, p, width == vocab) & (is_clear | (width == vocab))


def _ordered(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best scores and their tokens, equal ones by token."""
    if width == scores.shape[-1]:
        best, tokens = scores.sort(dim=-1, descending=True, stable=True)
        return best, tokens
    tokens = scores.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
    best, order = scores.gather(1, tokens).sort(dim=-1, descending=True, stable=True)
    return best, tokens.gather(1, order)


def _enough(probs: Tensor, p: DrawParams, is_all: bool) -> Tensor:
    if is_all:
        return torch.ones_like(p.top_k, dtype=torch.bool)
    by_k = (p.top_k > 0) & (p.top_k <= probs.shape[1])
    by_p = (p.top_p < 1) & (probs.sum(-1) >= p.top_p + 1e-4)
    by_min = (p.min_p > 0) & (probs[:, -1] < p.min_p * probs[:, 0])
    return by_k | by_p | by_min


def keep_mask(probs: Tensor, p: DrawParams) -> Tensor:
    """Which of the sorted probabilities `[R, K]` survive top-k, then top-p of what is left, then min-p.

    The most likely token always survives. Top-p keeps the smallest set whose mass reaches `top_p` of what top-k left.
    """
    width = probs.shape[1]
    top_k = torch.where(p.top_k > 0, p.top_k, width)[:, None]
    top_p, min_p = p.top_p[:, None], p.min_p[:, None]
    kept = torch.arange(width, device=probs.device) < top_k
    left = torch.where(kept, probs, 0.0)
    before = left.cumsum(-1) - left
    total = torch.where(top_k < width, left.sum(-1, keepdim=True), 1.0)
    kept &= (top_p >= 1) | (before < top_p * total)
    kept &= probs >= min_p * probs[:, :1]
    return torch.cat((torch.ones_like(kept[:, :1]), kept[:, 1:]), dim=-1)


def draw_plainly(
    logits: Tensor,
    greedy: Tensor,
    rows: Tensor,
    next_ids: Tensor,
    seq_lens: Tensor,
    floats: Tensor,
    numbers: Tensor,
) -> Tensor:
    """Draw for every row of a batch by temperature and filters; nothing waits on the host.

    Args:
        logits: `[T, V]`, any float dtype; not changed.
        greedy: `[T]` int64, the best token of each row.
        rows: `[T]` int64, device rows.
        next_ids: `[S]` int64, changed: the tokens are the next inputs of their rows.
        seq_lens: `[S]` int64, tokens that each row has read.
        floats: `[F, S]` float32, see `rows.FLOATS`.
        numbers: `[N, S]` int64, see `rows.NUMBERS`.

    Returns:
        Tokens `[T]` int64.
    """
    ids = _draw_row(logits, greedy, rows, seq_lens, floats, numbers)
    next_ids.index_copy_(0, rows, ids)
    return ids


def draw_adjusted(
    logits: Tensor,
    rows: Tensor,
    lines: Tensor,
    masks: Tensor,
    next_ids: Tensor,
    seq_lens: Tensor,
    floats: Tensor,
    numbers: Tensor,
    stops: Tensor,
    bias_ids: Tensor,
    bias: Tensor,
    said: Tensor,
    read: Tensor,
    spare: int,
) -> tuple[Tensor, Tensor]:
    """Draw as `draw_plainly` does, with masks, penalties, biases and minimum lengths; count; rank what is asked for.

    Args:
        logits: `[T, V]`, the model's own; not changed.
        rows: `[T]` int64, device rows.
        lines: `[T]` int32, which mask each row has; `NOTHING`; or `NOTHING - 1 - mask`, where a minimum length
            gives way.
        masks: `[K, W]` int32, a bit for each token that is allowed.
        next_ids: `[S]` int64, changed, but for the spare row's.
        seq_lens: `[S]` int64, tokens that each row has read.
        floats: `[F, S]` float32, as the next four: see `RowTable`.
        numbers: `[N, S]` int64.
        stops: `[S, MAX_STOPS]` int64.
        bias_ids: `[S, MAX_BIAS]` int32.
        bias: `[S, MAX_BIAS]` float32.
        said: `[N, V]` int32, how often each slot has said each token; changed for rows whose tokens are counted.
        read: `[N, V]` bool, which tokens are in its prompt.
        spare: The row of padding.

    Returns:
        Tokens `[T]` int64; and `[T, PACKED]` int32, for rows with `num_top` of 0 or more: the token, the bits of its
        log probability and of those of the `num_top` most likely tokens, best first, and from column `2 + MAX_TOP` on
        these tokens. What stands in other places means nothing.
    """
    table = RowTable(floats, numbers, stops, bias_ids, bias)
    slots = table.number("slot")[rows]
    x = adjust(logits.float(), rows, lines, masks, seq_lens, table, said, read)
    greedy = torch.where(x.isnan(), float("-inf"), x).max(dim=-1).indices
    ids = _draw_row(x, greedy, rows, seq_lens, floats, numbers)
    is_spare = rows == spare
    next_ids.index_copy_(0, rows, torch.where(is_spare, next_ids[rows], ids))
    said.index_put_((slots.clamp(min=0), ids), ((slots >= 0) & ~is_spare).int(), accumulate=True)
    return ids, ranked(logits, ids)


def adjust(
    x: Tensor,
    rows: Tensor,
    lines: Tensor,
    masks: Tensor,
    seq_lens: Tensor,
    table: RowTable,
    said: Tensor,
    read: Tensor,
) -> Tensor:
    """Return float32 logits `[T, V]` with masks, penalties, biases and minimum lengths; operands of `draw_adjusted`."""
    yields, banned = lines < NOTHING, float("-inf")
    line = torch.where(yields, NOTHING - 1 - lines, lines).long()
    allowed = allowed_by(masks[line.clamp(min=0)], x.shape[1]) | (line < 0)[:, None]
    x = torch.where(allowed, x, x + banned)  # infinity becomes NaN
    slot = table.number("slot")[rows]
    has_slot, at = (slot >= 0)[:, None], slot.clamp(min=0)
    num = torch.where(has_slot, said[at], 0)
    frequency, presence, repetition = table.floats[3:6].index_select(1, rows)[:, :, None]
    scaled = torch.where(x > 0, x / repetition, x * repetition)
    penalised = torch.where(read[at] | (num > 0), scaled, x)
    penalised = penalised - (frequency * num + torch.where(num > 0, presence, 0.0))
    x = torch.where(has_slot, penalised, x)
    is_biased = torch.arange(MAX_BIAS, device=x.device) < table.number("num_bias")[rows, None]
    x = x.scatter_add(1, table.bias_ids[rows].long(), torch.where(is_biased, table.bias[rows], 0.0))
    is_early = seq_lens[rows] - table.number("num_prompt")[rows] < table.number("min_tokens")[rows]
    stops = table.stops[rows]
    added = torch.where((is_early & ~yields)[:, None] & (stops >= 0), banned, 0.0)
    return x.scatter_add(1, stops.clamp(min=0), added)


def ranked(logits: Tensor, ids: Tensor) -> Tensor:
    """Return what `draw_adjusted` says of tokens `[T]` and of the most likely, `[T, PACKED]`, of logits `[T, V]`."""
    wide = logits.float()
    logprobs = wide.log_softmax(dim=-1)
    order = wide.sort(dim=-1, descending=True, stable=True).indices[:, :MAX_TOP]
    missing = MAX_TOP - order.shape[1]
    values = torch.nn.functional.pad(logprobs.gather(1, order), (0, missing)).view(torch.int32)
    chosen = logprobs.gather(1, ids[:, None]).view(torch.int32)
    tops = torch.nn.functional.pad(order, (0, missing)).int()
    return torch.cat((ids[:, None].int(), chosen, values, tops), dim=1)


def _draw_row(
    logits: Tensor, greedy: Tensor, rows: Tensor, seq_lens: Tensor, floats: Tensor, numbers: Tensor
) -> Tensor:
    """Draw for device rows by what the device knows of them, from all tokens in order."""
    p = DrawParams.of_rows(rows, seq_lens[rows] - numbers[2][rows], floats, numbers)
    scores = scaled(logits.float(), p.temperature)
    by_filter, _ = draw_filtered(scores, p, scores.shape[-1])
    found = torch.where(_is_filtered(p), by_filter, draw_any(scores, p))
    return torch.where(p.temperature > 0, found, greedy)
