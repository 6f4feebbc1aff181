"""Decode steps as CUDA graphs: the whole step, from the device row's next token to the greedy choice, in one launch.

A graph reads and writes only device state and its own static buffers. What differs from step to step is which rows
take part, and that is one small copy, skipped when nothing changed. A batch is padded to the next bucket with the spare
row, whose slots are negative, so that it writes no keys and values.

Where the backend reads common prefixes once, some buckets have a second graph that does, for batches where it pays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dovetail.contracts.attention import AttentionBackend, ForwardBatch, Phase
from dovetail.contracts.model import CausalLM
from dovetail.messages.step import DecodeGraph, Ints
from dovetail.runtime import draw
from dovetail.runtime.device_state import DeviceState
from dovetail.runtime.draw_params import DrawParams
from dovetail.runtime.step_ops import begin, finish
from dovetail.runtime.upload import pinned

logger = logging.getLogger(__name__)

T = TypeVar("T")

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Batch sizes that are captured; larger batches run eagerly."""
SHARING_BUCKETS = (4, 8, 16, 32, 64, 128, 256)
"""Those that are captured once more, for rows that share prefixes."""
FIRST = (1, 8)
"""Buckets that the engine is not ready without; larger ones stand in for smaller ones that are not captured yet."""


class GraphPool:
    """Captures steps into graphs that share one memory pool; they must be replayed one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle: Any = None

    def capture(self, step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Run a step twice on a side stream (compiles kernels, fills caches), then record it.

        Returns:
            The graph, and what the recorded step returned: static tensors that each replay overwrites.
        """
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._handle):
            result = step()
        self._handle = graph.pool()
        return graph, result


@dataclass(slots=True, eq=False)
class CapturedDraw:
    """Sampling after a bucket's decode graph: `params` and the lengths `[B]` of prompts in, `ids` `[B]` out.

    `current` are the rows, and the version of their parameters, that the inputs hold.
    """

    graph: torch.cuda.CUDAGraph
    params: DrawParams
    prompt_lens: Tensor
    ids: Tensor
    current: tuple[Ints, int] | None = None


