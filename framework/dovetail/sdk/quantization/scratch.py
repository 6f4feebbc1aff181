"""Memory in which a thread that loads makes what is soon copied, one matrix after the other.

Memory that is new costs as much as to copy into it: the system clears it page by page. So what a conversion makes, and
what is joined of a matrix's pieces, lies where something else of that kind lay before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from dovetail.contracts.device import is_on_host


class Scratch(threading.local):
    """Reusable memory of one thread; it ends with its thread.

    Attributes:
        awaited: Names of tensors in it that a caller still needs: until then no memory is reused.
    """

    def __init__(self) -> None:
        self.awaited: set[str] = set()
        self._is_open = False
        self._free: list[Tensor] = []
        self._lent: list[Tensor] = []

    @contextmanager
    def opened(self, *, is_open: bool) -> Iterator[None]:
        """Have `empty` give out this memory meanwhile, if it is open."""
        before, self._is_open = self._is_open, is_open
        try:
            yield
        finally:
            self._is_open = before

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor with any numbers in it: where this is open, on the host, one that is valid until `reuse`."""
        if not self._is_open or not is_on_host(device):
            return torch.empty(*shape, dtype=dtype, device=device)
        return self._borrowed(shape, dtype)

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the rows of pieces one after the other; valid until `reuse`."""
        first = pieces[0]
        out = self._borrowed((sum(len(piece) for piece in pieces), *first.shape[1:]), first.dtype)
        return torch.cat(list(pieces), out=out)

    def reuse(self) -> None:
        """Make all lent memory available again: no caller reads it any more."""
        if not self.awaited:
            self._free += self._lent
            self._lent.clear()

    def clear(self) -> None:
        """Free this thread's memory."""
        self.awaited.clear()
        self._free.clear()
        self._lent.clear()

    def _borrowed(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        found = min((each for each in self._free if len(each) >= num_bytes), key=len, default=None)
        taken = found if found is not None else max(self._free, key=len, default=None)
        self._free = [each for each in self._free if each is not taken]
        if found is None:  # in place of a smaller one, so that there are never more than were needed at once
            del taken
            found = torch.empty(num_bytes, dtype=torch.uint8)
        self._lent.append(found)
        return found[:num_bytes].view(dtype).view(*shape)


SCRATCH = Scratch()
"""The thread that loads clears its own."""
