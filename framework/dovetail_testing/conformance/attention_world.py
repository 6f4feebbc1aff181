"""Batches for the attention tests: a poisoned KV pool, rows and pages in random order, and what the result must be.

Page 0 is the engine's null page: its contents are finite, and page tables hold it past a request's pages. Slots of a
request's last page past its length hold what an earlier owner left there: finite. Every other page that the batch does
not own is NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, Phase
from dovetail.contracts.cache import Chunk, Full, ScaledDtype, Window
from dovetail.contracts.config import LayerSpec, ModelConfig, RopeConfig
from dovetail.sdk.cache import DTYPES, rounded, write_scaled
from dovetail_testing.checks import check, fail, no_error
from dovetail_testing.conformance.attention_reference import Spans, attend_all, error_by_token, mistakes

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NUM_LAYERS = 3
UNWRITTEN = 7777.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One batch. `lengths` holds (cached, new) per request, decode rows first.

    `common` holds, per request, how many of its leading tokens stand in pages of the request before it, rounded down to
    whole pages that both have cached. Where it is given, the batch has the hint `shares_prefixes` if `hint` is true.
    With `gives_back`, pages wholly behind the window or chunk of a request's first query are not its any more. `v_dim`
    is the width of a value head where it differs; a `latent` layer has one row a token, whose first `v_dim` numbers are
    the value. With `reads_another`, the layer has no cache of its own. Of
    a `bidirectional` layer nothing is cached, and all prompts are whole. With a `cache_dtype`, keys and values stand in
    it, with scales, and count as they are after that. `spans` are the images of each request, in a layer in which they
    see both ways: none ends behind the request's tokens, or within what is cached of it.
    """

    lengths: Sequence[tuple[int, int]]
    page_size: int = 16
    num_qo_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 16
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32
    is_shuffled: bool = True
    layer: int = 1
    common: Sequence[int] = ()
    hint: bool = True
    gives_back: bool = False
    v_dim: int | None = None
    latent: bool = False
    reads_another: bool = False
    bidirectional: bool = False
    cache_dtype: ScaledDtype | None = None
    spans: Sequence[Spans] = ()

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def has_pairs(self) -> bool:
        """Whether keys and values stand together: `KVPool.layer`."""
        return not (self.latent or self.bidirectional) and self.value_dim == self.head_dim

    @property
    def reach(self) -> Full | Window | Chunk:
        """How far back a query sees."""
        if self.chunk is not None:
            return Chunk(self.chunk)
        return Full() if self.window is None else Window(self.window)

    @property
    def num_decode(self) -> int:
        """Leading requests that bring one token and are past their prompt."""
        if self.bidirectional:
            return 0
        for number, (cached, new) in enumerate(self.lengths):
            if new > 1 or cached == 0:
                return number
        return len(self.lengths)

    def __str__(self) -> str:
        """Say what is special about the batch."""
        parts = [f"page size {self.page_size}", f"{self.num_qo_heads} query and {self.num_kv_heads} KV heads"]
        parts += [f"head dim {self.head_dim}"] + ([f"sliding window {self.window}"] if self.window else [])
        parts += [f"chunks of {self.chunk}"] if self.chunk else []
        parts += ["pages given back"] if self.gives_back else []
        parts += [f"latent rows whose first {self.value_dim} numbers are the value"] if self.latent else []
        parts += [f"values {self.value_dim} wide"] if not (self.latent or self.has_pairs) else []
        parts += [f"a cache in {self.cache_dtype} with scales"] if self.cache_dtype else []
        parts += ["in both directions"] if self.bidirectional else []
        parts += [f"images at {[list(each) for each in self.spans]}"] if self.spans else []
        parts += ["a layer that reads another one's cache"] if self.reads_another else []
        parts += [f"soft cap {self.soft_cap}"] if self.soft_cap else []
        parts += (["sinks"] if self.sinks else []) + ([str(self.dtype)] if self.dtype != torch.float32 else [])
        parts += [f"common tokens {list(self.common)} {'with' if self.hint else 'without'} hint"] if self.common else []
        return f"{', '.join(parts)}, (cached, new) = {list(self.lengths)}"

    def common_pages(self, number: int) -> int:
        """Return how many pages request `number` has from the one before it."""
        if number == 0 or number >= len(self.common):
            return 0
        cached = min(self.lengths[number - 1][0], self.lengths[number][0])
        return min(self.common[number], cached) // self.page_size

    def spec(self, index: int) -> LayerSpec:
        """Return the facts of a layer."""
        return LayerSpec(
            index=index,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            qk_dim=self.head_dim,
            v_dim=self.value_dim,
            mixer="latent" if self.latent else "kv",
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            reach=self.reach,
            sinks=self.sinks,
            soft_cap=self.soft_cap,
            causal=not self.bidirectional,
            spans=bool(self.spans),
            cache_dtype=self.cache_dtype,
        )

    def specs(self) -> tuple[LayerSpec, ...]:
        """Return those of all layers; behind them stands the one without a cache."""
        own = tuple(self.spec(index) for index in range(NUM_LAYERS))
        return (*own, replace(self.spec(NUM_LAYERS), cache_layer=self.layer)) if self.reads_another else own

    def config(self) -> ModelConfig:
        """Return the facts of a model that such layers are part of."""
        return ModelConfig(
            architecture="KitForCausalLM",
            vocab_size=32,
            hidden_size=self.num_qo_heads * self.head_dim,
            intermediate_size=32,
            num_layers=NUM_LAYERS + self.reads_another,
            layers=self.specs(),
            norm_eps=1e-6,
            hidden_act="silu",
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            rope=RopeConfig(),
            dtype=str(self.dtype).removeprefix("torch."),
        )


