"""Prefills as CUDA graphs: the chunks of a step, padded to a number of tokens and chunks.

An eager prefill is some three hundred launches from Python, which cost more than the computing of short prompts; a
replay is one. Padding tokens have negative slots, so they write no keys and values, and stand after the live ones, so
no live token attends to them. Padding chunks are empty and belong to the spare row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from dovetail.contracts.attention import AttentionBackend, ForwardBatch, Phase
from dovetail.contracts.model import CausalLM
from dovetail.engine.request import Chunk
from dovetail.runtime.batch import places_of, tokens_of
from dovetail.runtime.device_state import DeviceState
from dovetail.runtime.graphs import GraphPool
from dovetail.runtime.prefill_sizes import FIRST, SINGLE, Size
from dovetail.runtime.step_ops import check_tokens, finish
from dovetail.runtime.upload import pinned

logger = logging.getLogger(__name__)

PATIENCE = 8
"""Steps that run without a graph before theirs is captured under load: about what the capture itself costs."""
STAND_IN_PATIENCE = 40
"""The same while a larger graph stands in, which costs less."""


@dataclass(slots=True, eq=False)
class CapturedPrefill:
    """The graph of a size of T tokens and C chunks.

    `inputs` `[3 T + 4 C + 1]` int64 in, see `pack`. `rows` `[C]` are the device rows among them. `logits` `[C, V]`
    and `ids` `[C]` out, of the last tokens, and `broken` `[C]`, of all tokens.
    """

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    rows: Tensor
    logits: Tensor
    ids: Tensor
    broken: Tensor


def pack(chunks: Sequence[Chunk], size: Size, page_size: int, spare_row: int) -> npt.NDArray[np.int64]:
    """Write what a graph reads.

    Returns:
        `[3 T + 4 C + 1]`: ids, positions and slots by token; device rows, KV lengths and last tokens by chunk; and
        where each chunk starts, the end of the last one included.
    """
    packed = np.zeros(3 * size.tokens + 4 * size.chunks + 1, dtype=np.int64)
    ids, positions, slots = packed[: 3 * size.tokens].reshape(3, -1)
    rows, lens, last = packed[3 * size.tokens : -(size.chunks + 1)].reshape(3, -1)
    starts = packed[-(size.chunks + 1) :]
    slots[:], rows[:] = -1, spare_row
    at = 0
    for i, chunk in enumerate(chunks):
        end = at + chunk.num_new
        ids[at:end] = tokens_of(chunk)
        positions[at:end], slots[at:end] = places_of(chunk, page_size)
        rows[i], lens[i], last[i], starts[i] = chunk.request.row, chunk.start + chunk.num_new, end - 1, at
        at = end
    starts[len(chunks) :] = at
    return packed


class PrefillGraphs:
    """Captures the prefill chunks of a step by size and replays them."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        state: DeviceState,
        page_size: int,
        sizes: Sequence[Size],
        pool: GraphPool,
    ) -> None:
        """Nothing is captured yet. The sizes are as `prefill_sizes.sizes` gives them."""
        self._model, self._attention, self._state = model, attention, state
        self._page_size, self._sizes, self._pool = page_size, list(sizes), pool
        self._captured: dict[Size, CapturedPrefill] = {}
        self._missed: dict[Size, int] = {}
        self._logits: Tensor | None = None

    @property
    def max_tokens(self) -> int:
        """The most tokens that a graph computes."""
        return max(size.tokens for size in self._sizes)

    def capture_first(self) -> None:
        """Capture what the first requests need, with a progress bar."""
        for size in tqdm([s for s in self._sizes if s in FIRST], desc="Capturing prefill graphs", unit="graph"):
            self._capture(size)

    @property
    def num_left(self) -> int:
        """Graphs that are not captured yet."""
        return len(self._sizes) - len(self._captured)

    def rehearse(self) -> None:
        """See `Chore.rehearse`."""
        for size in self._sizes:
            self._step(self._inputs(size), size)

    def run_next(self) -> None:
        """Capture a size that is missing, while the engine has nothing else to do."""
        missing = [size for size in self._sizes if size not in self._captured]
        if missing:
            self._capture(missing[0])

    def size_for(self, chunks: Sequence[Chunk]) -> Size | None:
        """Return the size to replay for a step's chunks, or None if they have to run without a graph.

        A missing size is captured once it has been missed often. Until then a larger one may stand in: of up to 512
        tokens, or of twice as many.
        """
        if any(chunk.request.prompt_logprobs is not None for chunk in chunks):
            return None  # all tokens' logits are wanted, not the last one's
        tokens = sum(chunk.num_new for chunk in chunks)
        fitting = [size for size in self._sizes if size.tokens >= tokens and size.chunks >= len(chunks)]
        if not fitting:
            return None
        wanted, most = fitting[0], max(SINGLE[-1], 2 * fitting[0].tokens)
        found = next((size for size in fitting if size in self._captured and size.tokens <= most), None)
        if found != wanted:
            self._missed[wanted] = self._missed.get(wanted, 0) + 1
            if self._missed[wanted] > (PATIENCE if found is None else STAND_IN_PATIENCE):
                found = self._capture_late(wanted, found)
        return found

    def _capture_late(self, wanted: Size, found: Size | None) -> Size | None:
        """Capture a size under load; where there is no memory for it, `found` serves on, and it is not tried again."""
        try:
            self._capture(wanted)
        except torch.OutOfMemoryError as error:
            self._sizes.remove(wanted)
            logger.warning("No memory for a prefill graph of %s (%s)", wanted, str(error).splitlines()[0])
            return found
        return wanted

    def run(self, chunks: Sequence[Chunk], size: Size) -> CapturedPrefill:
        """Compute chunks; the logits and ids of one that does not end its request's known tokens mean nothing."""
        captured = self._captured[size]
        packed = torch.from_numpy(pack(chunks, size, self._page_size, self._state.spare_row))
        captured.inputs.copy_(pinned(packed, self._state.device), non_blocking=True)
        captured.graph.replay()
        return captured

    def _capture(self, size: Size) -> None:
        inputs = self._inputs(size)
        graph, (logits, ids, broken) = self._pool.capture(lambda: self._step(inputs, size))
        rows = inputs[3 * size.tokens : 3 * size.tokens + size.chunks]
        self._captured[size] = CapturedPrefill(graph, inputs, rows, logits, ids, broken)

    def _inputs(self, size: Size) -> Tensor:
        """What a graph reads, all of it padding."""
        packed = torch.from_numpy(pack([], size, self._page_size, self._state.spare_row))
        return packed.to(self._state.device)

    def _step(self, inputs: Tensor, size: Size) -> tuple[Tensor, Tensor, Tensor]:
        """The chunks of one step, on the static inputs and device state alone."""
        ids, positions, slots = inputs[: 3 * size.tokens].view(3, -1)
        rows, lens, last = inputs[3 * size.tokens : -(size.chunks + 1)].view(3, -1)
        starts = inputs[-(size.chunks + 1) :].to(torch.int32)
        batch = ForwardBatch(
            num_decode=0,
            positions=positions,
            kv_slots=slots,
            rows=rows,
            page_table=self._state.page_table,
            seq_lens=lens,
            q_starts=starts,
            seq_lens_cpu=[],
            q_lens_cpu=[size.tokens] * size.chunks,
            attention=self._attention,
            last_tokens=last,
        )
        self._attention.plan(batch, Phase.CAPTURE)
        self._attention.plan_in_graph(batch)
        hidden = self._model.forward(ids, batch)
        logits = self._keep(self._model.lm_head(hidden.index_select(0, last)))
        chosen, broken = finish(logits, rows, lens, self._state)
        check_tokens(hidden, starts, broken)
        return logits, chosen, broken

    def _keep(self, logits: Tensor) -> Tensor:
        """Put the logits of several chunks where those of all such graphs stand: each for itself would be too many."""
        if logits.shape[0] == 1:
            return logits
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        return self._logits.copy_(logits)
