"""Turns a step's plan into device tensors: one host array per field, one copy each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionBackend, ForwardBatch
from dovetail.engine.request import Chunk, Request, StepPlan
from dovetail.runtime.device_state import DeviceState
from dovetail.runtime.upload import to_device

Ints = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Prepared:
    """A step ready to run.

    Attributes:
        ids: `[T]` int64 input tokens.
        batch: What model and attention backend see.
        sampled: Requests that get a token, in the order of `batch.last_tokens`.
        sampled_rows: `[R]` int64, their device rows.
        sampled_at: `[R]` int64, which of the batch's requests they are; None: all of them.
        silent: Requests that get no token, …
        silent_at: … and which of the batch's they are; None where there are none.
    """

    ids: Tensor
    batch: ForwardBatch
    sampled: list[Request]
    sampled_rows: Tensor
    sampled_at: Tensor | None
    silent: list[Request]
    silent_at: Tensor | None


def prepare(plan: StepPlan, state: DeviceState, attention: AttentionBackend, page_size: int) -> Prepared:
    """Build a step's tensors on the state's device."""
    device = state.device
    n = len(plan.decode)
    chunks = plan.chunks
    requests = plan.decode + [chunk.request for chunk in chunks]
    seq_lens = [r.computed_len + 1 for r in plan.decode] + [c.start + c.num_new for c in chunks]
    q_lens = [1] * n + [c.num_new for c in chunks]
    starts = np.zeros(len(requests) + 1, dtype=np.int32)
    np.cumsum(q_lens, out=starts[1:])
    positions, slots = _places(plan, page_size)
    rows = _to(np.fromiter((r.row for r in requests), np.int64, len(requests)), device)
    wants = [True] * n + [c.samples for c in chunks]
    last = np.flatnonzero(wants)
    batch = ForwardBatch(
        num_decode=n,
        positions=_to(positions, device),
        kv_slots=_to(slots, device),
        rows=rows,
        page_table=state.page_table,
        seq_lens=_to(np.array(seq_lens, dtype=np.int64), device),
        q_starts=_to(starts, device),
        seq_lens_cpu=seq_lens,
        q_lens_cpu=q_lens,
        attention=attention,
        last_tokens=_to((starts[1:][last] - 1).astype(np.int64), device),
    )
    silent = np.flatnonzero(~np.array(wants))
    sampled_at = _to(last.astype(np.int64), device) if len(silent) else None
    return Prepared(
        ids=_input_ids(plan, state, rows[:n]),
        batch=batch,
        sampled=[requests[i] for i in last],
        sampled_rows=rows if sampled_at is None else rows[sampled_at],
        sampled_at=sampled_at,
        silent=[requests[i] for i in silent],
        silent_at=_to(silent.astype(np.int64), device) if len(silent) else None,
    )


def _places(plan: StepPlan, page_size: int) -> tuple[Ints, Ints]:
    """Absolute position and KV slot of every new token."""
    positions = [np.fromiter((r.computed_len for r in plan.decode), np.int64, len(plan.decode))]
    pages = np.fromiter((r.pages[0][r.computed_len // page_size] for r in plan.decode), np.int64, len(plan.decode))
    slots = [pages * page_size + positions[0] % page_size]
    for chunk in plan.chunks:
        places, own = places_of(chunk, page_size)
        positions.append(places)
        slots.append(own)
    return np.concatenate(positions), np.concatenate(slots)


def places_of(chunk: Chunk, page_size: int) -> tuple[Ints, Ints]:
    """Return absolute position and KV slot of every token of a chunk."""
    stop, first = chunk.start + chunk.num_new, chunk.start // page_size
    places = np.arange(chunk.start, stop)
    pages = np.array(chunk.request.pages[0][first : (stop - 1) // page_size + 1], dtype=np.int64)
    return places, pages[places // page_size - first] * page_size + places % page_size


def _input_ids(plan: StepPlan, state: DeviceState, decode_rows: Tensor) -> Tensor:
    """Decode rows read what the sampler wrote on the device; prompts come from the host."""
    decode = state.next_ids[decode_rows] if plan.decode else None
    if not plan.chunks:
        return decode if decode is not None else torch.empty(0, dtype=torch.int64, device=state.device)
    prompt = np.concatenate([tokens_of(chunk) for chunk in plan.chunks])
    ids = _to(prompt, state.device)
    return ids if decode is None else torch.cat((decode, ids))


def tokens_of(chunk: Chunk) -> Ints:
    """Return the input ids of a chunk."""
    return np.array(chunk.request.ids[chunk.start : chunk.start + chunk.num_new], dtype=np.int64)


def _to(array: npt.NDArray[np.integer], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(array), device)
