"""The smallest engine: runs a model plugin step by step on the CPU, over an attention backend that only computes.

T tokens in the batch, V vocabulary, P page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.cache.pool import KVCache, StateCache
from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, KVPool, Phase, StateSave
from dovetail.contracts.cache import Chunk, Recurrent, Window
from dovetail.contracts.config import ModelConfig, Pool
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import Classifier, ModelPlugin
from dovetail.contracts.needs import AttentionCaps, unserved
from dovetail.runtime.attention.grouped import attended_groups
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.weights import load_checkpoint
from dovetail.sdk.layers.plain import PLAIN
from dovetail_testing.checks import check
from dovetail_testing.conformance.attention_reference import attend
from dovetail_testing.conformance.host_sync import HostSyncs

CPU = torch.device("cpu")
PAGE_SIZE = 4
FOREIGN = 30.0
"""What stands in the cache where somebody else writes."""


class ReferenceAttention(AttentionBackend):
    """Attention in float64, one request at a time: slow, and right by definition."""

    caps = AttentionCaps(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "bfloat16"}),
        sliding_window=True,
        chunked=True,
        sinks=True,
        soft_cap=True,
        bidirectional=True,
        mixers=frozenset({"kv", "latent"}),
        unequal_dims=True,
    )

    def __init__(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> None:
        self.kv_pool = kv_pool
        self._sources = {spec.index: spec.cache_layer for spec in config.layers if spec.cache_layer is not None}

    def write_kv(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """As the default, for layers that have a cache."""
        source = self._sources.get(layer.index)
        check(
            source is None,
            f"layer {layer.index} writes keys and values, and its LayerSpec says that it reads those of layer {source}",
        )
        super().write_kv(layer, k, v, batch)

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        if layer.causal or k is None or v is None:
            self._attend(q, k, layer, batch, out, range(batch.num_decode, batch.num_requests))
        else:
            queries, keys, values = (torch.split(x, batch.q_lens_cpu) for x in (q, k, v))
            whole = zip(queries, keys, values, strict=True)
            out.copy_(torch.cat([attend(own, key, value, layer) for own, key, value in whole]))

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        self._attend(q, k, layer, batch, out, range(batch.num_decode))

    def _attend(
        self,
        q: Tensor,
        new: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: Tensor,
        requests: range,
    ) -> None:
        check(
            new is not None or layer.index in self._sources,
            f"layer {layer.index} attends without keys, and its LayerSpec names no layer whose cache it reads",
        )
        size, start = self.kv_pool.page_size, 0
        k, v = (self.kv_pool.tensor(layer.index, name) for name in "kv")
        for number in requests:
            end = start + batch.q_lens_cpu[number]
            places = torch.arange(batch.seq_lens_cpu[number])
            pages = batch.page_table[batch.rows[number], places // size].long()
            at = pages, places % size
            out[start:end] = attend(q[start:end], k[at], v[at], layer).to(out.dtype)
            start = end


class NoAttention(ReferenceAttention):
    """Answers with the queries and keeps nothing: whatever is read on the host is the model's doing."""

    def write_kv(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """Keep nothing."""

    def _attend(
        self,
        q: Tensor,
        new: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: Tensor,
        requests: range,
    ) -> None:
        num = min(q.shape[-1], out.shape[-1])
        out.zero_()[..., :num] = q[..., :num]


def decode_syncs(plugin: type[ModelPlugin], folder: Path) -> list[str]:
    """Return what a decode step of the model reads on the host."""
    engine = TinyEngine(plugin, folder)
    engine.attention = NoAttention(engine.config, engine.pool, CPU)
    requests = [Running([5, 7, 11], 0), Running([3], 1)]
    engine.step((), [(request, len(request.ids)) for request in requests])
    for request in requests:
        request.ids.append(9)
    with HostSyncs() as syncs:
        engine.step(requests)
    return syncs.found


@dataclass(slots=True)
class Running:
    """A request: its ids so far, how many of them are in the cache, and its device row."""

    ids: list[int]
    row: int
    computed: int = 0
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.ids)


