"""The end of a step that verifies drafts, in one launch behind that of a prefill's graph.

It computes logits behind several tokens, draws at each of these places, and puts the rows behind the drafts that hold,
as `runtime/verify.py` has it. Operation by operation, that takes longer than the prefill.

P places, in the order of their rows; T tokens of the prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dovetail.contracts.model import CausalLM
from dovetail.messages.step import MOST_VERIFIED, StepInput
from dovetail.runtime.device.device_state import DeviceState
from dovetail.runtime.device.graph_pool import GraphPool, PooledGraph
from dovetail.runtime.device.upload import pinned
from dovetail.runtime.graphs.batch import NO_DRAFT, StepTokens, drafts_behind, last_tokens
from dovetail.runtime.step_kernels import StepKernels

Longs = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class VerifyPlaces:
    """Where tokens are drawn, `[P]` each, on the host.

    Attributes:
        tokens: Behind which token of the prefill.
        rows: Of which device row.
        behind: The draft that stands there, `NO_DRAFT` for none.
        first: The first place of the same row.
        chunks: Which of the prefill's chunks.
        lens: Tokens of the row up to this place.
    """

    tokens: Longs
    rows: Longs
    behind: Longs
    first: Longs
    chunks: Longs
    lens: Longs

    @classmethod
    def of(cls, step: StepInput, tokens: StepTokens, first: int) -> VerifyPlaces:
        """Those of a step's rows `first …` that are sampled, whose tokens these are."""
        at = step.places[step.places >= first]
        last = last_tokens(step, tokens.starts, first)
        return cls(
            tokens=last,
            rows=step.rows[at].astype(np.int64),
            behind=drafts_behind(step, at),
            first=np.searchsorted(at, at),
            chunks=at - first,
            lens=tokens.positions[last] + 1,
        )

    def packed(self, num: int, spare: int) -> Longs:
        """Write what a graph of `num` places reads, the last ones of them of the row `spare`: `[6 num]`."""
        packed = np.zeros((6, num), dtype=np.int64)
        packed[1], packed[2], packed[3] = spare, NO_DRAFT, np.arange(num)
        for line, given in zip(packed, (self.tokens, self.rows, self.behind, self.first, self.chunks, self.lens),
                               strict=True):  # fmt: skip
            line[: len(given)] = given
        return packed.ravel()


NO_PLACES = VerifyPlaces(*[np.empty(0, dtype=np.int64)] * 6)


@dataclass(slots=True, eq=False)
class CapturedVerify:
    """The graphs of a number of places, without draws and with, which leave `ids` and `non_finite`, both `[P]`."""

    inputs: Tensor
    greedy: PooledGraph[tuple[Tensor, Tensor]]
    drawn: PooledGraph[tuple[Tensor, Tensor]]


