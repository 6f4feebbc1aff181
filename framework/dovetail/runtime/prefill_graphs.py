"""Small prefills as CUDA graphs: one request's chunk of up to 512 tokens, padded to a bucket.

An eager prefill of a short prompt is some three hundred launches from Python, which cost more than the computing; a
replay is one. Padding tokens have negative slots, so they write no keys and values, and stand after the live ones, so
no live token attends to them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dovetail.contracts.attention import AttentionBackend, ForwardBatch, Phase
from dovetail.contracts.model import CausalLM
from dovetail.engine.request import Chunk
from dovetail.runtime.device_state import DeviceState
from dovetail.runtime.graphs import GraphPool
from dovetail.runtime.step_ops import finish

BUCKETS = (16, 32, 64, 128, 256, 512)
"""Chunk lengths in tokens that are captured, all before the engine is ready."""


@dataclass(slots=True, eq=False)
class CapturedPrefill:
    """One bucket of T tokens.

    `inputs` `[3 T + 4]` int64 in: ids, positions, slots, then device row, KV length, chunk length, index of the last
    token. `row` `[1]` is the device row among them. `logits` `[1, V]`, `ids` and `broken` `[1]` out, all of the last
    token.
    """

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    row: Tensor
    logits: Tensor
    ids: Tensor
    broken: Tensor


class PrefillGraphs:
    """Captures and replays prefill chunks of one request."""

    def __init__(
        self, model: CausalLM, attention: AttentionBackend, state: DeviceState, page_size: int, pool: GraphPool
    ) -> None:
        """Nothing is captured yet."""
        self._model, self._attention, self._state = model, attention, state
        self._page_size, self._pool = page_size, pool
        self._captured: dict[int, CapturedPrefill] = {}

    @property
    def max_tokens(self) -> int:
        """The longest chunk that a graph serves."""
        return BUCKETS[-1]

    def capture_all(self) -> None:
        """Capture every bucket, largest first, with a progress bar."""
        for bucket in tqdm(BUCKETS[::-1], desc="Capturing prefill graphs", unit="graph"):
            self._captured[bucket] = self._capture(bucket)

    def fits(self, chunk: Chunk) -> bool:
        """Whether a chunk has a bucket and wants nothing but its last token's logits."""
        return chunk.num_new <= BUCKETS[-1] and chunk.request.prompt_logprobs is None

    def run(self, chunk: Chunk) -> CapturedPrefill:
        """Compute a chunk; its last token's outputs mean something only if the chunk ends the known tokens."""
        bucket = BUCKETS[bisect_left(BUCKETS, chunk.num_new)]
        captured = self._captured[bucket]
        request, num, size = chunk.request, chunk.num_new, self._page_size
        places = np.arange(chunk.start, chunk.start + num)
        packed = np.zeros(3 * bucket + 4, dtype=np.int64)
        packed[:num] = request.ids[chunk.start : chunk.start + num]
        packed[bucket : bucket + num] = places
        packed[2 * bucket : 3 * bucket] = -1
        pages = np.array(request.pages, dtype=np.int64)[places // size]
        packed[2 * bucket : 2 * bucket + num] = pages * size + places % size
        packed[3 * bucket :] = (request.row, chunk.start + num, num, num - 1)
        captured.inputs.copy_(torch.from_numpy(packed).pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured

    def _capture(self, bucket: int) -> CapturedPrefill:
        inputs = torch.zeros(3 * bucket + 4, dtype=torch.int64, device=self._state.device)
        inputs[2 * bucket : 3 * bucket] = -1
        inputs[3 * bucket :] = torch.tensor([self._state.spare_row, bucket, bucket, bucket - 1])
        graph, (logits, ids, broken) = self._pool.capture(lambda: self._step(inputs, bucket))
        return CapturedPrefill(graph, inputs, inputs[3 * bucket : 3 * bucket + 1], logits, ids, broken)

    def _step(self, inputs: Tensor, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
        """One chunk, on the static inputs and device state alone."""
        ids, positions, slots = inputs[: 3 * bucket].view(3, bucket)
        row, length, num_new, last = inputs[3 * bucket :].view(4, 1)
        starts = torch.cat((torch.zeros_like(num_new), num_new)).to(torch.int32)
        batch = ForwardBatch(
            num_decode=0,
            positions=positions,
            kv_slots=slots,
            rows=row,
            page_table=self._state.page_table,
            seq_lens=length,
            q_starts=starts,
            seq_lens_cpu=[],
            q_lens_cpu=[bucket],
            attention=self._attention,
            last_tokens=last,
        )
        self._attention.plan(batch, Phase.CAPTURE)
        self._attention.plan_in_graph(batch)
        hidden = self._model.forward(ids, batch)
        logits = self._model.lm_head(hidden.index_select(0, last))
        chosen, broken = finish(logits, row, length, self._state)
        return logits, chosen, broken
