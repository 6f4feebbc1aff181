"""What stands around the model in a step, in plain torch: masks, a step's inputs, its best tokens, changes of rows.

Meanings of operations of `dovetail.contracts.kernels.OPS`: none waits on the host, so a graph can hold each. T rows of
the batch, S device rows, V vocabulary size, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.sdk.rows import FLOATS, NUMBERS


def allowed_by(mask: Tensor, vocab: int) -> Tensor:
    """Return which tokens masks `[K, W]` int32 allow, `[K, V]` bool: bit `t % 32` of word `t // 32` is token `t`'s."""
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    return (mask[:, :, None] >> shifts & 1).flatten(1)[:, :vocab].bool()


def mask_logits(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """Add -inf to the logits of tokens that are not allowed, in place.

    So NaN stays NaN and infinity becomes NaN, for the sampler to find: a model whose output is not finite is at fault
    also where no row allows the token.

    Args:
        logits: `[T, V]` float32.
        mask: `[K, W]` int32, W = ceil(V / 32) words; bit `t % 32` of word `t // 32` is 1 where token `t` is allowed.
        rows: `[K]` int64, ascending without repeats; row `rows[k]` of the logits gets `mask[k]`.
    """
    allowed = allowed_by(mask, logits.shape[1])
    logits[rows] = torch.where(allowed, logits[rows], logits[rows] + float("-inf"))


def begin_step(
    rows: Tensor, next_ids: Tensor, seq_lens: Tensor, page_table: Tensor, page_size: int, spare: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gather the next decode step of rows.

    Args:
        rows: `[T]` int64, device rows.
        next_ids: `[S]` int64, the token that each reads next.
        seq_lens: `[S]` int64, tokens that it has read.
        page_table: `[S, max_pages]` int32, its pages; 0: none.
        page_size: Tokens of a page.
        spare: The row of padding.

    Returns:
        `[T]` int64 each: tokens, their places, where their keys and values go (-1 for the spare row, and where there is
        no page), and lengths once these are written.
    """
    positions = seq_lens[rows]
    column = (positions // page_size).clamp(max=page_table.shape[1] - 1)
    pages = torch.where(positions // page_size < page_table.shape[1], page_table[rows, column], 0).long()
    has_place = (rows != spare) & (pages != 0)
    slots = torch.where(has_place, pages * page_size + positions % page_size, -1)
    return next_ids[rows], positions, slots, positions + 1


def finish_step(
    logits: Tensor, rows: Tensor, lens: Tensor, next_ids: Tensor, seq_lens: Tensor, spare: int
) -> tuple[Tensor, Tensor]:
    """Take the best token of each row as its next input, and its length from now on; the spare row stays empty.

    Args:
        logits: `[T, V]`.
        rows: `[T]` int64, device rows.
        lens: `[T]` int64, KV lengths.
        next_ids: `[S]` int64, changed.
        seq_lens: `[S]` int64, changed.
        spare: The row of padding.

    Returns:
        Tokens `[T]` int64, the lowest id among equals, and `[T]` bool: rows whose best logit is not finite. Their
        best token is undefined.
    """
    best, ids = logits.max(dim=-1)
    is_spare = rows == spare
    next_ids.index_copy_(0, rows, torch.where(is_spare, next_ids[rows], ids))
    seq_lens.index_copy_(0, rows, torch.where(is_spare, seq_lens[rows], lens))
    return ids, ~torch.isfinite(best)


def check_finite(hidden: Tensor, starts: Tensor, non_finite: Tensor) -> None:
    """Note in `non_finite` which requests have a token whose final hidden state is not finite.

    Args:
        hidden: `[T, H]`; tokens from the last entry of `starts` on are padding.
        starts: `[B + 1]` int32, first token of each request.
        non_finite: `[B]` bool, changed: what is set stays set.
    """
    least, most = hidden.aminmax(dim=-1)
    bad = ~(torch.isfinite(least) & torch.isfinite(most))
    before = torch.nn.functional.pad(bad.cumsum(0), (1, 0))[starts.long()]
    non_finite |= before[1:] != before[:-1]


def write_changes(
    sent: Tensor,
    tables: Tensor,
    next_ids: Tensor,
    seq_lens: Tensor,
    floats: Tensor,
    numbers: Tensor,
    num_entries: int,
    num_cleared: int,
    num_admits: int,
) -> None:
    """Write what a step says of rows: E entries of page tables, C rows that are cleared, A that are taken.

    Args:
        sent: `[2 E + C + A (1 + F + N)]` int64: places in the page tables, their pages; rows that are cleared; rows
            that are taken, and by name the bits of their float32 `FLOATS` and their `NUMBERS`.
        tables: `[G, S, max_pages]` int32, changed.
        next_ids: `[S]` int64, 0 afterwards for rows that are cleared.
        seq_lens: `[S]` int64, likewise.
        floats: `[F, S]` float32, changed for rows that are taken.
        numbers: `[N, S]` int64, likewise.
        num_entries: E.
        num_cleared: C.
        num_admits: A.
    """
    width = num_admits * (1 + len(FLOATS) + len(NUMBERS))
    entries, cleared, admits = torch.split(sent, [2 * num_entries, num_cleared, width])
    if num_entries:
        places, pages = entries.view(2, -1)
        tables.view(-1).index_copy_(0, places, pages.to(torch.int32))
    if num_cleared:
        next_ids.index_fill_(0, cleared, 0)
        seq_lens.index_fill_(0, cleared, 0)
    if num_admits:
        rows, bits, given = torch.split(admits.view(-1, num_admits), [1, len(FLOATS), len(NUMBERS)])
        floats.index_copy_(1, rows[0], bits.to(torch.int32).view(torch.float32))
        numbers.index_copy_(1, rows[0], given)
