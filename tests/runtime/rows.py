"""Rows to sample, without an engine: what it would send of each, and how many tokens each has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from dovetail.messages import SamplerParams
from dovetail.messages.step import Admit
from dovetail.runtime.device.device_state import DeviceState, SampleRow
from dovetail.runtime.device.penalties import TokenCounts
from dovetail.runtime.sampling import sampler
from dovetail.runtime.sampling.sampler import FloatScratch, Masked, SampleBatch, Sampled


@dataclass(eq=False)
class Row:
    """One request; `kept` is what the runtime keeps of it."""

    params: SamplerParams
    seed: int = 1
    stop_ids: tuple[int, ...] = ()
    prompt_ids: list[int] = field(default_factory=list)
    num_output: int = 0
    kept: SampleRow | None = None


def batch_of(rows: Sequence[Row]) -> SampleBatch:
    """Put rows into the device rows 0, 1 …"""
    state = DeviceState(len(rows), 1, torch.device("cpu"))
    params = state.params
    for i, row in enumerate(rows):
        ids = tuple(row.prompt_ids) if row.params.is_penalized else ()
        params.admit(Admit(i, row.seed, len(row.prompt_ids), row.params, row.stop_ids, ids))
        row.kept = params.rows[i] = row.kept or params.rows[i]
    state.flush()
    return SampleBatch(
        rows=params.rows[: len(rows)],
        params=params,
        at=torch.arange(len(rows)),
        positions=torch.tensor([row.num_output for row in rows]),
        is_banning=any(row.stop_ids and row.num_output < row.params.min_tokens for row in rows),
    )


@cache
def _counts(vocab_size: int) -> TokenCounts:
    return TokenCounts(vocab_size, torch.device("cpu"))


def counts_of(logits: Tensor) -> TokenCounts:
    """Return the table of counts of all rows with so large a vocabulary."""
    return _counts(logits.shape[-1])


def sample(
    logits: Tensor, rows: Sequence[Row], masked: Masked | None = None, scratch: FloatScratch | None = None
) -> Sampled:
    """Sample a token for each row, and count it."""
    sampled = sampler.sample(logits, batch_of(rows), counts_of(logits), masked, scratch)
    for row in rows:
        row.num_output += 1
    return sampled
