"""What is known of a model before anything is made, as data: its layers, their rotary embeddings, its sizes.

A model's plugin makes a `ModelConfig` of `config.json`; cache, engine and attention backends read it. Importing this
module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from dovetail.contracts.cache import (
    DTYPE_BYTES,
    FULL,
    SCALED_DTYPES,
    CacheGroup,
    CacheTensor,
    Chunk,
    Full,
    Reach,
    Recurrent,
    ScaledDtype,
    Window,
)
from dovetail.contracts.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding, normalised from both spellings of `config.json`.

    Attributes:
        theta: Base of the frequencies.
        kind: `default`, `linear`, `dynamic`, `yarn`, `longrope`, `llama3` or `proportional`; `none` rotates nothing.
        params: The kind's own numbers under the names of transformers (`factor`, `low_freq_factor`,
            `original_max_position_embeddings`, …).
        partial: Share of each head that is rotated, from its beginning on.
        interleaved: Pairs are neighbours (0 and 1), not halves apart (0 and D/2).
        short_factor: Of `longrope`, for contexts of at most `original_max_position_embeddings`.
        long_factor: Of `longrope`, for longer ones.
        sections: With images, a token has three positions: frame, row and column. These say how many of the frequencies
            turn by each, one after the other; empty: all by one position.
        mixes_sections: Frequencies take turns by position (frame, row, column, frame, …) as far as sections go.
    """

    theta: float = 10000.0
    kind: str = "default"
    params: Mapping[str, float] = field(default_factory=dict)
    partial: float = 1.0
    interleaved: bool = False
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    sections: tuple[int, ...] = ()
    mixes_sections: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionPart:
    """What the core needs to know of a model's vision tower.

    Attributes:
        embed_id: Token id whose embedding the tower's output replaces.
        patches_per_token: Patches that the tower merges into one embedding.
        width: Of the tower's hidden states.
        num_added: What its output has beside embeddings, added behind as many of the first layers.
        tensors: Regular expression of the whole names of its tensors in a checkpoint.
        span_tokens: Most tokens of an image side by side, where layers have `spans`: a step computes them together. 0:
            chunks may end within images.
        patch_numbers: Numbers that `encode` holds at its peak for each patch of an image, its output included; one of
            four bytes counts as two. 0: 16 times `width`. The memory plan counts them for the largest image.
        piece_numbers: Numbers that it holds beside them for each patch that is computed at once.
        piece_patches: Patches of an image that are computed at once.
    """

    embed_id: int
    patches_per_token: int
    width: int
    tensors: str
    num_added: int = 0
    span_tokens: int = 0
    patch_numbers: int = 0
    piece_numbers: int = 0
    piece_patches: int = 0


Mixer = Literal["kv", "latent"]
"""What an attention layer keeps of a token."""


