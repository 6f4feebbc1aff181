"""How `torch_native` reads and writes the cache: dense blocks of keys and values out of pages, by layout.

A block has keys and values of one width, for torch's attention on CPU has one for both: the narrower are padded with
zeros, which changes no score, and of a latent row the whole stands for the value as well. What is too much of the
result is cut off.

T tokens, n requests, N pages of each, L keys, Hk KV heads, D and Dv widths of a key and a value, P page size.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.contracts.attention import AttentionLayer, KVPool
from dovetail.contracts.cache import ScaledDtype
from dovetail.contracts.config import LayerSpec
from dovetail.sdk.cache import DTYPES, read_scaled, rounded, write_scaled


class CacheLayout(Protocol):
    """Reads and writes one group's cache."""

    def plan(self, slots: Tensor) -> None:
        """Find where the step's tokens `[T]` go."""

    def wanted(self, pages: Tensor) -> Tensor:
        """Return what `gather` collects for pages `[n, N]`."""
        ...

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor) -> None:
        """Write the step's keys `[T, Hk, D]` and values `[T, Hk, Dv]`."""

    def gather(self, layer: AttentionLayer, wanted: Tensor, num: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """Collect the pages of `num` requests: keys and values `[n, Hk, L, max(D, Dv)]`."""
        ...

    def fresh(self, layer: AttentionLayer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of one width of tokens that are not read from pages."""
        ...


class Pairs:
    """Keys and values of one width, a half-page each: `[N, 2, P, Hk, D]`."""

    def __init__(self, pool: KVPool, index: int, device: torch.device) -> None:
        self._pool = pool
        self._key_rows = self._value_rows = torch.empty(0)
        self._gathered = torch.empty(0, 0, dtype=pool.layer(index).dtype, device=device)

    def plan(self, slots: Tensor) -> None:
        # A page is two half-pages of P rows each: keys, then values.
        self._key_rows = slots + slots // self._pool.page_size * self._pool.page_size
        self._value_rows = self._key_rows + self._pool.page_size

    def wanted(self, pages: Tensor) -> Tensor:
        """Rows of the half-pages: keys of every page, then values; `[2 n N]`."""
        keys = pages.reshape(-1) * 2
        return torch.cat((keys, keys + 1))

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor) -> None:
        rows = self._pool.layer(layer.index).view(-1, layer.num_kv_heads, layer.qk_dim)
        rows.index_copy_(0, self._key_rows, k)
        rows.index_copy_(0, self._value_rows, v)

    def gather(self, layer: AttentionLayer, wanted: Tensor, num: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """Whole half-pages are selected as rows: `index_select` copies them as blocks.

        Advanced indexing would go element by element, on CPU about ten times slower. They go to a buffer that all
        layers share: fresh megabytes for every layer would be paid in page faults.
        """
        kv = self._pool.layer(layer.index)
        halves = kv.view(2 * kv.shape[0], -1)
        count = wanted.shape[0]
        if self._gathered.shape[0] < count or self._gathered.shape[1] != halves.shape[1]:
            self._gathered = halves.new_empty(count + count // 2, halves.shape[1])
        found = torch.index_select(halves, 0, wanted, out=self._gathered[:count])
        keys, values = found.view(2, num, -1, kv.shape[3], kv.shape[4]).transpose(2, 3).unbind(0)
        return keys[:, :, :num_keys], values[:, :, :num_keys]

    def fresh(self, layer: AttentionLayer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v


class TensorRows:
    """Latent rows, or keys and values of different widths: each tensor by itself, `[N, P, …]`."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._slots = torch.empty(0)

    def plan(self, slots: Tensor) -> None:
        self._slots = slots

    def wanted(self, pages: Tensor) -> Tensor:
        """The pages: `[n N]`."""
        return pages.reshape(-1)

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor) -> None:
        self._pool.tensor(layer.index, "k").flatten(0, 1).index_copy_(0, self._slots, k)
        if not layer.latent:
            self._pool.tensor(layer.index, "v").flatten(0, 1).index_copy_(0, self._slots, v)

    def gather(self, layer: AttentionLayer, wanted: Tensor, num: int, num_keys: int) -> tuple[Tensor, Tensor]:
        keys = self._collect(layer, "k", wanted, num, num_keys)
        return self.fresh(layer, keys, keys if layer.latent else self._collect(layer, "v", wanted, num, num_keys))

    def _collect(self, layer: AttentionLayer, name: str, wanted: Tensor, num: int, num_keys: int) -> Tensor:
        pages = self._pool.tensor(layer.index, name)
        found = torch.index_select(pages.flatten(1), 0, wanted).view(num, -1, *pages.shape[2:])
        return found.transpose(1, 2)[:, :, :num_keys]

    def fresh(self, layer: AttentionLayer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer.latent:
            return k, k
        width = max(layer.qk_dim, layer.v_dim)
        return widened(k, width), widened(v, width)


class ScaledRows:
    """Keys and values, or latent rows, in 8 bits with scales: `dovetail.sdk.cache`.

    Gathered they are float32. What is not read from pages is rounded all the same, so that a token gets the same result
    whether its prompt is computed whole, in chunks, or again after a retraction.
    """

    def __init__(self, pool: KVPool, dtype: ScaledDtype) -> None:
        self._pool, self._dtype = pool, DTYPES[dtype]
        self._slots = torch.empty(0)

    def plan(self, slots: Tensor) -> None:
        self._slots = slots

    def wanted(self, pages: Tensor) -> Tensor:
        """The pages: `[n N]`."""
        return pages.reshape(-1)

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor) -> None:
        if layer.latent:
            write_scaled(self._pool, layer.index, "latent", self._slots, k[:, 0])
            return
        write_scaled(self._pool, layer.index, "k", self._slots, k)
        write_scaled(self._pool, layer.index, "v", self._slots, v)

    def gather(self, layer: AttentionLayer, wanted: Tensor, num: int, num_keys: int) -> tuple[Tensor, Tensor]:
        if layer.latent:
            rows = read_scaled(self._pool, layer.index, "latent", wanted)
            keys = rows.view(num, 1, -1, rows.shape[-1])[:, :, :num_keys]
            return keys, keys
        width = max(layer.qk_dim, layer.v_dim)
        keys, values = (self._collect(layer, name, wanted, num, num_keys, width) for name in ("k", "v"))
        return keys, values

    def _collect(self, layer: AttentionLayer, name: str, wanted: Tensor, num: int, num_keys: int, width: int) -> Tensor:
        found = read_scaled(self._pool, layer.index, name, wanted)
        return widened(found.view(num, -1, *found.shape[2:]).transpose(1, 2)[:, :, :num_keys], width)

    def fresh(self, layer: AttentionLayer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k = rounded(k, self._dtype)
        if layer.latent:
            return k, k
        width = max(layer.qk_dim, layer.v_dim)
        return widened(k, width), widened(rounded(v, self._dtype), width)


class NoPages:
    """Of layers that keep nothing: only what is fresh is attended."""

    def plan(self, slots: Tensor) -> None:
        pass

    def wanted(self, pages: Tensor) -> Tensor:
        return pages

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor) -> None:
        raise KeyError(f"layer {layer.index} has no cache to write to")

    def gather(self, layer: AttentionLayer, wanted: Tensor, num: int, num_keys: int) -> tuple[Tensor, Tensor]:
        raise KeyError(f"layer {layer.index} has no cache to read from")

    def fresh(self, layer: AttentionLayer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        width = max(layer.qk_dim, layer.v_dim)
        return widened(k, width), widened(v, width)


def make_layout(spec: LayerSpec, pool: KVPool, device: torch.device) -> CacheLayout:
    """Return the layout of the layers that are like `spec`."""
    if spec.cache_dtype is not None:
        return ScaledRows(pool, spec.cache_dtype)
    if spec.mixer == "kv" and spec.qk_dim == spec.v_dim:
        return Pairs(pool, spec.index, device)
    return TensorRows(pool)


def widened(x: Tensor, width: int) -> Tensor:
    """Pad the last axis with zeros."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
