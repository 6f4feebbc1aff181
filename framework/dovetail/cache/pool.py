"""The paged KV cache in device memory."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from dovetail.contracts.model import ModelConfig

NULL_PAGE = 0
"""Nobody's page: it pads page tables, and is zero whenever a step begins."""


class PagedKVPool:
    """Keys and values of all layers: `[L, num_pages, 2, P, Hk, D]`, keys at index 0 of the third axis.

    Zero at the start: attention multiplies masked positions by zero, so what it reads there must be finite.
    """

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate `num_pages` pages, the null page included."""
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (config.num_layers, num_pages, 2, page_size, config.num_kv_heads, config.head_dim)
        self._kv = (
            _zeros_on_host(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        self._layers = list(self._kv.unbind(0))

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


def _zeros_on_host(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in a mapping of their own, whose pages take memory when they are first written.

    `torch.zeros` writes all of it: 2 GiB take over a second of every start, most of them for pages never used.

    Raises:
        OSError: The system refuses so large a mapping.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # lives as long as the tensor
    return torch.frombuffer(memory, dtype=dtype).view(shape)
