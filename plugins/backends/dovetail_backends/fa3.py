"""Attention by an installed FlashAttention-3, over the paged KV cache. Needs a Hopper-class GPU.

Its paged kernel takes any page size (Dao-AILab/flash-attention issue 1627), reads lengths and page table on the device,
and takes from the host how many splits of the keys there may be. That number is always given: 1 for prompts; for decode
rows more than 1 only if a check at the start finds that splitting changes nothing. Sinks are added behind the kernel,
by the logarithm of the sums, which every build returns: one of them takes sinks, in bfloat16 only.

"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from dovetail.contracts.attention import KVPool
from dovetail.contracts.config import LayerSpec, ModelConfig
from dovetail.contracts.errors import UnsupportedError
from dovetail.contracts.needs import AttentionCaps
from dovetail_backends.fa3_builds import find_build, installed
from dovetail_backends.flash import FlashBackend, Queries, ScoreOptions

logger = logging.getLogger("dovetail.backends.fa3")

MAX_SPLITS = 32
CHUNK, WINDOW = 700, 300
"""Tokens of the prompt by which windows are checked, and what a query of it sees: several tiles of the kernel."""
WRONG = 0.05
WIDE = 192
"""Heads wider than this are checked: that of vLLM 0.33.0 was off by 0.42 at 256, and right at 64 and 128."""
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
        self._check_windows(config, kv_pool, device)

    def _num_splits(self, num_requests: int) -> int:
        """Splits of the keys that fill the device; the same for every replay of a graph."""
        return max(1, min(self._max_splits, PROGRAMS // (num_requests * self._kv_heads)))

    def _may_split(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> bool:
        """Whether splitting gives what not splitting gives, for each kind of layer.

        So a build without soft caps or windows is also known before weights are read: it raises here.
        """
        kinds = {(ScoreOptions.of(spec), spec.num_qo_heads): spec for spec in config.layers}
        dtype = kv_pool.layer(config.layers[0].index).dtype
        found = [self._splits_alike(look, spec, dtype, kv_pool.page_size, device) for (look, _), spec in kinds.items()]
        if not all(found):
            logger.warning("this FlashAttention-3 computes wrong results when it splits; decode runs without splits")
        return all(found)

    def _splits_alike(
        self, look: ScoreOptions, spec: LayerSpec, dtype: torch.dtype, size: int, device: torch.device
    ) -> bool:
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

    def _check_windows(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> None:
        """Compare a prompt that looks through a window with plain torch, for wide heads.

        Raises:
            UnsupportedError: This build computes it wrongly.
        """
        kinds = {spec.qk_dim: spec for spec in config.layers if spec.qk_dim > WIDE and spec.sliding_window is not None}
        for dim, spec in kinds.items():
            distance = self._window_error(spec, kv_pool.layer(spec.index).dtype, kv_pool.page_size, device)
            if not distance < WRONG:
                raise UnsupportedError(
                    f"this FlashAttention-3 computes prompts wrongly where heads are {dim} wide and look through a "
                    f"sliding window (off by {distance:.2g}); use another attention backend for this model"
                )

    def _window_error(self, spec: LayerSpec, dtype: torch.dtype, size: int, device: torch.device) -> float:
        """Return how far a prompt's result is from what it must be, as a part of that."""
        generator = torch.Generator(device=device).manual_seed(0)
        pages = -(-CHUNK // size)
        shape = (pages, 2, size, spec.num_kv_heads, spec.qk_dim)
        kv = torch.randn(shape, generator=generator, device=device).to(dtype)
        q = torch.randn(CHUNK, spec.num_qo_heads, spec.qk_dim, generator=generator, device=device).to(dtype)
        of = Queries(
            lens=torch.tensor([CHUNK], dtype=torch.int32, device=device),
            pages=torch.arange(pages, dtype=torch.int32, device=device)[None],
            starts=torch.tensor([0, CHUNK], dtype=torch.int32, device=device),
            longest=CHUNK,
            splits=1,
        )
        look, out = replace(ScoreOptions.of(spec), window=(WINDOW - 1, 0), cap=0.0), torch.full_like(q, float("nan"))
        self._build.attend(q, (kv[:, 0], kv[:, 1]), out, of, look, self._build.schedule(q, kv[:, 0], of, look))
        keys, values = (kv[:, half].flatten(0, 1)[:CHUNK] for half in (0, 1))
        want = windowed(q.float(), keys.float(), values.float(), spec.scale)
        return float((out.float() - want).norm() / want.norm())


def windowed(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend a whole prompt, `[T, Hq, D]` over `[T, Hk, D]`, each query to the last `WINDOW` tokens."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("nhd,lhd->hnl", q, keys) * scale
    place = torch.arange(len(q), device=q.device)
    behind = place[:, None] - place
    scores = scores.masked_fill((behind < 0) | (behind >= WINDOW), float("-inf"))
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), values)
