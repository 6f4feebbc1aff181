"""What the device knows of running requests: one stable row each, changed by differences only.

A request keeps its row from admission until it is cleared. The next token is written where the next step reads it, so
that a step can be launched before the host knows the last one's tokens: eagerly `Stepper._sample` writes it through
`DeviceState.set_next`, in a graph its last kernel does. What a step changes is sent before it is computed, in one copy
however many rows it touches. S device rows, one for each request, and behind them spare ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dovetail.cache.pool import StateCache
from dovetail.contracts.kernels import Kernel
from dovetail.contracts.seeds import signed64
from dovetail.messages.step import Admit, Ints, StepInput
from dovetail.runtime.device.devices import to_device
from dovetail.runtime.device.row_images import RowImages
from dovetail.runtime.device.row_params import RowParams
from dovetail.runtime.memory.plan import NUM_PADDING_ROWS
from dovetail.runtime.step_kernels import PLAIN_STEP
from dovetail.sdk.rows import FLOATS, MAX_BIAS, NOTHING

Longs = npt.NDArray[np.int64]
Places = npt.NDArray[np.integer]
NO_LONGS: Longs = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Changes:
    """What a step changes of the device rows, as one array: packed on the host, to be sent and written at once.

    E page table entries, C rows that are cleared, A requests that take rows.

    Attributes:
        packed: `[2 E + C + A (1 + F + N)]` places in the page tables and their pages; rows that are cleared; rows that
            are taken, and by name the bits of their float32 `FLOATS` and their `NUMBERS`.
        num_entries: E.
        num_cleared: C.
        num_admits: A.
    """

    packed: Longs
    num_entries: int
    num_cleared: int
    num_admits: int


def pack(places: Longs, pages: Ints, cleared: Sequence[Ints], admits: Sequence[Admit]) -> Changes:
    """Pack entries at `places` `[E]`, rows that are cleared, and the parameters of requests that take rows."""
    parts: list[npt.NDArray[np.integer]] = [places, pages, *cleared]
    if admits:
        params = [admit.params for admit in admits]
        floats = np.array([[getattr(p, name) for p in params] for name in FLOATS])
        # 0 where nothing is banned: the row still has the stop ids of whoever had it.
        least = [admit.params.min_tokens if admit.stop_ids else 0 for admit in admits]
        numbers = [
            [p.top_k for p in params],
            [signed64(a.seed) for a in admits],
            [a.num_prompt for a in admits],
            least,
            [NOTHING] * len(admits),  # until its tokens are counted
            [NOTHING if p.logprobs is None else p.logprobs for p in params],
            [len(p.logit_bias) if len(p.logit_bias) <= MAX_BIAS else 0 for p in params],
        ]
        rows = np.array([[admit.row for admit in admits]])
        parts += [rows.ravel(), floats.astype(np.float32).view(np.int32).ravel(), np.array(numbers).ravel()]
    return Changes(np.concatenate(parts, dtype=np.int64), len(places), sum(map(len, cleared)), len(admits))


class DeviceState:
    """Rows of running requests.

    Attributes:
        page_tables: For each cache group that has pages `[S, max_pages]` int32, page ids; 0 (the null page) past a
            request's pages.
        page_table: The first of them.
        next_ids: `[S]` int64, the token that the row's next decode step reads.
        seq_lens: `[S]` int64, tokens of the row whose keys and values are in its pages.
        pages: `[G, S, max_pages]` the page tables on the host.
        lens: `[S]` int64 on the host, `seq_lens` once the steps that were launched are done.
        seconds: `[S]` int64 on the host, where the second of two texts begins; 0 where there is one.
        padding_row: The first row that no request holds.
        params: How the tokens of the rows are drawn.
        states: Of recurrent layers, by row; None where the model has none.
        images: Of requests, by row; None where the model reads text only.
    """

    def __init__(
        self,
        num_rows: int,
        max_pages: int,
        device: torch.device,
        num_groups: int = 1,
        states: StateCache | None = None,
        write_changes: Kernel = PLAIN_STEP.write_changes,
    ) -> None:
        self.device, self._write_changes = device, write_changes
        self.padding_row = num_rows
        total = num_rows + NUM_PADDING_ROWS
        self._tables = torch.zeros(num_groups, total, max_pages, dtype=torch.int32, device=device)
        self.page_tables = list(self._tables.unbind())
        self.page_table = self.page_tables[0]
        self.next_ids, self.seq_lens = torch.zeros(2, total, dtype=torch.int64, device=device).unbind()
        self.pages = np.zeros((num_groups, total, max_pages), dtype=np.int32)
        self.lens, self.seconds = np.zeros((2, total), dtype=np.int64)
        self.params = RowParams(total, device)
        self._cleared: list[Ints] = []
        self._entries: list[Longs] = []
        self.states = states
        self.images: RowImages | None = None
        self._loads: list[Ints] = []

    def apply(self, step: StepInput) -> None:
        """Take what a step says of rows, on the host; `flush` sends it. Rows are cleared, then taken again."""
        if step.cleared.size:
            self._forget(step.cleared)
        for admit in step.admit:
            self.params.admit(admit)
            self.seconds[admit.row] = admit.second
        if step.tables.size:
            groups, rows, columns, pages = step.tables
            self.pages[groups, rows, columns] = pages
            self._entries.append(self._flat(groups, rows, columns))
        if step.loads.size:
            self._loads.append(step.loads)

    def _forget(self, rows: Ints) -> None:
        """Empty rows: only entries that hold a page are sent."""
        groups, at, columns = np.nonzero(self.pages[:, rows])
        self._entries.append(self._flat(groups, rows[at], columns))
        self._cleared.append(rows)
        self.pages[:, rows] = 0
        self.lens[rows] = 0
        self.params.clear(rows.tolist())

    def _flat(self, groups: Places, rows: Places, columns: Places) -> Longs:
        """Place of entries in the tables of all groups together."""
        _, num_rows, width = self.pages.shape
        places: Longs = (groups.astype(np.int64) * num_rows + rows) * width + columns
        return places

    def flush(self) -> None:
        """Send what has changed to the device.

        If that fails, the step does, and its requests begin again. What the host knows of rows is sent with the next
        step then, as a row may have been left by somebody else. States are loaded for requests of this step alone:
        those of a step that failed never come back.
        """
        loads, self._loads = self._loads, []
        admits = self.params.unsent()
        if self._entries or self._cleared or admits:
            # An entry that has changed twice is sent twice, and as what it is by now.
            places = np.concatenate(self._entries) if self._entries else NO_LONGS
            changes = pack(places, self.pages.reshape(-1)[places], self._cleared, admits)
            sent = to_device(torch.from_numpy(changes.packed), self.device)
            self._write_changes(
                sent, self._tables, self.next_ids, self.seq_lens, self.params.floats, self.params.numbers,
                changes.num_entries, changes.num_cleared, changes.num_admits,
            )  # fmt: skip
            self._entries, self._cleared = [], []
            self.params.sent()
        for groups, copies, rows in loads:
            if self.states is None:
                raise ValueError("the step loads states, and the model has none")
            for group in np.unique(groups).tolist():
                mine = groups == group
                self.states.load(group, copies[mine].tolist(), rows[mine].tolist())

    def positions(self, rows: Tensor) -> Tensor:
        """Return the place of the next token of rows `[R]` among those that they generate: `[R]` int64."""
        return self.seq_lens[rows] - self.params.num_prompt[rows]

    def clear_padding(self) -> None:
        """Empty the spare rows, which steps write like any other; graphs do so themselves."""
        self.lens[self.padding_row :] = 0
        self.next_ids[self.padding_row :].zero_()
        self.seq_lens[self.padding_row :].zero_()

    def set_next(self, rows: Tensor, ids: Tensor) -> None:
        """Store sampled tokens `ids` `[R]` for rows `[R]`."""
        self.next_ids.index_copy_(0, rows, ids)
