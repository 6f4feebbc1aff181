"""The paged KV cache in device memory.

L layers, N pages, P page size.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dovetail.contracts.attention import StateSave
from dovetail.contracts.cache import CacheGroup, CacheTensor, Recurrent
from dovetail.contracts.device import is_on_host

# Memory for the cache: its dtypes, and zeros that take none before they are written.


def dtype_of(tensor: CacheTensor, served: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor of a model that is served in `served`."""
    found: torch.dtype = served if tensor.dtype is None else getattr(torch, tensor.dtype)
    return found


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on the host in a mapping of their own, whose pages take memory when they are first written.

    `torch.zeros` writes all of it: 2 GiB take over a second of every start, most of them for pages never used.

    Raises:
        OSError: The system refuses so large a mapping.
    """
    if not is_on_host(device):
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # lives as long as the tensor
    return torch.frombuffer(memory, dtype=dtype).view(shape)


# Recurrent state in device memory: a place for each device row, and copies of it for the prefix cache.
#
# L layers, S device rows, N copies.

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
            kv = self._memory["kv"] = zeros(shape, dtype_of(key, dtype), device)
            self._named |= {"k": kv[:, :, 0], "v": kv[:, :, 1]}
        for name, tensor in tensors.items():
            shape = (num, num_pages, page_size, *tensor.shape)
            made = self._memory[name] = self._named[name] = zeros(shape, dtype_of(tensor, dtype), device)
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

    def zero_pages(self, pages: list[int]) -> None:
        """Zero pages whose contents may not be finite, before anyone else reads them."""
        for memory in self._memory.values():
            memory[:, pages] = 0


class KVCache:
    """What all groups of a model keep: pages of those that look back, and states of recurrent ones behind them.

    Attributes:
        reaches: How far the layers of each group see.
        sizes: Pages of each group, its null page included; of a recurrent one the copies of states, that of zeros
            included.
        num_pages: Those of the first; 0 where nothing is cached.
        pools: Of the groups that have pages.
        states: Of the others, by group.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        sizes: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_rows: int = 0,
    ) -> None:
        """Allocate. There are `num_rows` device rows, each with a state of every recurrent layer."""
        self.page_size = page_size
        self.sizes = tuple(sizes)
        self.num_pages = self.sizes[0] if self.sizes else 0
        self.reaches = tuple(group.reach for group in groups)
        self.pools: list[PagedKVPool] = []
        self.states: dict[int, StatePool] = {}
        self._of_layer: dict[int, PagedKVPool] = {}
        self.groups_of_layers = {index: g for g, group in enumerate(groups) for index in group.layers}
        for g, (group, num) in enumerate(zip(groups, sizes, strict=True)):
            if isinstance(group.reach, Recurrent):
                self.states[g] = StatePool(group, num, num_rows, dtype, device)
            else:
                self.pools.append(PagedKVPool(group, num, page_size, dtype, device))
                self._of_layer |= dict.fromkeys(group.layers, self.pools[-1])

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        paged = sum(pool.num_bytes for pool in self.pools)
        return paged + sum(states.num_bytes for states in self.states.values())

    def layer(self, index: int) -> Tensor:
        """Return layer `index`: `[N, 2, P, Hk, D]`."""
        return self._of_layer[index].layer(index)

    def tensor(self, index: int, name: str) -> Tensor:
        """See `KVPool`."""
        return self._of_layer[index].tensor(index, name)

    def zero_pages(self, group: int, pages: list[int]) -> None:
        """Zero pages, or copies of states, whose contents may not be finite, before anyone else reads them."""
        (self.states.get(group) or self.pools[group]).zero_pages(pages)

    def zero_null_page(self) -> None:
        """Zero the null page of each group."""
        for pool in self.pools:
            pool.zero_pages([NULL_PAGE])


class StateCache:
    """The states of all recurrent groups: what models see of them, see `StateStore`."""

    def __init__(self, cache: KVCache) -> None:
        self._pools = cache.states
        self._group_of = {index: g for index, g in cache.groups_of_layers.items() if g in self._pools}

    @property
    def num_groups(self) -> int:
        """Recurrent groups."""
        return len(self._pools)

    def rows(self, index: int) -> Mapping[str, Tensor]:
        """See `StateStore`."""
        return self._pools[self._group_of[index]].rows(index)

    def wants(self, index: int, save: StateSave) -> bool:
        """See `StateStore`."""
        return save.group == self._group_of[index]

    def save(self, index: int, copy: int, state: Mapping[str, Tensor]) -> None:
        """See `StateStore`."""
        self._pools[self._group_of[index]].save(index, copy, state)

    def copies(self, index: int) -> Mapping[str, Tensor]:
        """See `StateStore`."""
        return self._pools[self._group_of[index]].copies(index)

    def group(self, index: int) -> int:
        """See `StateStore`."""
        return self._group_of[index]

    def load(self, group: int, copies: Sequence[int], rows: Sequence[int]) -> None:
        """Put copies of a group's states into device rows, for the requests that take them."""
        self._pools[group].load(copies, rows)


def is_pair(key: CacheTensor | None, value: CacheTensor | None) -> bool:
    """Whether keys and values stand side by side in one tensor: where they are alike."""
    return key is not None and value is not None and (key.shape, key.dtype) == (value.shape, value.dtype)
