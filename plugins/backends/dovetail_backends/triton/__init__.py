"""Attention in Triton: paged split-KV decode and paged prefill, every length read on the device.

`torch_native` is the reference that it must equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.cache.quantized import as_bytes
from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, KVPool, Phase
from dovetail.contracts.cache import SCALED_DTYPES
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.needs import AttentionCaps
from dovetail_backends.triton import latent
from dovetail_backends.triton.decode import DecodeScratch, Prefixes, decode, decode_qkv
from dovetail_backends.triton.extend import extend
from dovetail_backends.triton.kv import Scales, scales_of, write_kv, write_rows, write_scaled_kv, write_scaled_rows
from dovetail_backends.triton.latent_heads import extend_by_heads
from dovetail_backends.triton.prefix import PrefixScratch


class TritonBackend(AttentionBackend):
    """Serves CUDA; on CPU only under Triton's interpreter, for tests."""

    caps = AttentionCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
        head_dims=frozenset(range(8, 257, 8)),
        graph="mixed",
        sliding_window=True,
        chunked=True,
        sinks=True,
        soft_cap=True,
        mixers=frozenset({"kv", "latent"}),
        cache_dtypes=frozenset(SCALED_DTYPES),
    )

    def __init__(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> None:
        self.kv_pool = kv_pool
        spec, self.prefix_group = config.layers[0], 0
        self._is_latent, self._is_scaled = spec.mixer == "latent", spec.cache_dtype is not None
        if self._is_latent:
            self._scratch = DecodeScratch(spec.num_qo_heads, latent.blocks(spec.num_qo_heads), spec.v_dim, device)
        else:
            self._scratch = DecodeScratch(spec.num_qo_heads, spec.num_kv_heads, spec.qk_dim, device)
            self._prefix_scratch = PrefixScratch(spec.num_qo_heads, spec.num_kv_heads, spec.qk_dim, device)
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
        if batch.shares_prefixes and batch.num_decode > 1 and self.prefix_group:
            shared = self._prefix_scratch.plan(batch, self.kv_pool.page_size)
            self._prefixes = Prefixes(shared, self._prefix_scratch)

    def write_kv(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        cache, scales = self._cache(layer)
        if scales is None and self._is_latent:
            write_rows(k, cache, batch.kv_slots)
        elif scales is None:
            write_kv(k, v, cache, batch.kv_slots)
        elif self._is_latent:
            write_scaled_rows(k, cache, scales, batch.kv_slots)
        else:
            write_scaled_kv(k, v, cache, scales, batch.kv_slots)

    def _cache(self, layer: AttentionLayer) -> tuple[Tensor, Scales | None]:
        """Return a layer: `[N, 2, P, Hk, D]`, or latent rows `[N, P, D]`; in 8 bits as int8, with scales."""
        cache = self.kv_pool.tensor(layer.index, "latent") if self._is_latent else self.kv_pool.layer(layer.index)
        if not self._is_scaled:
            return cache, None
        return as_bytes(cache), scales_of(self.kv_pool, layer.index, is_latent=self._is_latent)

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        cache, scales = self._cache(layer)
        if self._is_latent:
            latent.decode(q, cache, layer, batch, self._scratch, out, scales)
        else:
            decode(q, cache, layer, batch, self._scratch, out, self._prefixes, scales)

    def forward_decode_qkv(
        self,
        qkv: Tensor,
        norm: tuple[Tensor, float] | None,
        rope: tuple[Tensor, Tensor],
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: Tensor,
    ) -> bool:
        """One kernel for the rotation, the write and the attention."""
        kv, scales = self._cache(layer)
        decode_qkv(qkv, norm, rope, kv, layer, batch, self._scratch, out, self._prefixes, scales)
        return True

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        cache, scales = self._cache(layer)
        if self._is_latent:
            latent.extend(q, cache, layer, batch, out, self._longest, scales)
        else:
            extend(q, cache, layer, batch, out, self._longest, scales=scales)

    def forward_extend_latent(
        self, q: Tensor, heads: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> bool:
        """Serves long chunks."""
        return extend_by_heads(q, heads, layer, batch, self.kv_pool, out)
