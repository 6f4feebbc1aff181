"""Attention over a cache of several groups: one backend for each, and each sees the step as if its group were all.

B requests, T tokens, S device rows, P page size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from dovetail.cache.pool import KVCache
from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, KVPool, Phase
from dovetail.contracts.cache import FULL, CacheGroup, Recurrent
from dovetail.contracts.config import ModelConfig
from dovetail.runtime.attention.hybrid import Backend, Part, PartedBackend, common_caps


def of_group(config: ModelConfig, group: CacheGroup) -> ModelConfig:
    """Return a model's facts as the backend of a group is told them: with the layers of that group."""
    return dataclasses.replace(config, layers=tuple(spec for spec in config.layers if spec.index in group.layers))


def attended_groups(config: ModelConfig) -> list[CacheGroup]:
    """Return the groups that a backend serves; recurrent ones stand behind them, and their layers serve themselves.

    Where nothing is cached, all layers are one group, of no tensors.
    """
    if not config.cache_groups:
        return [CacheGroup("uncached", FULL, {spec.index: () for spec in config.layers})]
    return [group for group in config.cache_groups if not isinstance(group.reach, Recurrent)]


def make_attention(
    backends: Sequence[Backend],
    config: ModelConfig,
    cache: KVCache,
    tables: Sequence[Tensor],
    device: torch.device,
    *,
    batch_invariant: bool = False,
) -> AttentionBackend:
    """Make the backend of each group over its pool; several are one to whoever computes steps.

    Args:
        backends: A class for each group that has pages.
        config: The model's facts.
        cache: Its pools.
        tables: The page table `[S, max_pages]` of each group.
        device: Where to compute.
        batch_invariant: See `AttentionBackend`.
    """
    groups = attended_groups(config)
    pools: Sequence[KVPool] = cache.pools or [cache]
    made = [
        backend(of_group(config, group), pool, device)
        for backend, group, pool in zip(backends, groups, pools, strict=True)
    ]
    for backend in made if batch_invariant else ():
        backend.batch_invariant = True
        backend.prefix_group = 0  # what several rows share is summed apart from the rest
    return made[0] if len(made) == 1 else GroupedBackend(made, groups, cache, tables)


class GroupedBackend(PartedBackend):
    """The backends of all groups as one: a layer is served by that of its group.

    The batch that comes in has the page table and the slots of the first group. Those of the others follow from them on
    the device, in `plan`, so where a step is recorded they are part of the graph.
    """

    def __init__(
        self,
        backends: Sequence[AttentionBackend],
        groups: Sequence[CacheGroup],
        cache: KVCache,
        tables: Sequence[Tensor],
    ) -> None:
        self.kv_pool: KVPool = cache
        self.backends = list(backends)
        self.caps = reduce(common_caps, [backend.caps for backend in backends])
        self.prefix_group = self.backends[0].prefix_group
        self.batch_invariant = self.backends[0].batch_invariant
        self._tables = list(tables)
        self._group_of = {index: g for g, group in enumerate(groups) for index in group.layers}
        self._parts: list[Part] = []

    def init_graph_state(self, max_batch: int, max_tokens: int) -> None:
        for backend in self.backends:
            backend.init_graph_state(max_batch, max_tokens)

    def plan(self, batch: ForwardBatch, phase: Phase) -> None:
        """Make each group's batch, and let its backend plan it."""
        rows = rows_of_tokens(batch)
        self._parts = [(self.backends[0], dataclasses.replace(batch, attention=self.backends[0]))]
        for backend, table in zip(self.backends[1:], self._tables[1:], strict=True):
            slots = slots_of(batch, rows, table, self.kv_pool.page_size)
            own = dataclasses.replace(batch, page_table=table, kv_slots=slots, attention=backend, shares_prefixes=False)
            self._parts.append((backend, own))
        for backend, own in self._parts:
            backend.plan(own, phase)

    def plan_in_graph(self, batch: ForwardBatch) -> None:
        for backend, own in self._parts:
            backend.plan_in_graph(own)

    def batch_of(self, index: int, batch: ForwardBatch) -> ForwardBatch:
        return self._parts[self._group_of[index]][1]

    def write_kv(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        backend, own = self._parts[self._group_of[layer.index]]
        backend.write_kv(layer, k, v, own)

    def part(self, layer: AttentionLayer, batch: ForwardBatch, *, decodes: bool) -> Part:
        return self._parts[self._group_of[layer.index]]

    def forward_mixed(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        backend, own = self.part(layer, batch, decodes=False)
        backend.forward_mixed(q, k, v, layer, own, out)


def rows_of_tokens(batch: ForwardBatch) -> Tensor:
    """Return the device row of each token, `[T]` int64; of tokens that pad a graph any row. Nothing is read back."""
    if batch.num_tokens == batch.num_requests == batch.num_decode:
        return batch.rows
    places = torch.arange(batch.num_tokens, device=batch.rows.device, dtype=batch.q_starts.dtype)
    requests = torch.searchsorted(batch.q_starts[1:].contiguous(), places, right=True)
    return batch.rows[requests.clamp(max=batch.num_requests - 1)]


def slots_of(batch: ForwardBatch, rows: Tensor, table: Tensor, page_size: int) -> Tensor:
    """Return where each token's keys and values go in another group, `[T]` int64; negative where nothing is written.

    Args:
        batch: The step, with the slots of the first group.
        rows: `[T]` int64, as `rows_of_tokens` gives them.
        table: `[S, max_pages]`, the group's page table.
        page_size: P.
    """
    columns = (batch.positions // page_size).clamp(max=table.shape[1] - 1)
    slots = table[rows, columns].long() * page_size + batch.positions % page_size
    return torch.where(batch.kv_slots < 0, -1, slots)
