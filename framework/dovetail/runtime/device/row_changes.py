"""What a step changes of the device rows, as one array: packed on the host, sent at once, written by one kernel.

E page table entries, C rows that are cleared, A requests that take rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dovetail.messages.seeds import signed64
from dovetail.messages.step import Admit, Ints
from dovetail.runtime.device.row_fields import FLOATS, MAX_BIAS, NOTHING, NUMBERS, Changes, Longs

if TYPE_CHECKING:
    from dovetail.runtime.device.row_params import RowParams


def pack(places: Longs, pages: Ints, cleared: Sequence[Ints], admits: Sequence[Admit]) -> Changes:
    """Pack entries at `places` `[E]`, rows that are cleared, and the parameters of requests that take rows."""
    parts: list[npt.NDArray[np.integer]] = [places, pages, *cleared]
    if admits:
        params = [admit.params for admit in admits]
        floats = np.array([[getattr(p, name) for p in params] for name in FLOATS])
        # 0 where nothing is banned: the row still has the stop ids of whoever had it.
        least = [admit.params.min_tokens if admit.stop_ids else 0 for admit in admits]
        numbers = [
            [p.top_k for p in params],
            [signed64(a.seed) for a in admits],
            [a.num_prompt for a in admits],
            least,
            [NOTHING] * len(admits),  # until its tokens are counted
            [NOTHING if p.logprobs is None else p.logprobs for p in params],
            [len(p.logit_bias) if len(p.logit_bias) <= MAX_BIAS else 0 for p in params],
        ]
        rows = np.array([[admit.row for admit in admits]])
        parts += [rows.ravel(), floats.astype(np.float32).view(np.int32).ravel(), np.array(numbers).ravel()]
    return Changes(np.concatenate(parts, dtype=np.int64), len(places), sum(map(len, cleared)), len(admits))


def write_changes(
    sent: Tensor, changes: Changes, tables: Tensor, next_ids: Tensor, seq_lens: Tensor, params: RowParams
) -> None:
    """Write changes to the device.

    Args:
        sent: `changes.packed` on the device.
        changes: Their numbers.
        tables: `[G, S, max_pages]` int32, changed.
        next_ids: `[S]` int64, 0 afterwards for rows that are cleared.
        seq_lens: `[S]` int64, likewise.
        params: Changed for rows that are taken.
    """
    if sent.is_cuda:
        from dovetail.runtime.device import row_changes_triton  # imports Triton, which only CUDA tensors need

        row_changes_triton.write_changes(sent, changes, tables, next_ids, seq_lens, params)
    else:
        write_changes_reference(sent, changes, tables, next_ids, seq_lens, params)


def write_changes_reference(
    sent: Tensor, changes: Changes, tables: Tensor, next_ids: Tensor, seq_lens: Tensor, params: RowParams
) -> None:
    """As `write_changes`, in torch."""
    entries, cleared, admits = torch.split(sent, [2 * changes.num_entries, changes.num_cleared, _admit_len(changes)])
    if changes.num_entries:
        places, pages = entries.view(2, -1)
        tables.view(-1).index_copy_(0, places, pages.to(torch.int32))
    if changes.num_cleared:
        next_ids.index_fill_(0, cleared, 0)
        seq_lens.index_fill_(0, cleared, 0)
    if changes.num_admits:
        rows, floats, numbers = torch.split(admits.view(-1, changes.num_admits), [1, len(FLOATS), len(NUMBERS)])
        params.floats.index_copy_(1, rows[0], floats.to(torch.int32).view(torch.float32))
        params.numbers.index_copy_(1, rows[0], numbers)


def _admit_len(changes: Changes) -> int:
    return changes.num_admits * (1 + len(FLOATS) + len(NUMBERS))
