"""What the device knows of running requests: one stable row each, changed by differences only.

A request keeps its row from admission to release. The sampler writes the next token where the next step reads it, so
that a step can be launched before the host knows the last one's tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceState:
    """Rows of running requests.

    Attributes:
        page_table: `[S, max_pages]` int32, page ids; 0 (the null page) past a request's pages.
        next_ids: `[S]` int64, the token that the row's next decode step reads.
        seq_lens: `[S]` int64, tokens of the row whose keys and values are in its pages.
        spare_row: A row that no request holds: it pads the batches of CUDA graphs.
    """

    def __init__(self, num_rows: int, max_pages: int, device: torch.device) -> None:
        self.device = device
        self.spare_row = num_rows
        self.page_table = torch.zeros(num_rows + 1, max_pages, dtype=torch.int32, device=device)
        self.next_ids = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that no request holds."""
        return len(self._free)

    def take_row(self) -> int:
        """Give a request a row; its page table is clear."""
        return self._free.pop()

    def release_row(self, row: int) -> None:
        """Clear a row and take it back."""
        self.page_table[row].zero_()
        self.next_ids[row] = 0
        self.seq_lens[row] = 0
        self._free.append(row)

    def set_pages(self, row: int, start: int, pages: list[int]) -> None:
        """Write page ids at columns `start …` of a row."""
        if pages:
            fresh = torch.tensor(pages, dtype=torch.int32)
            self.page_table[row, start : start + len(pages)] = fresh.to(self.device, non_blocking=True)

    def set_next(self, rows: Tensor, ids: Tensor) -> None:
        """Store sampled tokens `ids` `[R]` for rows `[R]`."""
        self.next_ids.index_copy_(0, rows, ids)