class Pool:
    """A KV pool whose pages are NaN, but for the null page.

    Attributes:
        memories: All that it has, `[layers, pages, …]`; where keys and values stand together, that is one: `memory`.
    """

    def __init__(self, case: Case, num_pages: int, device: torch.device) -> None:
        self.page_size = case.page_size
        self.num_pages = num_pages
        self._owner = {NUM_LAYERS: case.layer}

        stored = case.dtype if case.cache_dtype is None else DTYPES[case.cache_dtype]

        def empty(*shape: int, dtype: torch.dtype = stored) -> Tensor:
            return torch.empty(NUM_LAYERS, num_pages, *shape, dtype=dtype, device=device)

        size, heads, dim, v_dim = case.page_size, case.num_kv_heads, case.head_dim, case.value_dim
        self.memories: list[Tensor] = []
        self._named: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}
        if case.bidirectional:
            return  # as the engine's own: such layers have no tensors
        if case.has_pairs:
            self.memories = [empty(2, size, heads, dim)]
            self._named = {"k": self.memory[:, :, 0], "v": self.memory[:, :, 1]}
        elif case.latent:
            row = empty(size, dim)
            self.memories = [row]
            self._named = {"latent": row, "k": row[..., None, :], "v": row[..., None, :v_dim]}
        else:
            self.memories = [empty(size, heads, dim), empty(size, heads, v_dim)]
            self._named = dict(zip("kv", self.memories, strict=True))
        if case.cache_dtype is not None:
            names, shape = (("latent_scale",), ()) if case.latent else (("k_scale", "v_scale"), (heads,))
            self._scales = {name: empty(size, *shape, dtype=torch.bfloat16) for name in names}
        self.poison()

    @property
    def memory(self) -> Tensor:
        """Keys and values that stand together."""
        return self.memories[0]

    def poison(self) -> None:
        """Forget everything."""
        self.fill(slice(None), float("nan"))
        self.fill(0, 3.0)

    def fill(self, pages: Any, value: float) -> None:
        """Write a number all over pages; it is the scale of numbers that have one."""
        for memory in self.memories:
            memory[:, pages] = 1 if self._scales else value
        for scale in self._scales.values():
            scale[:, pages] = value

    @property
    def everything(self) -> list[Tensor]:
        """All memories, and scales where there are some."""
        return [*self.memories, *self._scales.values()]

    def floats(self) -> list[Tensor]:
        """Return what may hold NaN: all memories, or scales where there are some."""
        return list(self._scales.values()) or self.memories

    def layer(self, index: int) -> Tensor:
        """Return one layer, as backends get it that serve keys and values of one width."""
        if len(self._named) != 2 or len(self.memories) != 1:
            raise KeyError(f"layer {index} has no keys and values that stand together: KVPool.tensor has its tensors")
        return self.memory[self._owner.get(index, index)]

    def tensor(self, index: int, name: str) -> Tensor:
        """Return one tensor of a layer."""
        return (self._named | self._scales)[name][self._owner.get(index, index)]

    def write(self, layer: int, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Put keys and values into a layer."""
        if self._scales:
            for name, x in (("latent", k[:, 0]),) if "latent" in self._named else (("k", k), ("v", v)):
                write_scaled(self, layer, name, pages * self.page_size + offsets, x)
            return
        self.tensor(layer, "k")[pages, offsets] = k
        self.tensor(layer, "v")[pages, offsets] = v


@dataclass(slots=True)
class World:
    """A batch with everything that a backend is given, and the keys and values behind it."""

    case: Case
    device: torch.device
    pool: Pool
    layer: AttentionLayer
    batch: ForwardBatch
    q: Tensor
    k: Tensor
    v: Tensor
    parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def run(self, backend: AttentionBackend, phase: Phase = Phase.EAGER, fill: float = float("nan")) -> Tensor:
        """Do one layer of a step as a model does, into an output filled with `fill`."""
        self.batch.attention = backend
        backend.plan(self.batch, phase)
        backend.plan_in_graph(self.batch)
        return self.attend(backend, fill)

    def attend(self, backend: AttentionBackend, fill: float = float("nan")) -> Tensor:
        """Write keys and values, and attend."""
        out = self.q.new_full((*self.q.shape[:-1], self.case.value_dim), fill)
        k, v = (self.k, self.v) if not self.case.reads_another else (None, None)
        if self.case.bidirectional:
            pass  # nothing is written
        elif k is None:
            size, slots = self.case.page_size, self.batch.kv_slots
            self.pool.write(self.layer.index, slots // size, slots % size, self.k, self.v)
        else:
            backend.write_kv(self.layer, self.k, self.v, self.batch)
        forward: Callable[..., None] = backend.forward_mixed
        if self.batch.num_decode == 0:
            forward = backend.forward_extend
        elif self.batch.num_decode == self.batch.num_requests:
            forward = backend.forward_decode
        forward(self.q, k, v, self.layer, self.batch, out)
        return out

    def want(self) -> Tensor:
        """Return the right result in float64."""
        return attend_all(self.parts, self.layer, spans=self.case.spans)


def make_world(case: Case, device: torch.device, seed: int = 0, pool: Pool | None = None) -> World:
    """Build a batch on `device`, in a pool of its own or in one that is used again."""
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    size = case.page_size
    num_pages = sum(-(-(cached + new) // size) for cached, new in case.lengths)
    pool = pool or Pool(case, num_pages + 5, device)
    pool.poison()
    free, rows = list(range(1, pool.num_pages)), list(range(len(case.lengths) + 2))
    if case.is_shuffled:
        rng.shuffle(free)
        rng.shuffle(rows)
    widest = max(-(-(cached + new) // size) for cached, new in case.lengths)
    table = torch.zeros(len(rows), widest + 2, dtype=torch.int32)
    slots: list[int] = []
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    raw: list[tuple[Tensor, Tensor]] = []
    pages: list[int] = []
    for number, ((cached, new), row) in enumerate(zip(case.lengths, rows, strict=False)):
        same = case.common_pages(number)
        pages = pages[:same] + [free.pop(0) for _ in range(-(-(cached + new) // size) - same)]
        table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        q, k, v = (_random(case, cached + new, *shape, torch_rng, device) for shape in _shapes(case))
        v = k[..., : case.value_dim] if case.latent else v
        if case.cache_dtype is not None:
            raw.append((k[cached:], v[cached:]))
            k = rounded(k, DTYPES[case.cache_dtype])
            v = k[..., : case.value_dim] if case.latent else rounded(v, DTYPES[case.cache_dtype])
        if same:
            k[: same * size], v[: same * size] = (tensor[: same * size] for tensor in parts[-1][1:])
        _store(pool, case, pages, k[:cached], v[:cached])
        if case.gives_back:
            num_gone = case.reach.start(cached) // size
            table[row, :num_gone] = 0
            pool.fill(pages[:num_gone], float("nan"))
        slots += [pages[i // size] * size + i % size for i in range(cached, cached + new)]
        parts.append((q[cached:].contiguous(), k, v))
    sinks = torch.randn(case.num_qo_heads, generator=torch_rng).to(device) if case.sinks else None
    layer = AttentionLayer.of(case.specs()[NUM_LAYERS if case.reads_another else case.layer], sinks=sinks)
    new_k, new_v = (
        torch.cat([p[i][c:] for p, (c, _) in zip(parts, case.lengths, strict=True)]).contiguous() for i in (1, 2)
    )
    if raw:  # rounding is the backend's
        new_k, new_v = (torch.cat([each[i] for each in raw]).contiguous() for i in (0, 1))
    batch = _batch(case, slots, rows[: len(case.lengths)], table, device)
    return World(case, device, pool, layer, batch, torch.cat([p[0] for p in parts]), new_k, new_v, parts)


def _shapes(case: Case) -> tuple[tuple[int, int], ...]:
    heads = case.num_kv_heads
    return (case.num_qo_heads, case.head_dim), (heads, case.head_dim), (heads, case.value_dim)


def _random(case: Case, tokens: int, heads: int, dim: int, rng: torch.Generator, device: torch.device) -> Tensor:
    return torch.randn(tokens, heads, dim, generator=rng).to(device, case.dtype)


def _store(pool: Pool, case: Case, pages: Sequence[int], k: Tensor, v: Tensor) -> None:
    """Put a cached prefix into its pages, and stale finite numbers into the rest of them, in every layer."""
    if not pages or case.bidirectional:
        return
    pool.fill(list(pages), 5.0)
    places = torch.arange(k.shape[0], device=k.device)
    page = torch.tensor(pages, device=k.device)[places // case.page_size]
    pool.write(case.layer, page, places % case.page_size, k, v)


def _batch(case: Case, slots: list[int], rows: list[int], table: Tensor, device: torch.device) -> ForwardBatch:
    news = [new for _, new in case.lengths]
    starts = torch.tensor([0, *news]).cumsum(0)
    unset: Any = None
    return ForwardBatch(
        num_decode=case.num_decode,
        positions=torch.cat([torch.arange(c, c + n) for c, n in case.lengths]).to(device),
        kv_slots=torch.tensor(slots, dtype=torch.int64).to(device),
        rows=torch.tensor(rows, dtype=torch.int64).to(device),
        page_table=table.to(device),
        seq_lens=torch.tensor([c + n for c, n in case.lengths], dtype=torch.int32).to(device),
        q_starts=starts.int().to(device),
        seq_lens_cpu=[c + n for c, n in case.lengths],
        q_lens_cpu=news,
        attention=unset,
        last_tokens=(starts[1:] - 1).to(device),
        shares_prefixes=bool(case.common) and case.hint,
        spans=span_table(case.lengths, case.spans).to(device) if case.spans else None,
    )


def span_table(lengths: Sequence[tuple[int, int]], spans: Sequence[Spans]) -> Tensor:
    """Return `ForwardBatch.spans` of a batch."""
    found: list[Tensor] = []
    for number, (cached, new) in enumerate(lengths):
        own = torch.stack((torch.arange(cached, cached + new), torch.arange(cached + 1, cached + new + 1)), 1)
        for first, end in spans[number] if number < len(spans) else ():
            own[max(0, first - cached) : max(0, end - cached)] = torch.tensor((first, end))
        found.append(own)
    return torch.cat(found)


def make_backend(backend: type[AttentionBackend], world: World) -> AttentionBackend:
    """Make a backend for a world's pool."""
    with no_error("making the backend", f" ({world.case})"):
        return backend(world.case.config(), world.pool, world.device)


def verify(backend_class: type[AttentionBackend], case: Case, device: torch.device, what: str = "") -> None:
    """Run a case and compare it with float64; the message names the mistake where it is a usual one."""
    world = make_world(case, device)
    backend = make_backend(backend_class, world)
    with no_error(what or "it", f" ({case})"):
        got = world.run(backend)
    compare(world, got, backend_class, what)


def compare(world: World, got: Tensor, backend_class: type[AttentionBackend], what: str = "") -> None:
    """Compare one result with float64."""
    case, want = world.case, world.want()
    errors = error_by_token(got, want)
    worst = int(errors.argmax())
    if float(errors[worst]) <= TOLERANCE[case.dtype]:
        return
    prefix = f"{what}: " if what else ""
    where = _place(case, worst)
    if not bool(got[worst].isfinite().all()):
        fail(f"{prefix}{_why_not_finite(world, backend_class, worst)} at {where} ({case})")
    for mistake in mistakes(world.layer):
        wrong = error_by_token(got, attend_all(world.parts, world.layer, mistake, case.spans))
        if float(wrong.max()) <= TOLERANCE[case.dtype]:
            fail(f"{prefix}{mistake.sentence} ({case})")
    fail(f"{prefix}wrong result at {where}: relative error {float(errors[worst]):.2g} ({case})")


def _place(case: Case, token: int) -> str:
    for number, (cached, new) in enumerate(case.lengths):
        if token < new:
            kind = "decode" if number < case.num_decode else f"prefill token {token} of {new}"
            return f"request {number} ({kind}, {cached} cached)"
        token -= new
    return f"token {token}"


def _why_not_finite(world: World, backend_class: type[AttentionBackend], token: int) -> str:
    """Tell a row that is never written from one computed of memory that the batch does not own."""
    again = make_world(world.case, world.device)
    out = again.run(make_backend(backend_class, again), fill=UNWRITTEN)
    if bool((out[token] == UNWRITTEN).any()):
        return "NaN rows: a row of `out` is not written"
    calm = make_world(world.case, world.device)
    for memory in calm.pool.floats():
        memory.nan_to_num_(nan=0.0)
    if bool(calm.run(make_backend(backend_class, calm))[token].isfinite().all()):
        return "it reads a page that no request of the batch owns (they hold NaN)"
    return "the result is not finite"


def check_untouched(world: World, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Check that what a backend only reads is as it was."""
    for name, tensor in before.items():
        same = torch.equal(tensor.nan_to_num(nan=-1.0), after[name].nan_to_num(nan=-1.0))
        check(same, f"it changes {name}, which it must only read ({world.case})")


def readable(world: World) -> dict[str, Tensor]:
    """Return copies of all that a forward call only reads."""
    batch = world.batch
    named = {f"batch.{name}": getattr(batch, name) for name in ("positions", "kv_slots", "rows", "page_table")}
    named |= {f"batch.{name}": getattr(batch, name) for name in ("seq_lens", "q_starts")}
    named |= {"q": world.q, "k": world.k, "v": world.v, "the KV pool": world.pool.memory}
    return {name: tensor.double().clone() for name, tensor in named.items()}


def plain(case: Case) -> Case:
    """Return the case with rows and pages in their natural order."""
    return replace(case, is_shuffled=False)