class TinyEngine:
    """A loaded model with room for a few requests."""

    def __init__(
        self,
        plugin: type[ModelPlugin],
        folder: Path,
        num_rows: int = 8,
        max_len: int = 128,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.config, self.model = load_model(plugin, folder, batch_invariant=batch_invariant)
        pages_each = -(-max_len // PAGE_SIZE)
        dtype = getattr(torch, self.config.dtype)
        reason = unserved(self.config)
        check(reason is None, f"its layers cannot be served: {reason}")
        groups = self.config.cache_groups
        self.pool = KVCache(groups, [num_rows * pages_each + 1] * len(groups), PAGE_SIZE, dtype, CPU, num_rows)
        self.states = StateCache(self.pool) if self.pool.states else None
        recurrent = [group for group in groups if isinstance(group.reach, Recurrent)]
        self.grid = lcm(*(group.reach.grid(PAGE_SIZE) for group in recurrent if isinstance(group.reach, Recurrent)))
        for index in (index for group in recurrent for index in group.layers):
            for tensor in self.pool.states[self.pool.groups_of_layers[index]].rows(index).values():
                tensor.fill_(FOREIGN)
        self.attention = ReferenceAttention(self.config, self.pool, CPU)
        pages = torch.arange(1, num_rows * pages_each + 1, dtype=torch.int32)
        order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(0))
        self.page_table = pages[order].view(num_rows, pages_each)

    @torch.inference_mode()
    def step(
        self,
        decode: Sequence[Running],
        chunks: Sequence[tuple[Running, int]] = (),
        saves: tuple[StateSave, ...] = (),
    ) -> Tensor:
        """Run one step and return the logits of every token of the batch, `[T, V]`.

        Of a model without an output head, the hidden states `[T, H]`; of a classifier, each request's scores `[B, N]`.
        """
        work = [(request, 1) for request in decode] + list(chunks)
        for request in (request for request, _ in work if request.computed == 0):
            self._load(request, 0)
        starts = torch.tensor([0, *(new for _, new in work)]).cumsum(0)
        positions = torch.cat([torch.arange(r.computed, r.computed + new) for r, new in work])
        slots = torch.cat([self._slots(r, new) for r, new in work])
        batch = ForwardBatch(
            num_decode=len(decode),
            positions=positions,
            kv_slots=slots,
            rows=torch.tensor([r.row for r, _ in work]),
            page_table=self.page_table,
            seq_lens=torch.tensor([r.computed + new for r, new in work], dtype=torch.int32),
            q_starts=starts.int(),
            seq_lens_cpu=[r.computed + new for r, new in work],
            q_lens_cpu=[new for _, new in work],
            attention=self.attention,
            last_tokens=starts[1:] - 1,
            states=self.states,
            saves=saves,
        )
        ids = torch.tensor([token for r, new in work for token in r.ids[r.computed : r.computed + new]])
        self.attention.plan(batch, Phase.EAGER)
        hidden = self.model.forward(ids, batch)
        right = tuple(hidden.shape) == (len(ids), self.config.hidden_size)
        check(
            right,
            f"forward returns {list(hidden.shape)} for {len(ids)} tokens; expected [T, {self.config.hidden_size}]",
        )
        logits = self._outputs(hidden, [new for _, new in work])
        for request, new in work:
            request.computed += new
            self._give_back(request)
        return logits

    def _outputs(self, hidden: Tensor, lens: list[int]) -> Tensor:
        """What the model makes of final hidden states `[T, H]`."""
        if not self.config.generates and not self.config.num_labels:
            return hidden
        name, num, size = "lm_head", len(hidden), self.config.vocab_size
        if self.config.num_labels:
            check(isinstance(self.model, Classifier), "num_labels is not 0, and the model has no classify")
            name, num, size = "classify", len(lens), self.config.num_labels
            hidden = torch.stack([_pooled(one, self.config.pool) for one in torch.split(hidden, lens)])
        found: Tensor = getattr(self.model, name)(hidden)
        check(tuple(found.shape) == (num, size), f"{name} returns {list(found.shape)}; expected [{num}, {size}]")
        return found

    def _load(self, request: Running, copy: int) -> None:
        """Put a copy of the states into a request's row."""
        for states in self.pool.states.values():
            states.load([copy], [request.row])

    def resumed_logits(self, ids: Sequence[int]) -> dict[int, Tensor]:
        """Return the logits behind each place where states are copied, of requests that begin with the copy."""
        first = Running(list(ids), 0)
        places = range(self.grid, len(ids), self.grid)
        copies = [(group, length, copy) for copy, length in enumerate(places, 1) for group in self.pool.states]
        self.step((), [(first, len(ids))], tuple(StateSave(group, 0, *rest) for group, *rest in copies))
        found = {}
        for copy, length in enumerate(places, 1):
            other = Running(list(ids), 1, length)
            self.page_table[1, : length // PAGE_SIZE] = self.page_table[0, : length // PAGE_SIZE]
            self._load(other, copy)
            found[length] = self.step((), [(other, len(ids) - length)])
        return found

    def _give_back(self, request: Running) -> None:
        """Overwrite what no layer sees any more that is as its spec says: an engine gives it to others."""
        pools = self.pool.pools
        for group, pool in zip(attended_groups(self.config), pools, strict=True) if pools else ():
            if isinstance(group.reach, Chunk | Window):
                places = torch.arange(group.reach.start(request.computed))
                pages = self.page_table[request.row, places // PAGE_SIZE].long()
                for index in group.writers:
                    for name in (tensor.name for tensor in group.tensors):
                        pool.tensor(index, name)[pages, places % PAGE_SIZE] = FOREIGN

    def _slots(self, request: Running, new: int) -> Tensor:
        places = torch.arange(request.computed, request.computed + new)
        return self.page_table[request.row, places // PAGE_SIZE].long() * PAGE_SIZE + places % PAGE_SIZE

    def prefill_logits(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the logits of every token of each prompt, all prefilled in one batch."""
        requests = [Running(list(prompt), row) for row, prompt in enumerate(prompts)]
        logits = self.step((), [(request, len(request.ids)) for request in requests])
        return list(torch.split(logits, [1 if self.config.num_labels else len(prompt) for prompt in prompts]))

    def greedy(self, prompts: Sequence[Sequence[int]], num_new: int, chunk: int) -> list[list[int]]:
        """Generate greedily, prompts in chunks beside others' decode steps; returns the new tokens."""
        requests = [Running(list(prompt), row) for row, prompt in enumerate(prompts)]
        while any(len(r.ids) < r.num_prompt + num_new for r in requests):
            decode = [r for r in requests if r.computed >= r.num_prompt and len(r.ids) < r.num_prompt + num_new]
            waiting = [r for r in requests if r.computed < r.num_prompt][:2]
            chunks = [(r, min(chunk, r.num_prompt - r.computed)) for r in waiting]
            logits = self.step(decode, chunks)
            last = -1
            for request, new in [*((r, 1) for r in decode), *chunks]:
                last += new
                if request.computed == len(request.ids):
                    request.ids.append(int(logits[last].argmax()))
        return [r.ids[r.num_prompt :] for r in requests]


def _pooled(hidden: Tensor, pool: Pool) -> Tensor:
    """What stands for a request of hidden states `[n, H]`."""
    return hidden.mean(0) if pool == "mean" else hidden[0 if pool == "first" else -1]


def load_model(plugin: type[ModelPlugin], folder: Path, *, batch_invariant: bool = False) -> tuple[ModelConfig, Any]:
    """Build a model in its checkpoint's dtype, its parameters full of NaN, and load the checkpoint into it."""
    config = ModelFolder(folder, weights=False).model_config(plugin.config_from_hf)
    with torch.inference_mode():
        dtype = getattr(torch, config.dtype)
        ctx = BuildContext(device=CPU, dtype=dtype, factory=PLAIN, batch_invariant=batch_invariant)
        model = plugin.build(config, ctx)
        check(isinstance(model, nn.Module), f"build returns {type(model).__name__}, not a torch.nn.Module")
        module: Any = model
        module.eval()
        for param in module.parameters():
            if param.is_floating_point():
                param.fill_(float("nan"))
        load_checkpoint(module, plugin.weight_map(config), folder)
    return config, module
