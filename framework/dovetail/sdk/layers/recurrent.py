"""Layers that fold tokens into a state: runs them over a step, and takes the copies of states that the step asks for.

B requests, T tokens, n requests that are computed together, t tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dovetail.contracts.attention import ForwardBatch, StateStore
from dovetail.contracts.errors import DovetailError

State = Mapping[str, Tensor]
"""Tensors of a layer's `LayerSpec.state` by name, `[n, …]`."""
Fold = Callable[[Tensor, State], tuple[Tensor, State]]
"""Takes inputs `[n, t, …]` and the states before them; returns outputs `[n, t, …]` and the states behind them."""


def recur(index: int, inputs: Tensor, batch: ForwardBatch, fold: Fold) -> Tensor:
    """Fold a step's tokens into the states of their requests.

    Rows that decode are folded together, a token each. A chunk of a prompt is folded by itself, in pieces that end
    where a copy of the state is asked for: `fold` sees several calls, the first with the state that the request had.

    Args:
        index: The layer's number.
        inputs: `[T, …]`.
        batch: The step's batch.
        fold: The layer's recurrence. It must not keep or change what it is given.

    Returns:
        `[T, …]`.

    Raises:
        DovetailError: The step has no states, as the layer's spec declares none; or it is recorded with a prompt.
    """
    if batch.states is None:
        raise DovetailError(f"layer {index} folds tokens into a state, and no layer's spec declares one")
    if batch.save_table is not None and not batch.saves:
        raise DovetailError(f"layer {index} is `in_place` by its reach, and `recur` cannot be recorded in a graph")
    store, num = batch.states, batch.num_decode
    rows = store.rows(index)
    outputs = []
    if num:
        at = batch.rows[:num]
        found, after = fold(inputs[:num, None], {name: own.index_select(0, at) for name, own in rows.items()})
        _write(rows, at, after)
        outputs.append(found[:, 0])
    start = num
    for request in range(num, batch.num_requests):
        end = start + batch.q_lens_cpu[request]
        outputs.append(_fold_chunk(index, inputs[start:end], batch, store, request, fold))
        start = end
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _fold_chunk(index: int, inputs: Tensor, batch: ForwardBatch, store: StateStore, request: int, fold: Fold) -> Tensor:
    """Fold one chunk `[t, …]`, and copy the state where that is asked for."""
    rows, at = store.rows(index), batch.rows[request : request + 1]
    before = batch.seq_lens_cpu[request] - inputs.shape[0]
    state: State = {name: own.index_select(0, at) for name, own in rows.items()}
    mine = [save for save in batch.saves if save.request == request and store.wants(index, save)]
    copies = {save.length - before: save.copy for save in mine}
    outputs, begin = [], 0
    for stop in sorted({*copies, inputs.shape[0]}):
        found, state = fold(inputs[None, begin:stop], state)
        outputs.append(found[0])
        begin = stop
        if stop in copies:
            store.save(index, copies[stop], state)
    _write(rows, at, state)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _write(rows: State, at: Tensor, state: State) -> None:
    for name, own in rows.items():
        own.index_copy_(0, at, state[name].to(own.dtype))
