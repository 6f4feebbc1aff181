"""A step's requests in pieces of 64 tokens, as kernels that fold tokens take them: all of it stands on the device.

B requests, C pieces, T tokens. How many pieces there are is known on the host as a bound only, so that a graph can hold
any division of its tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.contracts.attention import ForwardBatch
from dovetail.sdk.layers.ops.conv import PIECE


class Pieces:
    """The pieces of the requests of a step from one on. They end where a request is a multiple of 64 long, or ends.

    Attributes:
        first: The first of these requests.
        first_token: Its first token in the batch.
        lens: `[B]` int64, tokens of each request once those of the step are in.
        rows: `[B]` int64, device rows.
        starts: `[B + 1]` int64, first token of each request, counted from `first_token`; the last is the end.
        pieces: `[B + 1]` int64, first piece of each request; the last is the number of pieces.
        table: `[C, 3]` int64, request, first token and number of tokens of each piece; none of what pads the table.
    """

    def __init__(self, batch: ForwardBatch, first: int) -> None:
        """Divide requests `first …` of a step; those before it bring a token each."""
        self.first = self.first_token = first
        self.lens, self.rows = batch.seq_lens[first:].long(), batch.rows[first:]
        self.starts = batch.q_starts[first:].long() - first
        new = self.starts[1:] - self.starts[:-1]
        self._begin = (self.lens - new) // PIECE  # what is before it is folded
        num = torch.where(new > 0, (self.lens - 1) // PIECE - self._begin + 1, 0)
        self.pieces = torch.cat((num.new_zeros(1), num.cumsum(0)))
        tokens = batch.num_tokens - first
        self._size = min(tokens, tokens // PIECE + 2 * len(self.rows))
        self.table = self._table(self.lens - new)
        self._saves, self._by_group = _save_table(batch), dict[int, Tensor]()

    def _table(self, before: Tensor) -> Tensor:
        at = torch.arange(self._size, device=self.rows.device)
        request = torch.searchsorted(self.pieces[1:], at, right=True)
        is_piece = request < len(self.rows)
        request = request.clamp(max=len(self.rows) - 1)
        number = self._begin[request] + at - self.pieces[request]
        start = torch.maximum(number * PIECE, before[request])
        end = torch.minimum((number + 1) * PIECE, self.lens[request])
        first = self.starts[request] + start - before[request]
        return torch.stack((request, first, torch.where(is_piece, end - start, 0)), 1)

    def saves(self, group: int) -> Tensor:
        """Return for each piece which copy of the states of a group to take behind it: `[C]` int64, -1 for none."""
        if group not in self._by_group:
            found = torch.full((self._size + 1,), -1, device=self.rows.device)
            if self._saves is not None:
                of_group, request, length, copy = self._saves.unbind(1)
                request = request - self.first
                is_mine = (of_group == group) & (copy >= 0) & (request >= 0)
                request = request.clamp(min=0)
                at = self.pieces[request] + (length - 1) // PIECE - self._begin[request]
                found.index_put_((torch.where(is_mine, at, self._size),), copy)  # the last one is nobody's
            self._by_group[group] = found[:-1]
        return self._by_group[group]


def _save_table(batch: ForwardBatch) -> Tensor | None:
    if batch.save_table is not None or not batch.saves:
        return batch.save_table
    saves = [[save.group, save.request, save.length, save.copy] for save in batch.saves]
    return torch.tensor(saves, device=batch.rows.device)
