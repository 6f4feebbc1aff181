"""Draws behind a bucket's decode graph, each in one launch: plain ones, and those with all that rows may ask for.

A graph reads what the device knows of the rows of the step before it, so nothing is sent for it but the masks of
grammars, and which row has which. What it reads is kept by whoever replays it: memory that was only alive while it was
captured belongs to others by then. B rows of the bucket, V vocabulary size, W words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dovetail.runtime.device.device_state import DeviceState
from dovetail.runtime.device.graph_pool import PooledGraph
from dovetail.runtime.device.penalties import TokenCounts
from dovetail.runtime.device.upload import pinned
from dovetail.runtime.sampling.masks import MaskBuffer
from dovetail.runtime.step_kernels import StepKernels
from dovetail.sdk.rows import NOTHING

Lines = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SampleTables:
    """What adjusted draws read beside the device rows, and count in. `counts` has a slot for every row."""

    masks: MaskBuffer
    counts: TokenCounts


class AdjustedOutputs(NamedTuple):
    """`ids` `[B]` int64, and `packed_logprobs` `[B, PACKED]` int32; see `dovetail.sdk.draws.draw_adjusted`."""

    ids: Tensor
    packed_logprobs: Tensor


@dataclass(slots=True, eq=False)
class AdjustedDraw:
    """Draws with masks, penalties, biases and log probabilities.

    Attributes:
        lines: `[B]` int32 in, which mask each row has, or `NOTHING`; as `yield_to_min_tokens` has it where that
            allows only ends.
        current: The same, on the host.
    """

    graph: PooledGraph[AdjustedOutputs]
    lines: Tensor
    current: Lines

    def set_lines(self, lines: Lines | None) -> None:
        """Say which masks the first rows have, None: none has any. What stands there already is not sent."""
        wanted = np.full(self.current.shape, NOTHING, dtype=np.int32)
        if lines is not None:
            wanted[: len(lines)] = lines
        if not np.array_equal(wanted, self.current):
            self.lines.copy_(pinned(torch.from_numpy(wanted), self.lines.device), non_blocking=True)
            self.current = wanted


def yield_to_min_tokens(lines: Lines) -> Lines:
    """Write the numbers of masks so that a minimum length gives way to them."""
    return NOTHING - 1 - lines


def draw_plainly(logits: Tensor, greedy: Tensor, rows: Tensor, state: DeviceState, step: StepKernels) -> Tensor:
    """Draw for every row `[B]` of a bucket; rows with temperature 0 get their best token `greedy` `[B]` again."""
    params = state.params
    ids: Tensor = step.draw_plainly(logits, greedy, rows, state.next_ids, state.seq_lens, params.floats, params.numbers)
    return ids


def draw_adjusted(
    logits: Tensor, rows: Tensor, lines: Tensor, state: DeviceState, tables: SampleTables, step: StepKernels
) -> AdjustedOutputs:
    """Draw for every row of a bucket as `sampler.sample` does."""
    counts = tables.counts
    found = step.draw_adjusted(
        logits, rows, lines, tables.masks.sent, state.next_ids, state.seq_lens, *state.params.table,
        counts.said, counts.read, state.padding_row,
    )  # fmt: skip
    return AdjustedOutputs(*found)
