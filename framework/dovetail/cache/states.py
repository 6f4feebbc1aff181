"""Recurrent state in device memory: a place for each device row, and copies of it for the prefix cache.

L layers, S device rows, N copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dovetail.cache.layouts import dtype_of, zeros
from dovetail.contracts.cache import CacheGroup

ZEROS = 0
"""The copy that is nobody's and never changes: with what a request begins."""


class StatePool:
    """The states of a group's layers: `[L, S, …]` for each of their tensors, and copies `[L, N, …]` in its dtype."""

    def __init__(
        self, group: CacheGroup, num_copies: int, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate `num_copies`, that of zeros included."""
        self._device = device
        num = len(group.writers)
        shapes = {tensor.name: (tensor.shape, dtype_of(tensor, dtype)) for tensor in group.tensors}
        self._rows = {name: zeros((num, num_rows, *shape), kind, device) for name, (shape, kind) in shapes.items()}
        self._copies = {name: zeros((num, num_copies, *shape), kind, device) for name, (shape, kind) in shapes.items()}
        self._slot = {index: i for i, index in enumerate(group.writers)}
        self._of_layer, self._copies_of_layer = (
            {index: {name: rows[slot] for name, rows in own.items()} for index, slot in self._slot.items()}
            for own in (self._rows, self._copies)
        )

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return sum(x.numel() * x.element_size() for x in (*self._rows.values(), *self._copies.values()))

    def rows(self, index: int) -> Mapping[str, Tensor]:
        """Return the tensors of layer `index` by name: `[S, …]`."""
        return self._of_layer[index]

    def copies(self, index: int) -> Mapping[str, Tensor]:
        """Return the copies of layer `index`'s tensors by name: `[N, …]`."""
        return self._copies_of_layer[index]

    def load(self, copies: Sequence[int], rows: Sequence[int]) -> None:
        """Put copies into device rows. Nothing is allocated for them: 64 states of a model may take 3 GiB."""
        pairs = list(zip(copies, rows, strict=True))
        fresh = torch.tensor([row for copy, row in pairs if copy == ZEROS], dtype=torch.int64).to(self._device)
        for name, own in self._rows.items():
            own.index_fill_(1, fresh, 0)
            for copy, row in pairs:
                if copy != ZEROS:
                    own[:, row].copy_(self._copies[name][:, copy])

    def save(self, index: int, copy: int, state: Mapping[str, Tensor]) -> None:
        """Keep a copy of layer `index`'s state `[1, …]` of one request."""
        for name, tensor in state.items():
            self._copies[name][self._slot[index], copy] = tensor[0]

    def zero_pages(self, copies: list[int]) -> None:
        """Zero copies whose contents may not be finite."""
        for own in self._copies.values():
            own[:, copies] = 0
