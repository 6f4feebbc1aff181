"""What a step changes of the device rows, as one array: packed on the host, to be sent and written at once.

E page table entries, C rows that are cleared, A requests that take rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.contracts.seeds import signed64
from dovetail.messages.step import Admit, Ints
from dovetail.sdk.rows import FLOATS, MAX_BIAS, NOTHING

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Changes:
    """Some changes.

    Attributes:
        packed: `[2 E + C + A (1 + F + N)]` places in the page tables and their pages; rows that are cleared; rows that
            are taken, and by name the bits of their float32 `FLOATS` and their `NUMBERS`.
        num_entries: E.
        num_cleared: C.
        num_admits: A.
    """

    packed: Longs
    num_entries: int
    num_cleared: int
    num_admits: int


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
