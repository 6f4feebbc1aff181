"""Attention by an installed FlashAttention-3, over the paged KV cache. Chosen by name only; needs a Hopper-class GPU.

Its paged kernel takes any page size (Dao-AILab/flash-attention issue 1627), reads lengths and page table on the device,
and takes from the host how many splits of the keys there may be. That number is always given: 1 for prompts; for decode
rows more than 1 only if a check at the start finds that splitting changes nothing. Sinks are added behind the kernel,
by the logarithm of the sums, which every build returns: one of them takes sinks, in bfloat16 only.

B requests, T tokens, Hq and Hk query and KV heads, D head dim, P page size.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, KVPool, Phase
from dovetail.contracts.config import LayerSpec, ModelConfig
from dovetail.contracts.needs import AttentionCaps
from dovetail.errors import UnsupportedError
from dovetail_backends.fa3_builds import Look, Queries, find_build
from dovetail_backends.triton.kv import write_kv

logger = logging.getLogger("dovetail.backends.fa3")

MAX_SPLITS = 32
PROGRAMS = 264
"""Twice the multiprocessors of an H100 or H200: with fewer programs than that, decode splits its keys."""


class FlashAttention3Backend(AttentionBackend):
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

    def __init__(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> None:
        found = find_build()
        if isinstance(found, str):
            raise UnsupportedError(found)
        self.kv_pool = kv_pool
        self._build = found
        self._kv_heads = config.layers[0].num_kv_heads
        self._longest = 0
        self._counted = torch.arange(1, dtype=torch.int32, device=device)
        self._lens = self._pages = self._starts = self._singles = torch.empty(0, dtype=torch.int32, device=device)
        self._schedules: dict[tuple[bool, int, tuple[int, int], bool], Tensor | None] = {}
        self._max_splits = MAX_SPLITS if self._may_split(config, kv_pool, device) else 1

    def init_graph_state(self, max_batch: int, max_tokens: int) -> None:
        """Count decode rows once: graphs read the numbers, so they stay where they are."""
        self._counted = torch.arange(max_batch + 1, dtype=torch.int32, device=self._counted.device)

    def plan(self, batch: ForwardBatch, phase: Phase) -> None:
        """Note the longest chunk, which the kernel wants from the host; in a graph it is an upper bound."""
        self._longest = max(batch.q_lens_cpu[batch.num_decode :], default=1)

    def plan_in_graph(self, batch: ForwardBatch) -> None:
        """Gather what the kernel reads: lengths and page table by request, and where each chunk starts.

        In a graph these stand in its memory and are made anew by every replay.
        """
        self._lens = batch.seq_lens.to(torch.int32)
        self._pages = batch.page_table.index_select(0, batch.rows)
        self._starts = (batch.q_starts[batch.num_decode :] - batch.num_decode).to(torch.int32)
        self._singles = self._count(batch.num_decode)
        self._schedules = {}

    def write_kv(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        keys, values = (self.kv_pool.tensor(layer.index, name) for name in "kv")
        write_kv(k, v, (keys, values), batch.kv_slots)

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        """One query per request, `[B, Hq, D]`, which may be split over the keys."""
        num = batch.num_decode
        of = Queries(self._lens[:num], self._pages[:num], self._singles, 1, self._num_splits(num))
        self._attend(q, layer, out, of)

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        """Chunks of several requests packed into `[T', Hq, D]`."""
        num = batch.num_decode
        # A chunk of one token is no decode row: chunks of other lengths may stand beside it, also in a later replay.
        longest = max(2, self._longest)
        self._attend(q, layer, out, Queries(self._lens[num:], self._pages[num:], self._starts, longest, 1))

    def _attend(self, q: Tensor, layer: AttentionLayer, out: Tensor, of: Queries) -> None:
        look = Look.of(layer)
        kv = self.kv_pool.layer(layer.index)
        keys, values = kv[:, 0], kv[:, 1]
        alike = of.longest == 1, layer.num_qo_heads, look.window, look.cap > 0
        if alike not in self._schedules:
            self._schedules[alike] = self._build.schedule(q, keys, of, look)
        sums = self._build.attend(q, keys, values, out, of, look, self._schedules[alike])
        if layer.sinks is not None:
            # A sink is one more key without a value: it takes its share of the sum of weights.
            out.mul_(torch.sigmoid(sums - layer.sinks)[..., None])

    def _count(self, num: int) -> Tensor:
        """Return 0 … num: where the queries of so many decode rows begin."""
        if num < len(self._counted):
            return self._counted[: num + 1]
        return torch.arange(num + 1, dtype=torch.int32, device=self._counted.device)

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
            self._build.attend(q, kv[:, 0], kv[:, 1], found[-1], of, look, schedule)
        whole, split = (out.float() for out in found)
        return torch.allclose(whole, split, rtol=2e-2, atol=2e-2)
