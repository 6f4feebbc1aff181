"""One attention backend for prompts and another one for decoding, over the same KV pool."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, KVPool, Phase
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.needs import AttentionCaps

Backend = type[AttentionBackend]


Part = tuple[AttentionBackend, ForwardBatch]


class PartedBackend(AttentionBackend):
    """Attention whose work others do: each call is handed on to who has that part of it, with its own batch."""

    @abstractmethod
    def part(self, layer: AttentionLayer, batch: ForwardBatch, *, decodes: bool) -> Part:
        """Return who attends for a layer's decode rows, or for its prompts."""

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        backend, own = self.part(layer, batch, decodes=False)
        backend.forward_extend(q, k, v, layer, own, out)

    def forward_extend_latent(
        self, q: Tensor, heads: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> bool:
        backend, own = self.part(layer, batch, decodes=False)
        return backend.forward_extend_latent(q, heads, layer, own, out)

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        backend, own = self.part(layer, batch, decodes=True)
        backend.forward_decode(q, k, v, layer, own, out)

    def forward_decode_qkv(
        self,
        qkv: Tensor,
        norm: tuple[Tensor, float] | None,
        rope: tuple[Tensor, Tensor],
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: Tensor,
    ) -> bool:
        backend, own = self.part(layer, batch, decodes=True)
        return backend.forward_decode_qkv(qkv, norm, rope, layer, own, out)


class HybridBackend(PartedBackend):
    """Two backends as one; made by `hybrid`, which fills in the classes.

    The KV pool has one layout by contract (`KVPool.layer`), so each half reads what the other one wrote. A half takes
    part in a step only if the step has rows for it.
    """

    prefill_class: ClassVar[Backend]
    decode_class: ClassVar[Backend]
    names: ClassVar[tuple[str, str]]
    """Of the prefill half and of the decode half."""

    @classmethod
    def why_not(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype, page_size: int) -> str | None:
        """Say which half refuses, and why."""
        uses = (("prefill", cls.prefill_class), ("decode", cls.decode_class))
        for (use, half), name in zip(uses, cls.names, strict=True):
            reason = half.why_not(config, device, dtype, page_size)
            if reason is not None:
                return f"{use} by {name}: {reason}"
        return super().why_not(config, device, dtype, page_size)

    def __init__(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> None:
        self.kv_pool = kv_pool
        self.prefill = self.prefill_class(config, kv_pool, device)
        self.decode = self.decode_class(config, kv_pool, device)
        self.prefix_group = self.decode.prefix_group

    def init_graph_state(self, max_batch: int, max_tokens: int) -> None:
        """Both halves may be captured."""
        for half, caps in ((self.prefill, self.prefill_class.caps), (self.decode, self.decode_class.caps)):
            if caps.graph != "none":
                half.init_graph_state(max_batch, max_tokens)

    def plan(self, batch: ForwardBatch, phase: Phase) -> None:
        for half in self._halves(batch):
            half.plan(batch, phase)

    def plan_in_graph(self, batch: ForwardBatch) -> None:
        for half in self._halves(batch):
            half.plan_in_graph(batch)

    def write_kv(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """The first half that takes part in the step writes for both."""
        (self.decode if batch.num_decode else self.prefill).write_kv(layer, k, v, batch)

    def part(self, layer: AttentionLayer, batch: ForwardBatch, *, decodes: bool) -> Part:
        return (self.decode if decodes else self.prefill), batch

    def _halves(self, batch: ForwardBatch) -> Iterator[AttentionBackend]:
        if batch.num_decode:
            yield self.decode
        if batch.num_decode < batch.num_requests:
            yield self.prefill


def hybrid(prefill: Backend, decode: Backend, names: tuple[str, str] | None = None) -> Backend:
    """Compose two backend classes into one.

    Args:
        prefill: Computes prompts.
        decode: Computes the other tokens.
        names: What messages call the two; their classes' names if not given.
    """
    shown = names or (prefill.__name__, decode.__name__)
    members = {
        "__doc__": f"Prefill by {shown[0]}, decode by {shown[1]}.",
        "prefill_class": prefill,
        "decode_class": decode,
        "names": shown,
        # A token that decode computed may be computed again by prefill, after a retraction: two round in two ways.
        "caps": replace(common_caps(prefill.caps, decode.caps), batch_invariant=False),
    }
    return type("Hybrid", (HybridBackend,), members)


def common_caps(prefill: AttentionCaps, decode: AttentionCaps) -> AttentionCaps:
    """Return what two backends can do together: of most facts, what is true of both, or in both sets."""
    others: dict[str, Any] = {
        "head_dims": _both(prefill.head_dims, decode.head_dims),
        "page_sizes": _both(prefill.page_sizes, decode.page_sizes),
        "graph": _graph(prefill, decode),
        "needs_cpu_lens": prefill.needs_cpu_lens or decode.needs_cpu_lens,
    }
    names = (fact.name for fact in fields(AttentionCaps) if fact.name not in others)
    return AttentionCaps(**others, **{name: getattr(prefill, name) & getattr(decode, name) for name in names})


def _both(one: frozenset[int] | None, other: frozenset[int] | None) -> frozenset[int] | None:
    """Intersect two sets of which None stands for everything."""
    if one is None or other is None:
        return one if other is None else other
    return one & other


def _graph(prefill: AttentionCaps, decode: AttentionCaps) -> Literal["none", "decode", "mixed"]:
    """Decode steps are captured if the decode half can be, prefill chunks if the prefill half can be as well."""
    if decode.graph == "none":
        return "none"
    return "mixed" if prefill.graph == "mixed" else "decode"
