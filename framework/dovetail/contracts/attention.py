"""What the author of an attention backend implements: `AttentionBackend`, and the batch it is given.

Importing this module does not import torch. Letters used in shapes: B requests in the batch, T tokens in the batch
(each decode row brings one), Hq and Hk query and KV heads, D and Dv widths of a key and of a value head (where only D
stands they are equal), P page size, S device rows.

Tokens of a batch are ordered by request, decode rows first: rows `0 … num_decode-1` bring one token each, then come
the prefill chunks. Within a request the new tokens are the last `q_len` of its `seq_len` tokens.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dovetail.contracts.needs import AttentionCaps, unmet
from dovetail.contracts.options import Configurable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dovetail.contracts.config import LayerSpec, ModelConfig


class Phase(enum.Enum):
    """Why `plan` is called: for a batch run eagerly, or for one that is recorded into a graph.

    A replay is not planned: nothing of a backend runs on the host then. What depends on the step is read on the device,
    by `plan_in_graph` or by the kernels. A backend that must plan every step on the host claims no graphs.
    """

    EAGER = "eager"
    CAPTURE = "capture"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One attention layer of the model as a backend sees it: a `LayerSpec` with its tensors and this rank's heads.

    Scores are multiplied by `scale`, and become `soft_cap * tanh(score / soft_cap)` if it is not None. `sinks` is
    `[Hq]` float32 or None. `qk_dim` is D, `v_dim` is Dv.

    `sliding_window` is the number of tokens that a query attends to, itself included. With `chunk_size` it attends to
    its own chunk of that many tokens, counted from the start of its request.

    The pool of a `latent` layer has one row `[D]` per token: the key, whose first Dv values are also the value. A layer
    that is not `causal` has no cache: a query attends to its whole prompt, or with `sliding_window` n to the n - 1
    tokens on either side of it. With `spans`, a query attends to all tokens of its own span as well: see
    `ForwardBatch.spans`.
    """

    index: int
    num_qo_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    scale: float
    latent: bool = False
    sliding_window: int | None = None
    chunk_size: int | None = None
    sinks: Tensor | None = None
    soft_cap: float | None = None
    causal: bool = True
    spans: bool = False

    @classmethod
    def of(cls, spec: LayerSpec, num_ranks: int = 1, sinks: Tensor | None = None) -> AttentionLayer:
        """Return a layer as its spec has it; `num_ranks` divide its heads, and keep a KV head each where it has fewer.

        A latent row is every rank's.
        """
        return cls(
            index=spec.index,
            num_qo_heads=spec.num_qo_heads // num_ranks,
            num_kv_heads=max(1, spec.num_kv_heads // num_ranks),
            qk_dim=spec.qk_dim,
            v_dim=spec.v_dim,
            scale=spec.scale,
            latent=spec.mixer == "latent",
            sliding_window=spec.sliding_window,
            chunk_size=spec.chunk_size,
            sinks=sinks,
            soft_cap=spec.soft_cap,
            causal=spec.causal,
            spans=spec.spans,
        )


class KVPool(Protocol):
    """The paged KV cache. Owned by the engine; a backend reads and writes it and keeps no copy.

    It has no tensors of layers that are not causal.
    """

    page_size: int
    num_pages: int

    def layer(self, index: int) -> Tensor:
        """Return layer `index`: `[num_pages, 2, P, Hk, D]`, keys at `[:, 0]`, values at `[:, 1]`, contiguous.

        Only of layers that have keys and values of one width, and so of all that a backend is given whose caps have
        neither `latent` among their `mixers` nor `unequal_dims`.
        """
        ...

    def tensor(self, index: int, name: str) -> Tensor:
        """Return one tensor of layer `index` as a view `[num_pages, P, …]`, whatever the layout.

        `k` is `[num_pages, P, Hk, D]` and `v` `[num_pages, P, Hk, Dv]` of every layer; of a latent one both are views
        of `latent`, `[num_pages, P, D]`. Others are those that its `LayerSpec` names. A layer that reads another's
        cache has that one's.
        """
        ...


@dataclass(frozen=True, slots=True)
class StateSave:
    """Keep a copy of the states of one group: request `request` of the batch, behind its first `length` tokens."""

    group: int
    request: int
    length: int
    copy: int


class StateStore(Protocol):
    """The states of recurrent layers, owned by the engine: it puts the right one into a row before a request's step.

    `dovetail.sdk.layers.recurrent.recur` does all that a layer needs of it, and for one with kernels of its own
    `dovetail.sdk.layers.mixer.Mixer`.
    """

    def rows(self, index: int) -> Mapping[str, Tensor]:
        """Return the tensors that layer `index` has named, `[S, …]`; the layer reads and writes its requests' rows."""
        ...

    def wants(self, index: int, save: StateSave) -> bool:
        """Whether a copy is asked for of layer `index`."""
        ...

    def save(self, index: int, copy: int, state: Mapping[str, Tensor]) -> None:
        """Keep a copy of layer `index`'s state of one request, `[1, …]`."""

    def copies(self, index: int) -> Mapping[str, Tensor]:
        """Return the copies of layer `index`'s tensors, `[M, …]`; a kernel writes those that the step's saves name."""
        ...

    def group(self, index: int) -> int:
        """Return the group of layer `index`, as saves name it."""
        ...


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Tower output of a step. N tokens stand for images, L is 1 and one more for each addition, H the hidden size.

    Attributes:
        at: `[N]` int64, which of the step's tokens they are, ascending.
        rows: `[L, N, H]`: in place of their embeddings; then what is added behind the first layers, one for each.
    """

    at: Tensor
    rows: Tensor


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """One step's batch. Tensors live on the model's device and belong to the engine; a backend only reads them.

    Attributes:
        num_decode: Leading requests that bring exactly one token and are past their prompt.
        positions: `[T]` int64, absolute position of each new token.
        kv_slots: `[T]` int64, where each new token's key and value go: `page * P + offset`. In a graph, negative for
            the rows that pad its batch: write nothing there.
        rows: `[B]` int64, device row of each request, an index into `page_table`.
        page_table: `[S, max_pages]` int32, page ids by device row; entries past a request's pages are undefined. Where
            all layers have a sliding window, pages behind it are given back: their entries are 0, the null page. Of a
            model without a cache all are 0, and nothing is written.
        seq_lens: `[B]` int64, KV length of each request after this step's tokens are written.
        q_starts: `[B + 1]` int32, first token of each request in the batch; the last entry is T.
        seq_lens_cpu: The same as `seq_lens`, on the host. Empty in a graph.
        q_lens_cpu: New tokens per request, on the host. In a graph, empty for decode and upper bounds for prefill. A
            graph of prefill chunks serves any division of its tokens: chunks that pad it have no new tokens and a
            `seq_len` of 0, and tokens from the last entry of `q_starts` on belong to no request.
        attention: The backend that serves this batch.
        last_tokens: `[R]` int64, indices of the tokens whose logits are wanted.
        shares_prefixes: Neighbouring decode rows begin with the same pages: worth looking for. Only a hint: results
            are the same, and in a graph other rows may follow that share nothing.
        states: Of recurrent layers; None where the model has none.
        segments: `[T]` int64, 0 for tokens of the first of two texts and 1 for those of the second; None where no
            request of the step has two.
        saves: Which copies of them to take in this step's chunks, at places in or at the end of a chunk. Empty in a
            graph, which reads `save_table` alone.
        save_table: `[N, 4]` int64, the same on the device: group, request, length and copy, a copy of -1 where it is
            padded. None where the step has none.
        images: What stands in place of the embeddings of images; None where the step has none.
        spans: `[T, 2]` int64, for layers with `AttentionLayer.spans`: places of the first token of the image that a
            token is one of, and of the one behind its last token; of any other token, its own place and the next. A
            query attends to these places, too, though some are behind it, or farther than a sliding window. Their keys
            and values are in the pool: chunks do not end within an image. None where the step has no image that sees
            both ways, so in every graph.
        rope_positions: `[3, T]` int64, frame, row and column by which rotary embeddings with sections turn, or `[T]`
            where the three are one; None: `positions`.
    """

    num_decode: int
    positions: Tensor
    kv_slots: Tensor
    rows: Tensor
    page_table: Tensor
    seq_lens: Tensor
    q_starts: Tensor
    seq_lens_cpu: list[int]
    q_lens_cpu: list[int]
    attention: AttentionBackend
    last_tokens: Tensor
    shares_prefixes: bool = False
    states: StateStore | None = None
    saves: tuple[StateSave, ...] = ()
    save_table: Tensor | None = None
    segments: Tensor | None = None
    images: ImageRows | None = None
    spans: Tensor | None = None
    rope_positions: Tensor | None = None

    @property
    def num_requests(self) -> int:
        """B."""
        return int(self.rows.shape[0])

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.positions.shape[0])


class AttentionBackend(Configurable, ABC):
    """Computes attention over the paged KV cache. One instance per engine process.

    Order of calls in a step: `plan` (or `plan_in_graph`) once, then for every layer `write_kv` and one `forward_*`;
    `forward_decode_qkv` stands for both where a batch only decodes and the backend serves it, `forward_extend_latent`
    for `forward_extend`, and `forward_latent` for any of them. Of layers that are not causal, `forward_extend` alone is
    called, with whole prompts.
    """

    caps: AttentionCaps

    prefix_group: int = 0
    """Decode rows whose common prefix is read once where they stand side by side and `ForwardBatch.shares_prefixes` is
    set, the first of them a multiple of it; 0: never. May be set by `__init__`, as it depends on the heads."""

    @classmethod
    def why_not(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype, page_size: int) -> str | None:
        """Say in one line why this backend cannot serve the model here, or None. Printed by `auto` and by errors."""
        caps = cls.caps
        name = str(dtype).removeprefix("torch.")
        if not caps.devices & {device.type, "*"}:
            return f"device {device.type!r} is not supported; it runs on {', '.join(sorted(caps.devices))}"
        if name not in caps.dtypes:
            return f"dtype {name} is not supported; possible: {', '.join(sorted(caps.dtypes))}"
        if caps.page_sizes is not None and page_size not in caps.page_sizes:
            return f"page size {page_size} is not supported; possible: {sorted(caps.page_sizes)}"
        return unmet(config, caps)

    @classmethod
    def library(cls) -> str:
        """Say which library computes, with its version, where it is not of the backend's own package; "" by default.

        What `auto` measured of a backend holds as long as this says the same.
        """
        return ""

    @abstractmethod
    def __init__(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> None:
        """Keep what is needed; allocate scratch here, not per step.

        Made twice: over a pool of two pages before the weights are loaded, so that what fails does so early, and for
        good.
        """

    batch_invariant: bool = False
    """What a request gets must not depend, to the last bit, on who is computed with it, on how its prompt was cut into
    chunks, or on what was cached of it. Set by the engine when it has made the backend, before all else, if
    `--batch-invariant` is given and `caps.batch_invariant` says that it can."""

    def init_graph_state(self, max_batch: int, max_tokens: int) -> None:
        """Allocate the stable buffers that captured graphs will read. Called once, before any capture."""

    def plan(self, batch: ForwardBatch, phase: Phase) -> None:
        """Host-side preparation for a step; may read `*_cpu` fields if `caps.needs_cpu_lens`."""

    def plan_in_graph(self, batch: ForwardBatch) -> None:
        """Device work that is recorded into the graph before the first layer; no host reads."""

    def write_kv(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """Write `k` `[T, Hk, D]` and `v` `[T, Hk, Dv]` to `batch.kv_slots`. The default serves any device and layout.

        Of a latent layer `k` is all that there is to write. Not called for a layer that reads another's cache.
        """
        page_size = self.kv_pool.page_size
        # A graph's padding has negative slots: it writes zeros to the null page, which are there already.
        is_live = (batch.kv_slots >= 0)[:, None, None]
        slots = batch.kv_slots.clamp(min=0)
        pages, offsets = slots // page_size, slots % page_size
        self.kv_pool.tensor(layer.index, "k")[pages, offsets] = k.where(is_live, 0)
        if not layer.latent:
            self.kv_pool.tensor(layer.index, "v")[pages, offsets] = v.where(is_live, 0)

    def batch_of(self, index: int, batch: ForwardBatch) -> ForwardBatch:
        """Return the step as layer `index` sees it: with the slots and the page table of that layer's pages.

        For models that read and write tensors of their own (`LayerSpec.extra`) in `kv_pool`.
        """
        return batch

    kv_pool: KVPool
    """Set by `__init__`; the default `write_kv` uses it."""

    @abstractmethod
    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        """Attend prefill chunks, causally but for `batch.spans`, over their cached prefix and themselves.

        Of a layer that is not causal, chunks are whole prompts, of which each token sees all; nothing is in the pool.

        Args:
            q: `[T', Hq, D]`, the tokens of requests `num_decode …`.
            k: `[T', Hk, D]`, this step's keys of the same tokens; already in the pool if the layer is causal. None
                where it reads another one's cache: then they are there only.
            v: As `k`, `[T', Hk, Dv]`.
            layer: The layer's facts.
            batch: The whole batch; `T'` starts at token `num_decode`.
            out: `[T', Hq, Dv]`, written in full.
        """

    @abstractmethod
    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        """Attend one new token per request over its pages, for the first `num_decode` requests. Shapes as above."""

    def forward_decode_qkv(
        self,
        qkv: Tensor,
        norm: tuple[Tensor, float] | None,
        rope: tuple[Tensor, Tensor],
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: Tensor,
    ) -> bool:
        """Serve a batch of decode rows straight from the layer's projection, or decline.

        Called where keys and values are equally wide and the layer has a cache of its own, before the single steps:
        norm and rotation of queries and keys, `write_kv`, `forward_decode`. A backend that has one kernel for all of
        them saves the launches.

        Args:
            qkv: `[B, Hq + 2 Hk, D]`: query, key and value heads of each row's token.
            norm: Weight `[Hq + Hk, D]` and epsilon of an RMS norm of every query and key head, or None.
            rope: Cosine and sine `[B, 1, D]` of the rows' positions, as `ops.norm_rotate` takes them.
            layer: The layer's facts.
            batch: The whole batch; every request in it decodes.
            out: `[B, Hq, D]`, written in full if the backend serves.

        Returns:
            Whether it has done everything. The default does nothing and declines.
        """
        return False

    def forward_extend_latent(
        self, q: Tensor, heads: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> bool:
        """Serve the prefill chunks of a latent layer by keys and values of heads made of its rows, or decline.

        Offered after `write_kv` and outside graphs, before the absorbed form, which is `forward_extend`: queries taken
        to the space of the rows, what is found taken to values. For long chunks keys and values of heads are less work.
        All chunks of a step are served, or none. N is the width of a key that is made, the last `D - Dv` numbers of a
        row are the rest of it; V is the width of a value.

        Args:
            q: `[T', Hq, N + D - Dv]`, the tokens of requests `num_decode …`.
            heads: `[Hq, N + V, Dv]`: what makes of the first Dv numbers of a row each head's key, and then its value.
            layer: The layer's facts; all rows are in the pool, also this step's.
            batch: The whole batch; `T'` starts at token `num_decode`.
            out: `[T', Hq, V]`, written in full if the backend serves.

        Returns:
            Whether it has done everything. The default does nothing and declines.
        """
        return False

    def forward_latent(
        self, q: Tensor, queries: Tensor, heads: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> bool:
        """Serve all tokens of a latent layer in the absorbed form, with the products around it, or decline.

        Offered after `write_kv` where `batch_invariant` is set, in graphs too: what a library multiplies for heads may
        depend on the number of rows. Letters are those of `forward_extend_latent`.

        Args:
            q: `[T, Hq, N + D - Dv]`, of which the first N are read.
            queries: `[T, Hq, D]`, whose last `D - Dv` numbers are there; the first Dv are the backend's to write.
            heads: `[Hq, N + V, Dv]`.
            layer: The layer's facts; all rows are in the pool, also this step's.
            batch: The whole batch, as `batch_of` returns it.
            out: `[T, Hq, V]`, written in full if the backend serves.

        Returns:
            Whether it has done everything. The default does nothing and declines.
        """
        return False

    def forward_mixed(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        """Serve decode rows and prefill chunks in one call. The default splits at `num_decode`."""
        n = batch.num_decode
        (old_k, new_k), (old_v, new_v) = ((None, None) if x is None else (x[:n], x[n:]) for x in (k, v))
        self.forward_decode(q[:n], old_k, old_v, layer, batch, out[:n])
        self.forward_extend(q[n:], new_k, new_v, layer, batch, out[n:])
