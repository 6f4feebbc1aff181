"""Decode steps as CUDA graphs: the whole step, from the device row's next token to the greedy choice, in one launch.

A graph reads and writes only device state and its own static buffers. What differs from step to step is which rows
take part, and that is one small copy, skipped when nothing changed. A batch is padded to the next bucket with the spare
row, whose slots are negative, so that it writes no keys and values.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dovetail.contracts.attention import AttentionBackend, ForwardBatch, Phase
from dovetail.contracts.model import CausalLM
from dovetail.runtime.device_state import DeviceState

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Batch sizes that are captured; larger batches run eagerly."""
AT_START = 8
"""Buckets up to this size are captured before the engine is ready, larger ones when first needed."""


@dataclass(slots=True, eq=False)
class Captured:
    """One bucket's graph and its static tensors: `rows` `[B]` in; `logits` `[B, V]`, `ids` and `broken` `[B]` out."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor
    logits: Tensor
    ids: Tensor
    broken: Tensor
    current: list[int]


class DecodeGraphs:
    """Captures decode steps by bucket and replays them."""

    def __init__(
        self, model: CausalLM, attention: AttentionBackend, state: DeviceState, page_size: int, max_requests: int
    ) -> None:
        """Nothing is captured yet."""
        self._model, self._attention, self._state, self._page_size = model, attention, state, page_size
        self._buckets = [b for b in BUCKETS if b <= max_requests] or [1]
        self._captured: dict[int, Captured] = {}
        self._pool: Any = None
        attention.init_graph_state(self._buckets[-1], self._buckets[-1])

    def capture_some(self) -> None:
        """Capture the buckets that the first requests will need, largest first, with a progress bar."""
        started = time.perf_counter()
        first = [b for b in self._buckets if b <= AT_START]
        for bucket in tqdm(first[::-1], desc="Capturing CUDA graphs", unit="graph"):
            self._capture(bucket)
        logger.debug("captured %s in %.2f s", first, time.perf_counter() - started)

    def fits(self, num_requests: int) -> bool:
        """Whether a batch of this size has a bucket."""
        return num_requests <= self._buckets[-1]

    def run(self, rows: list[int]) -> Captured:
        """Decode one token for each device row; results stand in the first `len(rows)` entries of the outputs."""
        bucket = self._buckets[bisect_left(self._buckets, len(rows))]
        captured = self._captured.get(bucket) or self._capture(bucket)
        padded = rows + [self._state.spare_row] * (bucket - len(rows))
        if padded != captured.current:
            fresh = torch.tensor(padded, dtype=torch.int64).pin_memory()
            captured.rows.copy_(fresh, non_blocking=True)
            captured.current = padded
        captured.graph.replay()
        return captured

    def _capture(self, bucket: int) -> Captured:
        device = self._state.device
        rows = torch.full((bucket,), self._state.spare_row, dtype=torch.int64, device=device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and fills caches outside the graph
                self._step(rows)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, ids, broken = self._step(rows)
        self._pool = graph.pool()
        self._captured[bucket] = Captured(graph, rows, logits, ids, broken, [self._state.spare_row] * bucket)
        return self._captured[bucket]

    def _step(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One decode step on device state alone."""
        state, size = self._state, self._page_size
        positions = state.seq_lens[rows]
        pages = state.page_table[rows, positions // size].long()
        slots = torch.where(rows == state.spare_row, -1, pages * size + positions % size)
        num = rows.shape[0]
        starts = torch.arange(num + 1, dtype=torch.int32, device=rows.device)
        batch = ForwardBatch(
            num_decode=num,
            positions=positions,
            kv_slots=slots,
            rows=rows,
            page_table=state.page_table,
            seq_lens=positions + 1,
            q_starts=starts,
            seq_lens_cpu=[],
            q_lens_cpu=[],
            attention=self._attention,
            last_tokens=starts[:-1].long(),
        )
        self._attention.plan(batch, Phase.CAPTURE)
        self._attention.plan_in_graph(batch)
        logits = self._model.lm_head(self._model.forward(state.next_ids[rows], batch))
        best, ids = logits.max(dim=-1)
        state.set_next(rows, ids)
        state.seq_lens.index_copy_(0, rows, positions + 1)
        state.seq_lens[state.spare_row :].zero_()
        return logits, ids, ~torch.isfinite(best)
