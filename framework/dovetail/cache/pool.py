"""The paged KV cache in device memory.

L layers, N pages, P page size.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.contracts.cache import CacheGroup, CacheTensor

NULL_PAGE = 0
"""Nobody's page: it pads page tables, and is zero whenever a step begins."""


class PagedKVPool:
    """What a group's layers keep of each token. Zero at the start: attention multiplies masked positions by zero.

    Keys and values of one width and dtype stand together, `[L, N, 2, P, Hk, D]`, keys at index 0 of the third axis; any
    other tensor by itself, `[L, N, P, …]`.
    """

    def __init__(
        self, group: CacheGroup, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate `num_pages` pages, the null page included."""
        self.num_pages = num_pages
        self.page_size = page_size
        self._slot = {index: i for i, index in enumerate(group.writers)}
        self._slot |= {index: self._slot[source] for index, source in group.sources.items()}
        self._memory: dict[str, Tensor] = {}
        self._named: dict[str, Tensor] = {}
        num = len(group.writers)
        tensors = {tensor.name: tensor for tensor in group.tensors}
        if is_pair(tensors.get("k"), tensors.get("v")):
            key, _ = tensors.pop("k"), tensors.pop("v")
            shape = (num, num_pages, 2, page_size, *key.shape)
            kv = self._memory["kv"] = _zeros(shape, dtype_of(key, dtype), device)
            self._named |= {"k": kv[:, :, 0], "v": kv[:, :, 1]}
        for name, tensor in tensors.items():
            shape = (num, num_pages, page_size, *tensor.shape)
            made = self._memory[name] = self._named[name] = _zeros(shape, dtype_of(tensor, dtype), device)
            if tensor.values:
                self._named |= {"k": made[..., None, :], "v": made[..., None, : tensor.values]}
        self._layers = {index: self._memory["kv"][slot] for index, slot in self._slot.items() if "kv" in self._memory}
        self._views = {
            (index, name): tensor[slot] for index, slot in self._slot.items() for name, tensor in self._named.items()
        }

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return sum(memory.numel() * memory.element_size() for memory in self._memory.values())

    def layer(self, index: int) -> Tensor:
        """Return layer `index`: `[N, 2, P, Hk, D]`; only of a group whose keys and values stand together."""
        return self._layers[index]

    def tensor(self, index: int, name: str) -> Tensor:
        """See `KVPool`."""
        return self._views[index, name]

    def scrub(self, pages: list[int]) -> None:
        """Zero pages whose contents may not be finite, before anyone else reads them."""
        for memory in self._memory.values():
            memory[:, pages] = 0


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
        """Return layer `index`: `[N, 2, P, Hk, D]`."""
        return self._of_layer[index].layer(index)

    def tensor(self, index: int, name: str) -> Tensor:
        """See `KVPool`."""
        return self._of_layer[index].tensor(index, name)

    def scrub(self, group: int, pages: list[int]) -> None:
        """Zero pages whose contents may not be finite, before anyone else reads them."""
        self.pools[group].scrub(pages)

    def scrub_null(self) -> None:
        """Zero the null page of each group."""
        for pool in self.pools:
            pool.scrub([NULL_PAGE])


def is_pair(key: CacheTensor | None, value: CacheTensor | None) -> bool:
    """Whether keys and values stand side by side in one tensor: where they are alike."""
    return key is not None and value is not None and (key.shape, key.dtype) == (value.shape, value.dtype)


def dtype_of(tensor: CacheTensor, served: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor of a model that is served in `served`."""
    found: torch.dtype = served if tensor.dtype is None else getattr(torch, tensor.dtype)
    return found


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on the host in a mapping of their own, whose pages take memory when they are first written.

    `torch.zeros` writes all of it: 2 GiB take over a second of every start, most of them for pages never used.

    Raises:
        OSError: The system refuses so large a mapping.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # lives as long as the tensor
    return torch.frombuffer(memory, dtype=dtype).view(shape)
