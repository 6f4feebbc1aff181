"""What the device knows of running requests: one stable row each, changed by differences only.

A request keeps its row from admission to release. The sampler writes the next token where the next step reads it, so
that a step can be launched before the host knows the last one's tokens. What the host changes is collected and sent
before the next step, in a few copies however many rows it touches.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dovetail.runtime.upload import to_device, upload


class DeviceState:
    """Rows of running requests.

    Attributes:
        page_tables: For each cache group `[S, max_pages]` int32, page ids; 0 (the null page) past a request's pages.
        page_table: The first of them.
        next_ids: `[S]` int64, the token that the row's next decode step reads.
        seq_lens: `[S]` int64, tokens of the row whose keys and values are in its pages.
        spare_row: A row that no request holds: it pads the batches of CUDA graphs.
    """

    def __init__(self, num_rows: int, max_pages: int, device: torch.device, num_groups: int = 1) -> None:
        self.device = device
        self.spare_row = num_rows
        self.page_tables = [
            torch.zeros(num_rows + 1, max_pages, dtype=torch.int32, device=device) for _ in range(num_groups)
        ]
        self.page_table = self.page_tables[0]
        self.next_ids = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._free = list(range(num_rows - 1, -1, -1))
        self._released: list[int] = []
        self._pages: list[dict[int, dict[int, int]]] = [{} for _ in range(num_groups)]

    @property
    def num_free(self) -> int:
        """Rows that no request holds."""
        return len(self._free)

    def take_row(self) -> int:
        """Give a request a row; its page table is clear once `flush` has run."""
        return self._free.pop()

    def release_row(self, row: int) -> None:
        """Take a row back; `flush` clears it."""
        for changed in self._pages:
            changed.pop(row, None)
        self._released.append(row)
        self._free.append(row)

    def set_pages(self, row: int, start: int, pages: list[int], group: int = 0) -> None:
        """Write a group's page ids at columns `start …` of a row, at the next `flush`."""
        if pages:
            self._pages[group].setdefault(row, {}).update(enumerate(pages, start))

    def flush(self) -> None:
        """Send what has changed: cleared rows first, as some have been taken again."""
        if self._released:
            rows = upload(self._released, torch.int64, self.device)
            for tensor in (*self.page_tables, self.next_ids, self.seq_lens):
                tensor.index_fill_(0, rows, 0)
            self._released = []
        for table, changed in zip(self.page_tables, self._pages, strict=True):
            if changed:
                width = table.shape[1]
                places = [row * width + column for row, pages in changed.items() for column in pages]
                ids = [page for pages in changed.values() for page in pages.values()]
                fresh = to_device(torch.from_numpy(np.array([places, ids], dtype=np.int64)), self.device)
                table.view(-1).index_copy_(0, fresh[0], fresh[1].to(torch.int32))
                changed.clear()

    def clear_spare(self) -> None:
        """Empty the spare row, which steps write like any other."""
        self.next_ids[self.spare_row :].zero_()
        self.seq_lens[self.spare_row :].zero_()

    def set_next(self, rows: Tensor, ids: Tensor) -> None:
        """Store sampled tokens `ids` `[R]` for rows `[R]`."""
        self.next_ids.index_copy_(0, rows, ids)
