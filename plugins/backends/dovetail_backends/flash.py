"""What backends over a FlashAttention library share: what its kernels read of a step, and how layers call them.

Their paged kernels read lengths and page table on the device, so a replayed graph needs no plan. Whose queries a call
attends is `Queries`, how a layer looks at keys is `ScoreOptions`, and a `Build` is one way to call a library.

B requests, T tokens, R requests of a call, Hq and Hk query and KV heads, D head dim, P page size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, KVPool, Phase
from dovetail.contracts.config import LayerSpec, ModelConfig
from dovetail_backends.triton.kv import write_kv


@dataclass(frozen=True, slots=True)
class Queries:
    """Whose queries a call attends, and over which keys.

    Attributes:
        lens: `[R]` int32, keys of each request; on the device, as all tensors here.
        pages: `[R, max_pages]` int32.
        starts: `[R + 1]` int32, the first query of each request; the last entry is T.
        longest: Most queries of one request; 1: each request has exactly one. An upper bound will do.
        splits: Parts that the keys may be split into.
    """

    lens: Tensor
    pages: Tensor
    starts: Tensor
    longest: int
    splits: int


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """How a layer's queries look at keys: factor of the scores, window to the left and right (-1: none), soft cap."""

    scale: float
    window: tuple[int, int] = (-1, -1)
    cap: float = 0.0

    @classmethod
    def of(cls, layer: AttentionLayer | LayerSpec) -> ScoreOptions:
        """Return how the queries of a layer look."""
        window = (-1, -1) if layer.sliding_window is None else (layer.sliding_window - 1, 0)
        return cls(layer.scale, window, layer.soft_cap or 0.0)


class Build(Protocol):
    """One way to call a library."""

    def attend(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        out: Tensor,
        of: Queries,
        look: ScoreOptions,
        schedule: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend causally, each request's last query standing at its last key.

        Args:
            q: `[T, Hq, D]`.
            kv: Keys and values, each `[N, P, Hk, D]`, any strides but the last.
            out: `[T, Hq, D]`, written where a request has queries.
            of: Requests.
            look: The layer's facts.
            schedule: From `schedule` for the same requests, look and shapes.
            sinks: `[Hq]` float32: one more key of each head, without a value; or None.
        """

    def schedule(self, q: Tensor, keys: Tensor, of: Queries, look: ScoreOptions) -> Tensor | None:
        """Return what the device works out once for all layers of a step that are alike, or None: there is nothing."""
        ...


class FlashBackend(AttentionBackend):
    """Decode rows and prefill chunks by the paged kernel of a library, which packs the queries of all requests."""

    def __init__(self, config: ModelConfig, kv_pool: KVPool, device: torch.device, build: Build) -> None:
        self.kv_pool = kv_pool
        self._build = build
        self._longest = 0
        self._counted = torch.arange(1, dtype=torch.int32, device=device)
        self._lens = self._pages = self._starts = self._singles = torch.empty(0, dtype=torch.int32, device=device)
        self._schedules: dict[tuple[bool, int, tuple[int, int], bool], Tensor | None] = {}

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
        look = ScoreOptions.of(layer)
        kv = self.kv_pool.layer(layer.index)
        pair = kv[:, 0], kv[:, 1]
        alike = of.longest == 1, layer.num_qo_heads, look.window, look.cap > 0
        if alike not in self._schedules:
            self._schedules[alike] = self._build.schedule(q, pair[0], of, look)
        self._build.attend(q, pair, out, of, look, self._schedules[alike], layer.sinks)

    def _count(self, num: int) -> Tensor:
        """Return 0 … num: where the queries of so many decode rows begin."""
        if num < len(self._counted):
            return self._counted[: num + 1]
        return torch.arange(num + 1, dtype=torch.int32, device=self._counted.device)

    def _num_splits(self, num_requests: int) -> int:
        """Parts that the keys of decode rows may be split into; the same for every replay of a graph."""
        return 1
