"""What stands around the model in a graph: a step's inputs from device state, and its greedy tokens back into it.

B rows of the batch, T tokens, H hidden size, V vocabulary size. The torch versions are the reference; on CUDA each is
one or two kernels, as a decode step of a small model feels every launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.runtime.device.device_state import DeviceState
from dovetail.runtime.graphs.step_inputs import StepInputs


def begin(rows: Tensor, state: DeviceState, page_size: int) -> StepInputs:
    """Gather the next decode step of rows `[B]`."""
    if rows.is_cuda:
        from dovetail.runtime.graphs import step_triton  # imports Triton, which only CUDA tensors need

        return step_triton.begin(rows, state, page_size)
    return begin_reference(rows, state, page_size)


def begin_reference(rows: Tensor, state: DeviceState, page_size: int) -> StepInputs:
    """As `begin`, in torch."""
    positions = state.seq_lens[rows]
    pages = state.page_table[rows, positions // page_size].long()
    has_place = (rows != state.padding_row) & (pages != 0)
    slots = torch.where(has_place, pages * page_size + positions % page_size, -1)
    return StepInputs(state.next_ids[rows], positions, slots, positions + 1)


def finish(logits: Tensor, rows: Tensor, lens: Tensor, state: DeviceState) -> tuple[Tensor, Tensor]:
    """Take the best token of each row as its next input, and its length from now on; the spare row stays empty.

    Args:
        logits: `[B, V]`.
        rows: `[B]` int64, device rows.
        lens: `[B]` int64, KV lengths.
        state: Changed.

    Returns:
        Tokens `[B]` int64, the lowest id among equals, and `[B]` bool: rows whose best logit is not finite.
    """
    if logits.is_cuda:
        from dovetail.runtime.graphs import step_triton  # as above

        return step_triton.finish(logits, rows, lens, state)
    return finish_reference(logits, rows, lens, state)


def finish_reference(logits: Tensor, rows: Tensor, lens: Tensor, state: DeviceState) -> tuple[Tensor, Tensor]:
    """As `finish`, in torch."""
    best, ids = logits.max(dim=-1)
    state.set_next(rows, ids)
    state.seq_lens.index_copy_(0, rows, lens)
    state.clear_spare()
    return ids, ~torch.isfinite(best)


def check_tokens(hidden: Tensor, starts: Tensor, non_finite: Tensor) -> None:
    """Note in `non_finite` which requests have a token whose final hidden state is not finite.

    Args:
        hidden: `[T, H]`; tokens from the last entry of `starts` on belong to nobody.
        starts: `[B + 1]` int32, first token of each request.
        non_finite: `[B]` bool, changed: what is set stays set.
    """
    if hidden.is_cuda:
        from dovetail.runtime.graphs import step_triton  # as above

        step_triton.check_tokens(hidden, starts, non_finite)
    else:
        check_tokens_reference(hidden, starts, non_finite)


def check_tokens_reference(hidden: Tensor, starts: Tensor, non_finite: Tensor) -> None:
    """As `check_tokens`, in torch."""
    least, most = hidden.aminmax(dim=-1)
    bad = ~(torch.isfinite(least) & torch.isfinite(most))
    before = torch.nn.functional.pad(bad.cumsum(0), (1, 0))[starts.long()]
    non_finite |= before[1:] != before[:-1]
