"""Decode steps as CUDA graphs: the whole step, from the device row's next token to the greedy choice, in one launch.

A graph reads and writes only device state and its own static buffers. What differs from step to step is which rows
take part, and that is one small copy, skipped when nothing changed. A batch is padded to the next bucket with the spare
row, whose slots are negative, so that it writes no keys and values.

Where the backend reads common prefixes once, some buckets have a second graph that does, for batches where it pays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dovetail.contracts.attention import AttentionBackend, ForwardBatch, Phase
from dovetail.contracts.model import CausalLM
from dovetail.messages.step import DecodeGraph, Ints
from dovetail.runtime.device.device_state import DeviceState
from dovetail.runtime.device.graph_pool import Borrowed, GraphPool, PooledGraph, StepOutputs
from dovetail.runtime.device.upload import pinned
from dovetail.runtime.graphs.capture_queue import GraphSet
from dovetail.runtime.sampling.draw_graphs import (
    AdjustedDraw,
    AdjustedOutputs,
    Lines,
    SampleTables,
    draw_adjusted,
    draw_plainly,
)
from dovetail.runtime.step_kernels import PLAIN_STEP, StepKernels
from dovetail.sdk.rows import NOTHING

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Batch sizes that are captured; larger batches run eagerly."""
SHARING_BUCKETS = (4, 8, 16, 32, 64, 128, 256)
"""Those that are captured once more, for rows that share prefixes."""
FIRST = (1, 8)
"""Buckets that the engine is not ready without; larger ones stand in for smaller ones that are not captured yet."""


@dataclass(slots=True, eq=False)
class Captured:
    """One bucket's graphs, the step's and the draws' behind it, and what they read.

    `rows` `[B]` is the step's input. `read` are other tensors that a replay reads: they are kept, as a graph knows
    addresses only.
    """

    step: PooledGraph[StepOutputs]
    rows: Tensor
    read: tuple[Tensor, ...]
    current: Ints | None = None
    draw: PooledGraph[Tensor] | None = None
    adjusted: AdjustedDraw | None = None

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.step.outputs.logits.shape[1]


class Decoded(NamedTuple):
    """A decode step that was replayed: its bucket, and what it left, which is borrowed until the next replay."""

    captured: Captured
    borrowed: Borrowed[StepOutputs]