@dataclass(slots=True, eq=False)
class Captured:
    """One bucket's graph and its static tensors: `rows` `[B]` in; `logits` `[B, V]`, `ids` and `broken` `[B]` out."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor
    logits: Tensor
    ids: Tensor
    broken: Tensor
    current: Ints | None = None
    draw: CapturedDraw | None = None


class DecodeGraphs:
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
    ) -> None:
        """Nothing is captured yet."""
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
        """Capture what the first requests need, with a progress bar."""
        for bucket in tqdm([b for b in FIRST if b in self._buckets], desc="Capturing decode graphs", unit="graph"):
            self._capture(DecodeGraph(bucket))

    @property
    def num_left(self) -> int:
        """Graphs that are not captured yet."""
        return len(self.keys) - len(self._captured)

    @property
    def captured(self) -> list[DecodeGraph]:
        """Those that are there."""
        return list(self._captured)

    def rehearse(self) -> None:
        """See `CaptureTask.rehearse`."""
        for key in self.keys:
            logits, ids, _ = self._step(*self._inputs(key.rows), key.shares)
            draw.draw(logits, DrawParams.empty(key.rows, self._state.device), ids)

    def run_next(self) -> None:
        """Capture the smallest bucket that is missing, while the engine has nothing else to do; sharing ones last."""
        missing = [key for key in self.keys if key not in self._captured]
        if missing:
            self._capture(missing[0])

    def capture(self, key: DecodeGraph) -> None:
        """Capture one under load; where there is no memory for it, it is not tried again."""
        try:
            self._capture(key)
        except torch.OutOfMemoryError as error:
            self.keys.remove(key)
            logger.warning("No memory for a decode graph of %d rows (%s)", key.rows, str(error).splitlines()[0])

    def run(self, rows: Ints, key: DecodeGraph) -> Captured:
        """Decode one token for each device row; results stand in the first `len(rows)` entries of the outputs.

        Nothing is sent for an array whose rows are those of the last replay, least of all for that very array.
        """
        captured = self._captured[key]
        if not _is_same(rows, captured.current):
            padded = np.full(key.rows, self._state.spare_row, dtype=np.int64)
            padded[: len(rows)] = rows
            captured.rows.copy_(pinned(torch.from_numpy(padded), self._state.device), non_blocking=True)
            captured.current = rows
        captured.graph.replay()
        return captured

    def draw(self, done: Captured, rows: Ints) -> Tensor:
        """Sample the logits of a decode step that was just replayed, by temperature and filters.

        Returns:
            `[B]` int64; the tokens are the next inputs of their rows at once.
        """
        captured, state = done.draw, self._state
        if captured is None:
            raise ValueError("a bucket's draw is captured with its step")
        version = state.params.version
        if captured.current is None or captured.current[1] != version or not _is_same(rows, captured.current[0]):
            captured.params.copy_from(state.params.draw_params(done.rows, captured.params.positions))
            captured.prompt_lens.copy_(state.params.num_prompt[done.rows])
            captured.current = rows, version
        captured.graph.replay()
        return captured.ids

    def _capture_draw(self, done: Captured) -> None:
        params = DrawParams.empty(done.rows.shape[0], self._state.device)
        lens = torch.zeros_like(params.positions)
        graph, ids = self._pool.capture(lambda: self._draw(done, params, lens))
        done.draw = CapturedDraw(graph, params, lens, ids)

    def _draw(self, done: Captured, params: DrawParams, prompt_lens: Tensor) -> Tensor:
        """Draw for every row of a bucket; rows with temperature 0 get their best token again.

        The draw is keyed by how many tokens the row has generated: so many more does it know than its prompt has.
        """
        torch.sub(self._state.seq_lens[done.rows], prompt_lens, out=params.positions)
        ids = draw.draw(done.logits, params, done.ids)
        self._state.set_next(done.rows, ids)
        return ids

    def _capture(self, key: DecodeGraph) -> Captured:
        rows, starts, last = self._inputs(key.rows)
        graph, (logits, ids, broken) = self._pool.capture(lambda: self._step(rows, starts, last, key.shares))
        self._captured[key] = captured = Captured(graph, rows, logits, ids, broken)
        ids.zero_()  # the graph has not run yet, and the draw reads which tokens are the best
        self._capture_draw(captured)
        return captured

    def _inputs(self, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, starts and last tokens of a step, all of it padding."""
        device = self._state.device
        rows = torch.full((bucket,), self._state.spare_row, dtype=torch.int64, device=device)
        starts = torch.arange(bucket + 1, dtype=torch.int32, device=device)
        return rows, starts, starts[:-1].long()

    def _step(self, rows: Tensor, starts: Tensor, last: Tensor, shares: bool) -> tuple[Tensor, Tensor, Tensor]:
        """One decode step on device state alone."""
        inputs = begin(rows, self._state, self._page_size)
        batch = ForwardBatch(
            num_decode=rows.shape[0],
            positions=inputs.positions,
            kv_slots=inputs.slots,
            rows=rows,
            page_table=self._state.page_table,
            seq_lens=inputs.lens,
            q_starts=starts,
            seq_lens_cpu=[],
            q_lens_cpu=[],
            attention=self._attention,
            last_tokens=last,
            shares_prefixes=shares,
            states=self._state.states,
        )
        self._attention.plan(batch, Phase.CAPTURE)
        self._attention.plan_in_graph(batch)
        logits = self._model.lm_head(self._model.forward(inputs.ids, batch))
        ids, broken = finish(logits, rows, inputs.lens, self._state)
        return logits, ids, broken


def _is_same(rows: Ints, last: Ints | None) -> bool:
    return rows is last or (last is not None and np.array_equal(rows, last))
