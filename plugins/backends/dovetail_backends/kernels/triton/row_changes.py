"""The operation `write_changes` as one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dovetail.sdk.rows import FLOATS, NUMBERS

BLOCK = 128


@triton.jit(do_not_specialize=["num_entries", "num_cleared", "num_admits"])
def _write_kernel(
    sent, tables, next_ids, seq_lens, floats, numbers, num_entries, num_cleared, num_admits, num_rows,
    F: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every program takes its share of each kind: entries, cleared rows, taken rows. None write to the same place."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = at < num_entries
    place = tl.load(sent + at, mask=is_entry, other=0)
    tl.store(tables + place, tl.load(sent + num_entries + at, mask=is_entry, other=0).to(tl.int32), mask=is_entry)
    sent += 2 * num_entries
    is_cleared = at < num_cleared
    row = tl.load(sent + at, mask=is_cleared, other=0)
    tl.store(next_ids + row, tl.zeros_like(row), mask=is_cleared)
    tl.store(seq_lens + row, tl.zeros_like(row), mask=is_cleared)
    sent += num_cleared
    is_taken = at < num_admits
    row = tl.load(sent + at, mask=is_taken, other=0)
    for i in tl.static_range(F):
        bits = tl.load(sent + (1 + i) * num_admits + at, mask=is_taken, other=0).to(tl.int32)
        tl.store(floats + i * num_rows + row, bits.to(tl.float32, bitcast=True), mask=is_taken)
    for i in tl.static_range(N):
        number = tl.load(sent + (1 + F + i) * num_admits + at, mask=is_taken, other=0)
        tl.store(numbers + i * num_rows + row, number, mask=is_taken)


def write_changes(
    sent: Tensor, tables: Tensor, next_ids: Tensor, seq_lens: Tensor, floats: Tensor, numbers: Tensor,
    num_entries: int, num_cleared: int, num_admits: int,
) -> None:  # fmt: skip
    """See `dovetail.sdk.step.write_changes`."""
    most = max(num_entries, num_cleared, num_admits)
    _write_kernel[(triton.cdiv(most, BLOCK),)](
        sent, tables, next_ids, seq_lens, floats, numbers, num_entries, num_cleared, num_admits, floats.shape[1],
        F=len(FLOATS), N=len(NUMBERS), BLOCK=BLOCK,
    )  # fmt: skip
