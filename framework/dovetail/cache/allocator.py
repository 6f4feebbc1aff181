"""Hands out page ids of the KV pool. Host side only; a page has exactly one owner: free list, radix tree or request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PageAllocator:
    """A free list of page ids. Page 0 is the null page: never handed out, always zero, padding in page tables."""

    def __init__(self, num_pages: int) -> None:
        """Own pages `1 … num_pages-1`."""
        self.num_pages = num_pages - 1
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def free_pages(self) -> Sequence[int]:
        """Pages that nobody owns, in the order in which they would be given back."""
        return self._free

    def reset(self, free: Iterable[int]) -> None:
        """Replace the free list: for repairs."""
        self._free = sorted(free, reverse=True)

    def allocate(self, n: int) -> list[int]:
        """Take `n` pages; the caller has made sure that there are enough.

        Raises:
            IndexError: Fewer than `n` pages are free. Nothing is taken.
        """
        if n > len(self._free):
            raise IndexError(f"{n} pages asked for, {len(self._free)} are free")
        if n == 0:
            return []
        taken = self._free[-n:]
        del self._free[-n:]
        taken.reverse()
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back; each must have been allocated and not yet freed."""
        self._free.extend(reversed(pages))
