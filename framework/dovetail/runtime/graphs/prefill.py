"""Prefills as CUDA graphs: the chunks of a step, padded to a number of tokens and chunks.

An eager prefill is some three hundred launches from Python, which cost more than the computing of short prompts; a
replay is one. Padding tokens have negative slots, so they write no keys and values, and stand after the live ones, so
no live token attends to them. Padding chunks are empty and belong to the spare row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from dovetail.contracts.attention import AttentionBackend, ForwardBatch, Phase
from dovetail.contracts.model import CausalLM
from dovetail.messages.step import MAX_SAVES, MOST_VERIFIED, Ints, PrefillGraph, no_ints
from dovetail.runtime.device.device_state import DeviceState
from dovetail.runtime.device.graph_pool import GraphPool, PooledGraph, StepOutputs
from dovetail.runtime.device.upload import pinned
from dovetail.runtime.graphs.batch import NO_TOKENS, StepTokens
from dovetail.runtime.graphs.capture_queue import GraphSet
from dovetail.runtime.graphs.verify import VerifyGraphs
from dovetail.runtime.memory.prefill_sizes import FIRST
from dovetail.runtime.step_kernels import PLAIN_STEP, StepKernels


@dataclass(slots=True, eq=False)
class CapturedPrefill:
    """The graph of a size of T tokens and C chunks.

    `inputs` `[3 T + 4 C + 1 + 4 N]` int64 in, see `pack`. `rows` `[C]` are the device rows among them. Of its outputs,
    `logits` `[C, V]` and `ids` `[C]` are of the chunks' last tokens, `non_finite` `[C]` of all tokens.
    """

    graph: PooledGraph[StepOutputs]
    inputs: Tensor
    rows: Tensor


def _ends(key: PrefillGraph, num_saves: int) -> list[int]:
    """Where the parts end that `pack` names."""
    ends: list[int] = np.cumsum((3 * key.tokens, 3 * key.chunks, key.chunks + 1, 4 * num_saves)).tolist()
    return ends


def pack(
    tokens: StepTokens, rows: Ints, key: PrefillGraph, padding_row: int, num_saves: int = 0
) -> npt.NDArray[np.int64]:
    """Write what a graph reads of the chunks of some device rows; N states are copied at most.

    Returns:
        `[3 T + 4 C + 1 + 4 N]`: ids, positions and slots by token; device rows, KV lengths and last tokens by chunk;
        where each chunk starts, the end of the last one included; and of each copy group, chunk, length and where it
        goes, -1 for none.
    """
    first, second, third, end = _ends(key, num_saves)
    packed = np.zeros(end, dtype=np.int64)
    ids, positions, slots = packed[:first].reshape(3, -1)
    row, lens, last = packed[first:second].reshape(3, -1)
    starts, saves = packed[second:third], packed[third:].reshape(-1, 4)
    slots[:], row[:], saves[:, 3] = -1, padding_row, -1
    saves[: len(tokens.saves)] = tokens.saves
    num_tokens, num = len(tokens.positions), len(rows)
    ids[:num_tokens], positions[:num_tokens], slots[:num_tokens] = tokens.ids, tokens.positions, tokens.slots
    row[:num], lens[:num], last[:num], starts[:num] = rows, tokens.lens, tokens.starts[1:] - 1, tokens.starts[:-1]
    starts[num:] = num_tokens
    return packed


class PrefillGraphs(GraphSet[PrefillGraph, CapturedPrefill]):
    """Captures the prefill chunks of a step by size and replays them.

    Attributes:
        keys: Those that may be captured, in the order in which `run_next` does.
        verify: What verifies drafts behind the smaller ones; None where nobody drafts.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        state: DeviceState,
        sizes: Sequence[PrefillGraph],
        pool: GraphPool,
        step: StepKernels = PLAIN_STEP,
        places: int = 0,
    ) -> None:
        """Nothing is captured yet. The sizes are as `prefill_sizes.sizes` gives them.

        Drafts are verified at no more `places` in a step; 0: nobody drafts.
        """
        self._model, self._attention, self._state = model, attention, state
        self._pool, self._kernels = pool, step
        self.keys = list(sizes)
        self._captured: dict[PrefillGraph, CapturedPrefill] = {}
        self._logits: Tensor | None = None
        self.verify = VerifyGraphs(model, state, pool, step, places) if places else None

    @property
    def max_tokens(self) -> int:
        """The most tokens that a graph computes."""
        return max(size.tokens for size in self.keys)

    def capture_first(self) -> None:
        """Capture what the first requests need, with a progress bar."""
        for size in tqdm([s for s in self.keys if s in FIRST], desc="Capturing prefill graphs", unit="graph"):
            self._capture(size)

    def rehearse(self) -> None:
        """See `CaptureTask.rehearse`."""
        for size in self.keys:
            self._step(self._inputs(size), size)
            if (verify := self._verify(size)) is not None:
                verify.rehearse(size.tokens)

    def run(self, tokens: StepTokens, rows: Ints, key: PrefillGraph) -> tuple[Tensor, StepOutputs]:
        """Compute chunks; the logits and ids of one that does not end its request's known tokens mean nothing.

        Returns:
            The device rows `[C]`, and outputs that are borrowed until the next replay.
        """
        captured = self._captured[key]
        packed = torch.from_numpy(pack(tokens, rows, key, self._state.padding_row, self._num_saves(key)))
        captured.inputs.copy_(pinned(packed, self._state.device), non_blocking=True)
        return captured.rows, captured.graph.replay().read()

    def _capture(self, size: PrefillGraph) -> None:
        inputs = self._inputs(size)
        graph = self._pool.capture(lambda: self._step(inputs, size))
        rows = inputs[3 * size.tokens : 3 * size.tokens + size.chunks]
        if (verify := self._verify(size)) is not None:
            verify.capture(size.tokens)
        self._captured[size] = CapturedPrefill(graph, inputs, rows)

    def _verify(self, size: PrefillGraph) -> VerifyGraphs | None:
        return self.verify if size.tokens <= MOST_VERIFIED else None

    def _inputs(self, size: PrefillGraph) -> Tensor:
        """What a graph reads, all of it padding."""
        packed = torch.from_numpy(pack(NO_TOKENS, no_ints(), size, self._state.padding_row, self._num_saves(size)))
        return packed.to(self._state.device)

    def _num_saves(self, size: PrefillGraph) -> int:
        """Copies of states that a step takes at most."""
        states = self._state.states
        return 0 if states is None else size.chunks * states.num_groups * MAX_SAVES

    def _step(self, inputs: Tensor, size: PrefillGraph) -> StepOutputs:
        """The chunks of one step, on the static inputs and device state alone."""
        first, second, third, _ = _ends(size, self._num_saves(size))
        ids, positions, slots = inputs[:first].view(3, -1)
        rows, lens, last = inputs[first:second].view(3, -1)
        starts = inputs[second:third].to(torch.int32)
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
            states=self._state.states,
            save_table=None if self._state.states is None else inputs[third:].view(-1, 4),
        )
        self._attention.plan(batch, Phase.CAPTURE)
        self._attention.plan_in_graph(batch)
        hidden = self._model.forward(ids, batch)
        logits = self._keep(self._model.lm_head(hidden.index_select(0, last)))
        state = self._state
        chosen, non_finite = self._kernels.finish_step(
            logits, rows, lens, state.next_ids, state.seq_lens, state.padding_row
        )
        self._kernels.check_finite(hidden, starts, non_finite)
        if (verify := self._verify(size)) is not None:
            verify.leave(hidden, non_finite)
        return StepOutputs(logits, chosen, non_finite)

    def _keep(self, logits: Tensor) -> Tensor:
        """Put the logits of several chunks where those of all such graphs stand: each for itself would be too many."""
        if logits.shape[0] == 1:
            return logits
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        return self._logits.copy_(logits)