class DecodeGraphs(GraphSet[DecodeGraph, Captured]):
    """Captures decode steps by bucket and replays them.

    Attributes:
        keys: Those that may be captured, in the order in which `run_next` does.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        state: DeviceState,
        page_size: int,
        max_requests: int,
        pool: GraphPool,
        tables: SampleTables,
        step: StepKernels = PLAIN_STEP,
    ) -> None:
        """Nothing is captured yet."""
        self._tables, self._kernels = tables, step
        self._model, self._attention, self._state, self._page_size = model, attention, state, page_size
        self._buckets = [b for b in BUCKETS if b <= max_requests] or [1]
        sharing = [b for b in SHARING_BUCKETS if b <= self._buckets[-1]] if attention.prefix_group > 1 else []
        self.keys = [DecodeGraph(b) for b in self._buckets] + [DecodeGraph(b, shares=True) for b in sharing]
        self._captured: dict[DecodeGraph, Captured] = {}
        self._pool = pool

    @property
    def max_batch(self) -> int:
        """The largest batch that a graph serves."""
        return self._buckets[-1]

    def capture_first(self) -> None:
        """Capture what the first requests need, with a progress bar.

        The largest comes before all: what it needs meanwhile serves the others, too. In another order each needs larger
        blocks than all before it have left, and graphs together hold seven times as much.
        """
        first = dict.fromkeys([self.max_batch, *(b for b in FIRST if b in self._buckets)])
        for bucket in tqdm(list(first), desc="Capturing decode graphs", unit="graph"):
            if bucket in FIRST:
                self._capture(DecodeGraph(bucket))
            else:
                self.capture(DecodeGraph(bucket))  # a server that has no memory for it serves all the same

    def rehearse(self) -> None:
        """See `CaptureTask.rehearse`."""
        for key in self.keys:
            rows, starts, last = self._inputs(key.rows)
            left = self._step(rows, starts, last, key.shares)
            draw_plainly(left.logits, left.ids, rows, self._state, self._kernels)
            lines = torch.full_like(starts[:-1], NOTHING)
            draw_adjusted(left.logits, rows, lines, self._state, self._tables, self._kernels)

    def run(self, rows: Ints, key: DecodeGraph) -> Decoded:
        """Decode one token for each device row; results stand in the first `len(rows)` entries of the outputs.

        Nothing is sent for an array whose rows are those of the last replay, least of all for that very array.
        """
        captured = self._captured[key]
        if not _is_same(rows, captured.current):
            padded = np.full(key.rows, self._state.padding_row, dtype=np.int64)
            padded[: len(rows)] = rows
            captured.rows.copy_(pinned(torch.from_numpy(padded), self._state.device), non_blocking=True)
            captured.current = rows
        return Decoded(captured, captured.step.replay())

    def draw(self, done: Decoded) -> Tensor:
        """Sample the logits of a decode step that was just replayed, by temperature and filters.

        Returns:
            `[B]` int64, borrowed until the next replay; the tokens are the next inputs of their rows at once.
        """
        if done.captured.draw is None:
            raise ValueError("a bucket's draw is captured with its step")
        return done.captured.draw.replay(done.borrowed).read()

    def draw_adjusted(
        self, done: Decoded, lines: Lines | None, num_sent: int, kept: Tensor | None = None
    ) -> AdjustedOutputs:
        """Sample the logits of a decode step that was replayed, by all that its rows ask for.

        Args:
            done: The step.
            lines: As `AdjustedDraw` has them; None: no row has a mask.
            num_sent: Masks of this step that have yet to be sent.
            kept: A copy of the logits of the first rows, where another graph was replayed since.

        Returns:
            The tokens, which are the next inputs of their rows at once, and what is told of them; borrowed until the
            next replay.
        """
        captured = done.captured
        if captured.adjusted is None:
            raise ValueError("a bucket's draws are captured with its step")
        if num_sent:
            self._tables.masks.send(num_sent)
        if kept is not None:
            captured.step.outputs.logits[: kept.shape[0]].copy_(kept)
        captured.adjusted.set_lines(lines)
        return captured.adjusted.graph.replay(None if kept is not None else done.borrowed).read()

    def _capture_draws(self, done: Captured) -> None:
        state, kernels, num = self._state, self._kernels, done.rows.shape[0]
        logits, ids, _ = done.step.outputs
        done.draw = self._pool.capture(lambda: draw_plainly(logits, ids, done.rows, state, kernels))
        current = np.full(num, NOTHING, dtype=np.int32)
        lines = torch.full((num,), NOTHING, dtype=torch.int32, device=state.device)
        graph = self._pool.capture(lambda: draw_adjusted(logits, done.rows, lines, state, self._tables, kernels))
        done.adjusted = AdjustedDraw(graph, lines, current)

    def _capture(self, key: DecodeGraph) -> Captured:
        rows, starts, last = self._inputs(key.rows)
        step = self._pool.capture(lambda: self._step(rows, starts, last, key.shares))
        self._captured[key] = captured = Captured(step, rows, (starts, last))
        step.outputs.ids.zero_()  # the graph has not run yet, and the draw reads which tokens are the best
        self._capture_draws(captured)
        return captured

    def _inputs(self, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, starts and last tokens of a step, all of it padding."""
        device = self._state.device
        rows = torch.full((bucket,), self._state.padding_row, dtype=torch.int64, device=device)
        starts = torch.arange(bucket + 1, dtype=torch.int32, device=device)
        return rows, starts, starts[:-1].long()

    def _step(self, rows: Tensor, starts: Tensor, last: Tensor, shares: bool) -> StepOutputs:
        """One decode step on device state alone."""
        state, kernels = self._state, self._kernels
        ids, positions, slots, lens = kernels.begin_step(
            rows, state.next_ids, state.seq_lens, state.page_table, self._page_size, state.padding_row
        )
        batch = ForwardBatch(
            num_decode=rows.shape[0],
            positions=positions,
            kv_slots=slots,
            rows=rows,
            page_table=state.page_table,
            seq_lens=lens,
            q_starts=starts,
            seq_lens_cpu=[],
            q_lens_cpu=[],
            attention=self._attention,
            last_tokens=last,
            shares_prefixes=shares,
            states=state.states,
            rope_positions=_rope_positions(state, rows, positions),
        )
        self._attention.plan(batch, Phase.CAPTURE)
        self._attention.plan_in_graph(batch)
        logits = self._model.lm_head(self._model.forward(ids, batch))
        chosen, non_finite = kernels.finish_step(logits, rows, lens, state.next_ids, state.seq_lens, state.padding_row)
        return StepOutputs(logits, chosen, non_finite)


def _rope_positions(state: DeviceState, rows: Tensor, positions: Tensor) -> Tensor | None:
    """Behind images, tokens turn by other numbers than their places."""
    deltas = None if state.images is None else state.images.deltas
    return None if deltas is None else positions + deltas[rows]


def _is_same(rows: Ints, last: Ints | None) -> bool:
    return rows is last or (last is not None and np.array_equal(rows, last))
