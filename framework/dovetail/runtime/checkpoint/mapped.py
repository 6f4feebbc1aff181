"""Files of tensors, mapped into memory: their pages are read when they are touched, and let go of when they were used.

What is read of a mapped file counts as this process's memory until it is let go of.
"""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import torch
from torch import Tensor

from dovetail.contracts.errors import ModelError


class MappedFiles:
    """Files that are opened when something of them is asked for. Threads may share one."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def numbers(self, file: Path, start: int, num: int, dtype: torch.dtype) -> Tensor:
        """Return `num` numbers from byte `start` on, one axis; a view that is not to be written.

        Raises:
            ModelError: The file cannot be read, or has no such bytes any more.
        """
        if num == 0:
            return torch.empty(0, dtype=dtype)
        mapped = self._mapped(file)
        if start + num * dtype.itemsize > len(mapped):
            raise ModelError(f"{file}: became shorter while it was read; download it again")
        return torch.frombuffer(mapped, dtype=dtype, count=num, offset=start)

    def release(self, file: Path, start: int, num_bytes: int) -> None:
        """Let go of pages that lie within a range; whoever reads them again gets them from the system's cache."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped(file).madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Let go of all files; a view keeps its own."""
        with self._lock:
            self._maps.clear()

    def _mapped(self, file: Path) -> mmap.mmap:
        with self._lock:
            if file not in self._maps:
                try:
                    with file.open("rb") as opened:
                        # A private copy: torch takes buffers that could be written, and nobody does.
                        self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
                except (OSError, ValueError) as error:  # ValueError: it is empty
                    raise ModelError(f"{file}: cannot be read: {error}") from None
            return self._maps[file]
