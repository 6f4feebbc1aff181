"""What the device knows of running requests: one stable row each, changed by differences only.

A request keeps its row from admission until it is cleared. The sampler writes the next token where the next step reads
it, so that a step can be launched before the host knows the last one's tokens. What a step changes is sent before it is
computed, in a few copies however many rows it touches. S device rows, one for each request, and behind them spare ones.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dovetail.cache.pool import StateCache
from dovetail.messages.step import Ints, StepInput
from dovetail.runtime.memory import NUM_SPARE
from dovetail.runtime.row_params import RowParams
from dovetail.runtime.upload import to_device


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
        spare_row: The first row that no request holds.
        params: How the tokens of the rows are drawn.
        states: Of recurrent layers, by row; None where the model has none.
    """

    def __init__(
        self,
        num_rows: int,
        max_pages: int,
        device: torch.device,
        num_groups: int = 1,
        states: StateCache | None = None,
    ) -> None:
        self.device = device
        self.spare_row = num_rows
        total = num_rows + NUM_SPARE
        self.page_tables = [torch.zeros(total, max_pages, dtype=torch.int32, device=device) for _ in range(num_groups)]
        self.page_table = self.page_tables[0]
        self.next_ids = torch.zeros(total, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(total, dtype=torch.int64, device=device)
        self.pages = np.zeros((num_groups, total, max_pages), dtype=np.int32)
        self.lens = np.zeros(total, dtype=np.int64)
        self.params = RowParams(total, device)
        self._cleared: list[Ints] = []
        self._tables: list[Ints] = []
        self.states = states
        self._loads: list[Ints] = []

    def apply(self, step: StepInput) -> None:
        """Take what a step says of rows, on the host; `flush` sends it. Rows are cleared, then taken again."""
        if step.cleared.size:
            self.pages[:, step.cleared] = 0
            self.lens[step.cleared] = 0
            self.params.clear(step.cleared.tolist())
            self._tables = [_without(table, step.cleared) for table in self._tables]  # of a step that failed
            self._cleared.append(step.cleared)
        for admit in step.admit:
            self.params.admit(admit)
        if step.tables.size:
            groups, rows, columns, pages = step.tables
            self.pages[groups, rows, columns] = pages
            self._tables.append(step.tables)
        if step.loads.size:
            self._loads.append(step.loads)

    def flush(self) -> None:
        """Send what has changed to the device."""
        if self._cleared:
            rows = to_device(torch.from_numpy(np.concatenate(self._cleared).astype(np.int64)), self.device)
            for tensor in (*self.page_tables, self.next_ids, self.seq_lens):
                tensor.index_fill_(0, rows, 0)
            self._cleared = []
        for groups, rows, columns, pages in self._tables:
            entries = np.stack((rows.astype(np.int64) * self.pages.shape[2] + columns, pages))
            for group, table in enumerate(self.page_tables):
                mine = entries[:, groups == group]
                if mine.size:
                    fresh = to_device(torch.from_numpy(mine), self.device)
                    table.view(-1).index_copy_(0, fresh[0], fresh[1].to(torch.int32))
        self._tables = []
        for groups, copies, rows in self._loads:
            if self.states is None:
                raise ValueError("the step loads states, and the model has none")
            for group in np.unique(groups).tolist():
                mine = groups == group
                self.states.load(group, copies[mine].tolist(), rows[mine].tolist())
        self._loads = []
        self.params.flush()

    def positions(self, rows: Tensor) -> Tensor:
        """Return the place of the next token of rows `[R]` among those that they generate: `[R]` int64."""
        return self.seq_lens[rows] - self.params.num_prompt[rows]

    def clear_spare(self) -> None:
        """Empty the spare rows, which steps write like any other; graphs do so themselves."""
        self.lens[self.spare_row :] = 0
        self.next_ids[self.spare_row :].zero_()
        self.seq_lens[self.spare_row :].zero_()

    def set_next(self, rows: Tensor, ids: Tensor) -> None:
        """Store sampled tokens `ids` `[R]` for rows `[R]`."""
        self.next_ids.index_copy_(0, rows, ids)


def _without(table: Ints, rows: Ints) -> Ints:
    return table[:, ~np.isin(table[1], rows)]