class VerifyGraphs:
    """Captures ends of steps by their number of places and replays them.

    Attributes:
        hidden: `[MOST_VERIFIED, H]` final hidden states of the last prefill graph, once one was captured.
    """

    def __init__(self, model: CausalLM, state: DeviceState, pool: GraphPool, kernels: StepKernels, most: int) -> None:
        """For at most so many places. Nothing is captured yet."""
        self._model, self._state, self._pool, self._kernels = model, state, pool, kernels
        self.most = most
        self.hidden: Tensor | None = None
        self._non_finite = torch.zeros(MOST_VERIFIED, dtype=torch.bool, device=state.device)
        self._logits: Tensor | None = None
        self._captured: dict[int, CapturedVerify] = {}

    def leave(self, hidden: Tensor, non_finite: Tensor) -> None:
        """Keep what a prefill of T tokens and C chunks has computed: `[T, H]`, and `[C]` which of them are broken."""
        if self.hidden is None:
            self.hidden = hidden.new_zeros(MOST_VERIFIED, hidden.shape[-1])
        self.hidden[: len(hidden)].copy_(hidden)
        self._non_finite[: len(non_finite)].copy_(non_finite)

    def sizes(self, tokens: int) -> list[int]:
        """Return the numbers of places that a prefill of so many tokens needs graphs of."""
        return sorted({min(self.most, tokens), min(self.most, max(1, tokens // 2))})

    def rehearse(self, tokens: int) -> None:
        """See `CaptureTask.rehearse`."""
        for num in self.sizes(tokens):
            self._step(self._inputs(num), num, is_drawn=True)

    def capture(self, tokens: int) -> None:
        """Capture what can follow a prefill of so many tokens, after that."""
        for num in self.sizes(tokens):
            if num not in self._captured:
                inputs = self._inputs(num)
                greedy, drawn = (self._pool.capture(self._bound(inputs, num, is_drawn)) for is_drawn in (False, True))
                self._captured[num] = CapturedVerify(inputs, greedy, drawn)

    def run(self, places: VerifyPlaces, *, is_drawn: bool) -> tuple[Tensor, Tensor]:
        """Verify what the prefill that was just replayed has computed; its rows are put where they go on.

        Returns:
            `[P]` the token at each place, and whether it is of a chunk or has logits that are not finite; borrowed
            until the next replay.
        """
        num = len(places.tokens)
        size = min(size for size in self._captured if size >= num)
        captured = self._captured[size]
        packed = torch.from_numpy(places.packed(size, self._state.padding_row))
        captured.inputs.copy_(pinned(packed, self._state.device), non_blocking=True)
        ids, non_finite = (captured.drawn if is_drawn else captured.greedy).replay().read()
        return ids[:num], non_finite[:num]

    def _bound(self, inputs: Tensor, num: int, is_drawn: bool) -> Callable[[], tuple[Tensor, Tensor]]:
        return lambda: self._step(inputs, num, is_drawn=is_drawn)

    def _inputs(self, num: int) -> Tensor:
        packed = torch.from_numpy(NO_PLACES.packed(num, self._state.padding_row))
        return packed.to(self._state.device)

    def _step(self, inputs: Tensor, num: int, *, is_drawn: bool) -> tuple[Tensor, Tensor]:
        """What is captured, on static inputs, what the prefill left, and device state."""
        tokens, rows, behind, first, chunks, lens = inputs.view(6, num)
        state, kernels = self._state, self._kernels
        if self.hidden is None:
            raise ValueError("what follows a prefill is captured after it")
        logits = self._kept(self._model.lm_head(self.hidden.index_select(0, tokens)))
        # Draws read and write device rows: here, each place is one.
        at = torch.arange(num, device=inputs.device)
        next_ids, seq_lens = lens.clone(), lens.clone()
        ids, non_finite = kernels.finish_step(logits, at, lens, next_ids, seq_lens, num)
        if is_drawn:
            floats, numbers = (table.index_select(1, rows) for table in (state.params.floats, state.params.numbers))
            ids = kernels.draw_plainly(logits, ids, at, next_ids, seq_lens, floats, numbers)
        non_finite = non_finite | self._non_finite.index_select(0, chunks)
        self._go_on(ids, rows, behind, first, lens)
        return ids, non_finite

    def _go_on(self, ids: Tensor, rows: Tensor, behind: Tensor, first: Tensor, lens: Tensor) -> None:
        """Put rows behind their drafts that hold: where the first differs from what was drawn is a row's last token."""
        state, spare = self._state, self._state.padding_row
        differs = (ids != behind).to(torch.int64)
        before = differs.cumsum(0) - differs
        is_last = (differs > 0) & (before == before.index_select(0, first)) & (rows != spare)
        to = torch.where(is_last, rows, spare)
        for known, new in ((state.next_ids, ids), (state.seq_lens, lens)):
            known.scatter_(0, to, torch.where(is_last, new, 0))

    def _kept(self, logits: Tensor) -> Tensor:
        """Put logits where those of all such graphs stand: each for itself would be too many."""
        if self._logits is None:
            self._logits = logits.new_empty(self.most, logits.shape[-1])
        return self._logits[: len(logits)].copy_(logits)