Pool = Literal["first", "last", "mean"]
"""What of a prompt's final hidden states stands for it: that of its first or last token, or the mean over all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer that looks back, as data: what it caches and asks of a backend is known before anything is made.

    Attributes:
        index: Number of the layer.
        num_qo_heads: Hq.
        num_kv_heads: Hk.
        qk_dim: Width of a query or key head.
        v_dim: Width of a value head.
        scale: Factor of the scores.
        reach: How far it sees.
        soft_cap: Scores become `soft_cap * tanh(score / soft_cap)`; None: they stay.
        sinks: Whether each query head has one more, valueless key.
        causal: Whether a query sees nothing behind it. Else it sees its whole prompt, or with a `Window` of n the n - 1
            tokens on either side of it; such a layer keeps nothing, and prompts are computed whole.
        spans: Whether a token of an image sees all tokens of that image as well, also those behind it, and those that
            are farther than the reach; it keeps keys and values all the same, and no chunk ends within an image.
        mixer: What it keeps of a token: `kv`, a key and a value for each KV head; or `latent`, one row, which is the
            key of all heads and whose first `v_dim` numbers are the value (multi-head latent attention, absorbed).
        extra: Further tensors beside these, under the same page ids: keys of an indexer, scales.
        cache_dtype: What keys and values, or the row, are stored as, with a bfloat16 scale for each token and KV head
            in tensors `k_scale`, `v_scale`, `latent_scale`; see `dovetail.sdk.cache`. None: the model's dtype.
        cache_layer: The layer before it whose keys and values it reads; it writes none of its own.
        state: What it keeps of each request, where its reach is `Recurrent`; it has no heads then.
    """

    index: int
    num_qo_heads: int = 0
    num_kv_heads: int = 0
    qk_dim: int = 0
    v_dim: int = 0
    scale: float = 1.0
    reach: Reach = FULL
    soft_cap: float | None = None
    sinks: bool = False
    causal: bool = True
    spans: bool = False
    mixer: Mixer = "kv"
    extra: tuple[CacheTensor, ...] = ()
    cache_layer: int | None = None
    state: tuple[CacheTensor, ...] = ()
    cache_dtype: ScaledDtype | None = None

    def __post_init__(self) -> None:
        """Check that what it says of its cache fits together.

        Raises:
            ModelError: It does not.
        """
        if bool(self.state) != isinstance(self.reach, Recurrent):
            what = "is Recurrent and names no tensors" if not self.state else f"is {self.reach}, and it keeps a state"
            raise ModelError(f"layer {self.index}: its reach {what}; give `state` to recurrent layers only")
        if self.state and (self.extra or self.cache_layer is not None or self.mixer != "kv"):
            raise ModelError(f"layer {self.index}: it is recurrent; give its tensors in `state` and nothing else")
        if not self.causal and (self.state or self.extra or self.cache_layer is not None or self.mixer != "kv"):
            raise ModelError(
                f"layer {self.index}: it sees what is behind a token, so it keeps nothing and reads nothing"
            )
        if self.spans and (not self.causal or self.mixer != "kv" or isinstance(self.reach, (Recurrent, Chunk))):
            raise ModelError(
                f"layer {self.index}: images see both ways in causal layers that keep keys and values alone, and whose "
                "reach is Full or a Window; leave out `spans`"
            )
        if not self.causal and isinstance(self.reach, Chunk):
            raise ModelError(f"layer {self.index}: it sees what is behind a token; its reach can be Full or a Window")
        if self.mixer == "latent" and (self.num_kv_heads != 1 or self.v_dim > self.qk_dim):
            raise ModelError(
                f"layer {self.index}: a latent row is one key, and its value a part of it; num_kv_heads is "
                f"{self.num_kv_heads} (give 1), v_dim {self.v_dim} (at most qk_dim, {self.qk_dim})"
            )
        if self.extra and self.cache_layer is not None:
            raise ModelError(f"layer {self.index}: it reads the cache of layer {self.cache_layer} and has no `extra`")
        if self.cache_dtype is not None and (self.state or not self.causal or self.cache_dtype not in SCALED_DTYPES):
            raise ModelError(
                f"layer {self.index}: cache_dtype {self.cache_dtype!r}: possible: {', '.join(SCALED_DTYPES)}, of "
                "layers that cache keys and values"
            )
        known = [name for name, size in DTYPE_BYTES.items() if size > 1 or not self.state]  # states are computed with
        unknown = [tensor.dtype for tensor in self.cache_tensors if tensor.dtype not in (None, *known)]
        if unknown:
            raise ModelError(f"layer {self.index}: dtype {unknown[0]!r}: not one of {', '.join(known)}")
        names = [tensor.name for tensor in self.cache_tensors]
        if len(set(names)) < len(names) or any(tensor.name in ("k", "v", "latent") for tensor in self.extra):
            raise ModelError(f"layer {self.index}: two tensors of its cache have one name: {', '.join(names)}")

    def of_rank(self, num_ranks: int) -> LayerSpec:
        """Return the layer as one of several ranks has it: with its share of the heads, and of what says so.

        Where there are fewer key and value heads than ranks, several ranks keep the same one. A latent row is every
        rank's.

        Raises:
            ModelError: They cannot divide it evenly.
        """
        if num_ranks == 1:
            return self
        queries, left = divmod(self.num_qo_heads, num_ranks)
        if left:
            raise ModelError(self._not_among("query", num_ranks))
        heads = self.num_kv_heads
        if heads > 1 and heads % num_ranks and num_ranks % heads:
            raise ModelError(self._not_among("kv", num_ranks))
        try:
            extra, state = ([t.of_rank(num_ranks) for t in tensors] for tensors in (self.extra, self.state))
        except ModelError as error:
            raise ModelError(f"layer {self.index}: {error}") from None
        keys = max(1, heads // num_ranks) if heads else 0
        return replace(self, num_qo_heads=queries, num_kv_heads=keys, extra=tuple(extra), state=tuple(state))

    def _not_among(self, what: str, num_ranks: int) -> str:
        """Say what cannot be divided, and by how many ranks it could."""
        queries, kv = self.num_qo_heads, self.num_kv_heads
        shown = f"{queries} query heads" if what == "query" else f"{kv} key and value heads"
        return f"layer {self.index}: {shown} cannot be divided among {num_ranks} ranks; {ranks_for(queries, kv)}"

    @property
    def cache_tensors(self) -> tuple[CacheTensor, ...]:
        """What it caches: its state, a key and a value for each KV head and token, or a latent row for each token.

        Nothing, where it sees what is behind a token, or reads another one's cache.
        """
        if isinstance(self.reach, Recurrent):
            return self.state
        if self.cache_layer is not None or not self.causal:
            return ()
        dtype, heads = self.cache_dtype, self.num_kv_heads
        if self.mixer == "latent":
            own = [CacheTensor("latent", (self.qk_dim,), dtype, values=self.v_dim)]
            scales = [CacheTensor("latent_scale", (), "bfloat16")]
        else:
            own = [CacheTensor("k", (heads, self.qk_dim), dtype), CacheTensor("v", (heads, self.v_dim), dtype)]
            scales = [CacheTensor(f"{name}_scale", (heads,), "bfloat16") for name in "kv"]
        return *own, *(scales if dtype is not None else ()), *self.extra

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a query sees, itself included; None: no such bound."""
        return self.reach.size if isinstance(self.reach, Window) else None

    @property
    def chunk_size(self) -> int | None:
        """Length of the stretches, counted from the beginning, of which a query sees its own; None: no such bound."""
        return self.reach.size if isinstance(self.reach, Chunk) else None


def ranks_for(queries: int, kv: int) -> str:
    """Say how many ranks may divide so many heads of queries, and of keys and values."""
    fit = [n for n in range(1, queries + 1) if not queries % n and (kv <= 1 or not kv % n or not n % kv)]
    return f"--tensor-parallel-size may be {', '.join(map(str, fit))}"


def dense_layers(
    num_layers: int, *, num_qo_heads: int, num_kv_heads: int, head_dim: int, scale: float | None = None
) -> tuple[LayerSpec, ...]:
    """Specify layers of plain attention with grouped heads; without a scale, one over the root of the head's width."""
    plain = LayerSpec(
        index=0,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        qk_dim=head_dim,
        v_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
    )
    return tuple(replace(plain, index=index) for index in range(num_layers))


class RoutedExperts(NamedTuple):
    """Experts among which a token chooses: how many a layer has, how many it takes, their weights in all layers."""

    num: int
    top_k: int
    num_params: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the engine needs to know of an architecture; a plugin makes it from `config.json`.

    Lengths are in tokens. `dtype` is the checkpoint's dtype name (`bfloat16`, `float16`, `float32`).
    `layers` has a spec for each layer that looks back; `extra` holds whatever else the architecture's own layers need.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    hidden_act: str
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    dtype: str
    layer_ropes: tuple[RopeConfig, ...] = ()
    """Rotary embedding of each layer; empty: `rope` everywhere."""
    context_len: int | None = None
    """Longest request that will be served, set by the engine; None: `max_position_embeddings`."""
    num_params: int | None = None
    """How many weights there are, where the plugin knows; None: they are counted as a dense decoder's."""
    experts: RoutedExperts | None = None
    """Those of `num_params` of which a token needs some only; None: it needs all."""
    not_loaded: str = ""
    """Regular expression of whole names of tensors in a checkpoint that take no memory, because no layer wants them."""
    generates: bool = True
    """Whether the model has an output head; one without gives hidden states only, or scores of labels."""
    num_labels: int = 0
    """Scores that the model gives a text: it is a `Classifier`; 0: it is none."""
    pool: Pool = "last"
    """Which hidden state stands for a text where the checkpoint's files do not say, and which a classifier reads."""
    vision: VisionPart | None = None
    """Its vision tower; None: it reads text only, and `build` makes no tower."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text_only(self) -> ModelConfig:
        """The facts without the vision tower, whose tensors are not loaded."""
        if self.vision is None:
            return self
        unused = "|".join(filter(None, (self.not_loaded, self.vision.tensors)))
        causal = tuple(replace(spec, spans=False) for spec in self.layers)
        return replace(self, vision=None, layers=causal, not_loaded=unused)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """What is cached, by lifetime and shape: it follows from the layers."""
        return cache_groups(self.layers)

    def of_rank(self, num_ranks: int) -> ModelConfig:
        """Return the facts with the layers as one of several ranks has them.

        Raises:
            ModelError: They cannot divide them evenly.
        """
        return replace(self, layers=tuple(spec.of_rank(num_ranks) for spec in self.layers))

    def layer(self, index: int) -> LayerSpec:
        """Return the spec of a layer.

        Raises:
            ModelError: The layer has none.
        """
        spec = next((spec for spec in self.layers if spec.index == index), None)
        if spec is None:
            raise ModelError(f"{self.architecture}: layer {index} is not among the specs of its layers")
        return spec

    def rope_of(self, index: int) -> RopeConfig:
        """Return the rotary embedding of a layer."""
        return self.layer_ropes[index] if self.layer_ropes else self.rope


def cache_groups(specs: Sequence[LayerSpec]) -> tuple[CacheGroup, ...]:
    """Gather layers into groups: `Full` ones first, recurrent ones last, else in the order of their first layers.

    Recurrent ones do not stand alone: see `CacheGroup.layers`.

    Layers that keep nothing, because they see what is behind a token, are in none.
    """
    found: dict[tuple[Reach, tuple[CacheTensor, ...]], list[LayerSpec]] = {}
    by_index = {spec.index: spec for spec in specs}
    for spec in specs:
        if not spec.causal:
            continue
        owner = spec if spec.cache_layer is None else by_index[spec.cache_layer]
        found.setdefault((owner.reach, owner.cache_tensors), []).append(spec)
    groups: list[CacheGroup] = []
    for (reach, _), own in sorted(found.items(), key=lambda item: _order(item[0][0])):
        num = sum(group.reach == reach for group in groups)
        layers = {spec.index: spec.cache_tensors for spec in own}
        sources = {spec.index: spec.cache_layer for spec in own if spec.cache_layer is not None}
        groups.append(CacheGroup(f"{reach}-{num + 1}" if num else str(reach), reach, layers, sources))
    if groups and all(isinstance(group.reach, Recurrent) for group in groups):
        groups.insert(0, CacheGroup("tokens", FULL, {}))  # by its pages the prefix cache knows what a state has read
    return tuple(groups)


def _order(reach: Reach) -> int:
    return 0 if isinstance(reach, Full) else 2 if isinstance(reach, Recurrent) else 1
