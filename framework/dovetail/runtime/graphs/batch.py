"""Turns a step's arrays into device tensors: one host array per field, one copy each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionBackend, ForwardBatch, StateSave
from dovetail.messages.step import Ints, StepInput
from dovetail.runtime.device.device_state import DeviceState
from dovetail.runtime.device.row_images import NO_IMAGES
from dovetail.runtime.device.upload import to_device

Longs = npt.NDArray[np.int64]
NO_DRAFT = -2
"""In place of a draft behind a row's last place: nothing that can be drawn."""


@dataclass(slots=True, eq=False)
class StepTokens:
    """The new tokens of some rows of a step, on the host. B rows, T tokens.

    Attributes:
        ids: Those that the host knows: of rows that do not decode.
        positions: `[T]` their places.
        slots: `[T]` where their keys and values go.
        lens: `[B]` KV lengths once these are written.
        starts: `[B + 1]` first token of each row; the end of the last.
        saves: `[N, 4]` states that are copied, as `ForwardBatch.save_table` has them; requests count from these rows.
    """

    ids: npt.NDArray[np.integer]
    positions: Longs
    slots: Longs
    lens: Longs
    starts: Longs
    saves: Longs


_NONE: Longs = np.empty(0, dtype=np.int64)
NO_SAVES: Longs = np.empty((0, 4), dtype=np.int64)
NO_TOKENS = StepTokens(_NONE, _NONE, _NONE, _NONE, np.zeros(1, dtype=np.int64), NO_SAVES)


def tokens_of(step: StepInput, state: DeviceState, page_size: int, first: int = 0) -> StepTokens:
    """Find the places of the new tokens of rows `first …` of a step, by what the host knows of the device rows."""
    rows, num_new = step.rows[first:], step.num_new[first:]
    begin: Longs = np.where(step.start[first:] < 0, state.lens[rows], step.start[first:])
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(num_new, out=starts[1:])
    positions = np.arange(starts[-1]) + np.repeat(begin - starts[:-1], num_new)
    pages = state.pages[0, np.repeat(rows, num_new), positions // page_size].astype(np.int64)
    lens: Longs = begin + num_new
    slots = pages * page_size + positions % page_size
    return StepTokens(step.ids, positions, slots, lens, starts, _saves(step.saves, rows))


def prepare(
    step: StepInput, state: DeviceState, attention: AttentionBackend, page_size: int
) -> tuple[Tensor, ForwardBatch]:
    """Build a step's tensors on the state's device, and note on the host how long its rows get.

    Returns:
        Its input tokens, `[T]` int64, and what model and attention backend see.
    """
    device, n = state.device, step.num_decode
    tokens = tokens_of(step, state, page_size)
    # Without drafts: how many of those count is known when the step is read.
    state.lens[step.rows] = tokens.lens if step.num_drafts is None else tokens.lens - step.num_drafts
    rows = _to(step.rows, device)
    seen = NO_IMAGES if state.images is None else state.images.of(step, tokens.positions, tokens.starts)
    batch = ForwardBatch(
        num_decode=n,
        positions=_to(tokens.positions, device),
        kv_slots=_to(tokens.slots, device),
        rows=rows,
        page_table=state.page_table,
        seq_lens=_to(tokens.lens, device),
        q_starts=to_device(torch.from_numpy(tokens.starts.astype(np.int32)), device),
        seq_lens_cpu=tokens.lens.tolist(),
        q_lens_cpu=step.num_new.tolist(),
        attention=attention,
        last_tokens=_to(last_tokens(step, tokens.starts), device),
        states=state.states,
        saves=tuple(StateSave(*one) for one in tokens.saves.tolist()),
        save_table=_to(tokens.saves, device) if len(tokens.saves) else None,
        segments=_segments(step, state, tokens),
        images=seen.images,
        spans=seen.spans,
        rope_positions=seen.rope_positions,
    )
    return _input_ids(step, state, rows[:n]), batch


def last_tokens(step: StepInput, starts: Longs, first: int = 0) -> Longs:
    """`[P]` the tokens behind which one is drawn: each sampled row's last, and those before it up to its drafts.

    Args:
        step: The step.
        starts: First token of each of its rows `first …`; the end of the last.
        first: See `starts`.
    """
    rows = step.places
    if step.num_drafts is None:
        return starts[1 : len(rows) - first + 1] - 1
    rows = rows[rows >= first]
    return starts[rows - first + 1] - 1 - (step.num_drafts[rows] - place_in_row(rows))


def drafts_behind(step: StepInput, rows: Longs) -> Longs:
    """Return the draft that stands behind each place of these rows of a step, `NO_DRAFT` for none: `[P]`."""
    num_drafts = np.zeros(len(step.rows), np.int32) if step.num_drafts is None else step.num_drafts
    # Where the ids of each row end: those that decode have none from the host.
    ends = np.cumsum(np.where(step.start < 0, 0, step.num_new))
    ordinal = place_in_row(rows)
    is_drafted = ordinal < num_drafts[rows]
    behind: Longs = np.full(len(rows), NO_DRAFT, dtype=np.int64)
    behind[is_drafted] = step.ids[(ends[rows] - num_drafts[rows] + ordinal)[is_drafted]]
    return behind


def place_in_row(rows: Longs) -> Longs:
    """Return how many places of its own row stand before each place; rows `[P]` are ascending."""
    return np.arange(len(rows)) - np.searchsorted(rows, rows)


def _saves(saves: Ints, rows: Ints) -> Longs:
    """Name the places of device rows among those of a step in what is copied, `[4, N]`: `[N, 4]`."""
    if not saves.size:
        return NO_SAVES
    groups, wanted, lens, copies = saves
    order = np.argsort(rows)
    return np.stack((groups, order[np.searchsorted(rows, wanted, sorter=order)], lens, copies), 1).astype(np.int64)


def _segments(step: StepInput, state: DeviceState, tokens: StepTokens) -> Tensor | None:
    """Say of each token whether it is of the second of two texts; None where no row has two."""
    seconds = state.seconds[step.rows]
    if not seconds.any():
        return None
    seconds = np.repeat(seconds, step.num_new)
    return _to(((seconds > 0) & (tokens.positions >= seconds)).astype(np.int64), state.device)


def _input_ids(step: StepInput, state: DeviceState, decode_rows: Tensor) -> Tensor:
    """Decode rows read what the sampler wrote on the device; prompts come from the host."""
    decode = state.next_ids[decode_rows] if decode_rows.shape[0] else None
    if not step.ids.size:
        return decode if decode is not None else torch.empty(0, dtype=torch.int64, device=state.device)
    ids = _to(step.ids, state.device)
    return ids if decode is None else torch.cat((decode, ids))


def _to(array: npt.NDArray[np.integer], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(array.astype(np.int64)), device)
