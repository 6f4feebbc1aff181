"""Attention in Triton: paged split-KV decode and paged prefill, every length read on the device.

`torch_native` is the reference that it must equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, KVPool, Phase
from dovetail.contracts.cache import SCALED_DTYPES
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.needs import AttentionCaps
from dovetail.sdk.cache import as_bytes
from dovetail_backends.triton import latent
from dovetail_backends.triton.decode import DecodeScratch, Prefixes, decode, decode_qkv
from dovetail_backends.triton.extend import FIXED_ROWS, extend
from dovetail_backends.triton.head_products import multiply_heads
from dovetail_backends.triton.kv import (
    Pair,
    Scales,
    scales_of,
    write_kv,
    write_rows,
    write_scaled_kv,
    write_scaled_rows,
)
from dovetail_backends.triton.latent_heads import extend_by_heads
from dovetail_backends.triton.prefix import PrefixScratch


class TritonBackend(AttentionBackend):
    """Serves CUDA; on CPU only under Triton's interpreter, for tests."""

    caps = AttentionCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
        head_dims=frozenset(range(8, 513, 8)),
        graph="mixed",
        sliding_window=True,
        chunked=True,
        sinks=True,
        soft_cap=True,
        spans=True,
        mixers=frozenset({"kv", "latent"}),
        unequal_dims=True,
        cache_dtypes=frozenset(SCALED_DTYPES),
        batch_invariant=True,
    )

    def __init__(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> None:
        self.kv_pool = kv_pool
        spec, self.prefix_group = config.layers[0], 0
        self._is_latent, self._is_scaled = spec.mixer == "latent", spec.cache_dtype is not None
        if self._is_latent:
            self._scratch = DecodeScratch(spec.num_qo_heads, latent.blocks(spec.num_qo_heads), spec.v_dim, device)
        else:
            self._scratch = DecodeScratch(spec.num_qo_heads, spec.num_kv_heads, spec.v_dim, device)
            self._prefix_scratch = PrefixScratch(spec.num_qo_heads, spec.num_kv_heads, spec.v_dim, device)
            if any(spec.sliding_window is None and spec.chunk_size is None for spec in config.layers):
                self.prefix_group = self._prefix_scratch.group
        self._prefixes: Prefixes | None = None
        self._longest = 0

    def plan(self, batch: ForwardBatch, phase: Phase) -> None:
        """Note the longest chunk, which chooses the prefill tile; decode needs nothing from the host."""
        self._longest = max(batch.q_lens_cpu[batch.num_decode :], default=0)
        self._prefixes = None

    def plan_in_graph(self, batch: ForwardBatch) -> None:
        """Find what neighbouring decode rows share, where that is worth it; every layer of the step uses it."""
        self._prefixes = None
        if batch.shares_prefixes and not self.batch_invariant and batch.num_decode > 1 and self.prefix_group:
            shared = self._prefix_scratch.plan(batch, self.kv_pool.page_size)
            self._prefixes = Prefixes(shared, self._prefix_scratch)

    def write_kv(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        scales = self._scales(layer)
        if self._is_latent and scales is None:
            write_rows(k, self._rows(layer), batch.kv_slots)
        elif self._is_latent and scales is not None:
            write_scaled_rows(k, self._rows(layer), scales, batch.kv_slots)
        elif scales is None:
            write_kv(k, v, self._pair(layer), batch.kv_slots)
        else:
            write_scaled_kv(k, v, self._pair(layer), scales, batch.kv_slots)

    def _rows(self, layer: AttentionLayer) -> Tensor:
        """Return a layer's latent rows `[N, P, D]`; in 8 bits as int8."""
        rows = self.kv_pool.tensor(layer.index, "latent")
        return as_bytes(rows) if self._is_scaled else rows

    def _pair(self, layer: AttentionLayer) -> Pair:
        """Return a layer's keys and values; in 8 bits as int8."""
        k, v = self.kv_pool.tensor(layer.index, "k"), self.kv_pool.tensor(layer.index, "v")
        return (as_bytes(k), as_bytes(v)) if self._is_scaled else (k, v)

    def _scales(self, layer: AttentionLayer) -> Scales | None:
        return scales_of(self.kv_pool, layer.index, is_latent=self._is_latent) if self._is_scaled else None

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        scales = self._scales(layer)
        if self.batch_invariant:
            self._attend_fixed(q, layer, batch, out, (0, batch.num_decode))
        elif self._is_latent:
            latent.decode(q, self._rows(layer), layer, batch, self._scratch, out, scales)
        else:
            decode(q, self._pair(layer), layer, batch, self._scratch, out, self._prefixes, scales)

    def forward_decode_qkv(
        self,
        qkv: Tensor,
        norm: tuple[Tensor, float] | None,
        rope: tuple[Tensor, Tensor],
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: Tensor,
    ) -> bool:
        """One kernel for the rotation, the write and the attention, which rounds otherwise than those of prompts."""
        if self.batch_invariant:
            return False
        kv = self._pair(layer)
        decode_qkv(qkv, norm, rope, kv, layer, batch, self._scratch, out, self._prefixes, self._scales(layer))
        return True

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        scales = self._scales(layer)
        if self.batch_invariant:
            self._attend_fixed(q, layer, batch, out, (batch.num_decode, batch.num_requests))
        elif self._is_latent:
            latent.extend(q, self._rows(layer), layer, batch, out, self._longest, scales)
        else:
            extend(q, self._pair(layer), layer, batch, out, self._longest, scales=scales)

    def forward_extend_latent(
        self, q: Tensor, heads: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> bool:
        """Serves long chunks, which round otherwise than decode rows."""
        return not self.batch_invariant and extend_by_heads(q, heads, layer, batch, self.kv_pool, out)

    def forward_latent(
        self, q: Tensor, queries: Tensor, heads: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> bool:
        """Decode rows and chunks by one kernel, between products of one tile."""
        if not self.batch_invariant:
            return False
        to_keys, to_values = heads.split([heads.shape[1] - out.shape[2], out.shape[2]], dim=1)
        multiply_heads(q[..., : to_keys.shape[1]], to_keys, queries[..., : layer.v_dim])
        found = queries.new_empty(*queries.shape[:2], layer.v_dim)
        self._attend_fixed(queries, layer, batch, found, (0, batch.num_requests))
        multiply_heads(found, to_values.transpose(1, 2), out)
        return True

    def _attend_fixed(
        self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor, requests: tuple[int, int]
    ) -> None:
        """Attend requests from the first to before the second, whose bits depend on nothing else."""
        scales = self._scales(layer)
        if self._is_latent:
            latent.extend(q, self._rows(layer), layer, batch, out, FIXED_ROWS, scales, requests=requests)
        else:
            pair = self._pair(layer)
            extend(q, pair, layer, batch, out, FIXED_ROWS, scales=scales, requests=requests, is_fixed=True)
