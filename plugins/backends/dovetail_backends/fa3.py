"""Attention by an installed FlashAttention-3, over the paged KV cache. Needs a Hopper-class GPU.

Its paged kernel takes any page size (Dao-AILab/flash-attention issue 1627), reads lengths and page table on the device,
and takes from the host how many splits of the keys there may be. That number is always given: 1 for prompts; for decode
rows more than 1 only if a check at the start finds that splitting changes nothing. Sinks are added behind the kernel,
by the logarithm of the sums, which every build returns: one of them takes sinks, in bfloat16 only.

"""

from __future__ import annotations

import logging

import torch

from dovetail.contracts.attention import KVPool
from dovetail.contracts.config import LayerSpec, ModelConfig
from dovetail.contracts.needs import AttentionCaps
from dovetail.errors import UnsupportedError
from dovetail_backends.fa3_builds import find_build, installed
from dovetail_backends.flash import FlashBackend, Look, Queries

logger = logging.getLogger("dovetail.backends.fa3")

MAX_SPLITS = 32
PROGRAMS = 264
"""Twice the multiprocessors of an H100 or H200: with fewer programs than that, decode splits its keys."""


class FlashAttention3Backend(FlashBackend):
    """Calls FlashAttention-3 for decode rows and for prefill chunks."""

    caps = AttentionCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=frozenset(range(8, 257, 8)),
        graph="mixed",
        sliding_window=True,
        soft_cap=True,
        sinks=True,
    )

    @classmethod
    def why_not(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype, page_size: int) -> str | None:
        """As the default; and a GPU of another kind, or a FlashAttention-3 that is not there."""
        reason = super().why_not(config, device, dtype, page_size)
        if reason is not None:
            return reason
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (8, 9):
            major, minor = torch.cuda.get_device_capability(device)
            return f"compute capability {major}.{minor} is not supported; FlashAttention-3 runs on 8.x and 9.x"
        found = find_build()
        return found if isinstance(found, str) else None

    @classmethod
    def library(cls) -> str:
        """See `AttentionBackend.library`."""
        return installed()

    def __init__(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> None:
        found = find_build()
        if isinstance(found, str):
            raise UnsupportedError(found)
        super().__init__(config, kv_pool, device, found)
        self._kv_heads = config.layers[0].num_kv_heads
        self._max_splits = MAX_SPLITS if self._may_split(config, kv_pool, device) else 1

    def _num_splits(self, num_requests: int) -> int:
        """Splits of the keys that fill the device; the same for every replay of a graph."""
        return max(1, min(self._max_splits, PROGRAMS // (num_requests * self._kv_heads)))

    def _may_split(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> bool:
        """Whether splitting gives what not splitting gives, for each kind of layer.

        So a build without soft caps or windows is also known before weights are read: it raises here.
        """
        kinds = {(Look.of(spec), spec.num_qo_heads): spec for spec in config.layers}
        dtype = kv_pool.layer(config.layers[0].index).dtype
        found = [self._splits_alike(look, spec, dtype, kv_pool.page_size, device) for (look, _), spec in kinds.items()]
        if not all(found):
            logger.warning("this FlashAttention-3 computes wrong results when it splits; decode runs without splits")
        return all(found)

    def _splits_alike(self, look: Look, spec: LayerSpec, dtype: torch.dtype, size: int, device: torch.device) -> bool:
        """Compare one split and four, for three requests over a few pages of made-up keys."""
        pages = -(-600 // size)
        generator = torch.Generator(device=device).manual_seed(0)
        shape = (3 * pages, 2, size, spec.num_kv_heads, spec.qk_dim)
        kv = torch.randn(shape, generator=generator, device=device).to(dtype)
        q = torch.randn(3, spec.num_qo_heads, spec.qk_dim, generator=generator, device=device).to(dtype)
        table = torch.arange(3 * pages, dtype=torch.int32, device=device).view(3, pages)
        lens = torch.tensor([600, 5, 311], dtype=torch.int32, device=device)
        found = []
        for splits in (1, 4):
            of = Queries(lens, table, self._count(3), 1, splits)
            found.append(torch.full_like(q, float("nan")))
            schedule = self._build.schedule(q, kv[:, 0], of, look)
            self._build.attend(q, (kv[:, 0], kv[:, 1]), found[-1], of, look, schedule)
        whole, split = (out.float() for out in found)
        return torch.allclose(whole, split, rtol=2e-2, atol=2e-2)
