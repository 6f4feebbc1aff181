"""The paged KV cache in device memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.contracts.cache import CacheGroup

NULL_PAGE = 0
"""Nobody's page: it pads page tables, and is zero whenever a step begins."""


class PagedKVPool:
    """Keys and values of a group's layers: `[L, num_pages, 2, P, Hk, D]`, keys at index 0 of the third axis.

    Zero at the start: attention multiplies masked positions by zero, so what it reads there must be finite.
    """

    def __init__(
        self, group: CacheGroup, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate `num_pages` pages, the null page included, of a group that holds keys and values of equal width."""
        self.num_pages = num_pages
        self.page_size = page_size
        heads, dim = group.tensors[0].shape
        shape = (len(group.layers), num_pages, 2, page_size, heads, dim)
        self._kv = (
            _zeros_on_host(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        self._layers = dict(zip(group.layers, self._kv.unbind(0), strict=True))

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self._kv.numel() * self._kv.element_size()

    def layer(self, index: int) -> Tensor:
        """Return layer `index`: `[num_pages, 2, P, Hk, D]`."""
        return self._layers[index]

    def scrub(self, pages: list[int]) -> None:
        """Zero pages whose contents may not be finite, before anyone else reads them."""
        self._kv[:, pages] = 0


class KVCache:
    """The pools of all groups of a model.

    Attributes:
        reaches: How far the layers of each group see.
        sizes: Pages of each group, its null page included.
        num_pages: Those of the first.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        sizes: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate."""
        self.page_size = page_size
        self.sizes = tuple(sizes)
        self.num_pages = self.sizes[0]
        self.reaches = tuple(group.reach for group in groups)
        self.pools = [
            PagedKVPool(group, num, page_size, dtype, device) for group, num in zip(groups, sizes, strict=True)
        ]
        self._of_layer = {index: pool for group, pool in zip(groups, self.pools, strict=True) for index in group.layers}

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return sum(pool.num_bytes for pool in self.pools)

    def layer(self, index: int) -> Tensor:
        """Return layer `index`: `[num_pages, 2, P, Hk, D]`."""
        return self._of_layer[index].layer(index)

    def scrub(self, group: int, pages: list[int]) -> None:
        """Zero pages whose contents may not be finite, before anyone else reads them."""
        self.pools[group].scrub(pages)

    def scrub_null(self) -> None:
        """Zero the null page of each group."""
        for pool in self.pools:
            pool.scrub([NULL_PAGE])


def _zeros_on_host(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in a mapping of their own, whose pages take memory when they are first written.

    `torch.zeros` writes all of it: 2 GiB take over a second of every start, most of them for pages never used.

    Raises:
        OSError: The system refuses so large a mapping.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # lives as long as the tensor
    return torch.frombuffer(memory, dtype=dtype).view(shape)
