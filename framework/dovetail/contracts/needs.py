"""What a model asks of an attention backend and what one provides: pure data, compared before anything is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from dovetail.contracts.cache import Chunk, Recurrent, Window

if TYPE_CHECKING:
    from dovetail.contracts.config import LayerSpec, Mixer, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the attention layers of a model ask of a backend; a factor of the scores (`scale`) every backend has.

    Attributes:
        head_dims: Widths of query, key and value heads.
        mixers: What layers keep of a token.
        unequal_dims: A layer has keys and values of different widths.
        sliding_window: A layer sees only the last tokens.
        chunked: A layer sees only what is before a token in its own stretch of tokens.
        soft_cap: A layer caps its scores.
        sinks: A layer has sinks.
        bidirectional: A layer sees what is behind a token.
        spans: A layer lets tokens of an image see all of the image.
        cache_dtypes: In what layers keep keys, values and rows, where not in the model's dtype.
    """

    head_dims: frozenset[int]
    mixers: frozenset[Mixer] = frozenset({"kv"})
    unequal_dims: bool = False
    sliding_window: bool = False
    chunked: bool = False
    soft_cap: bool = False
    sinks: bool = False
    bidirectional: bool = False
    spans: bool = False
    cache_dtypes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCaps:
    """What a backend provides; compared with what a model needs before a weight is read. `None` for a set: any.

    `devices` are types of torch's; `*` among them: any that torch computes on.

    Every backend multiplies scores by the layer's `scale`. `head_dims` are widths of keys and values for each head;
    a backend with latent rows supports any width. `cache_dtypes` are those with scales that it reads and writes
    (`LayerSpec.cache_dtype`) beside the model's dtype, in all layouts that it serves. `batch_invariant`: where
    `AttentionBackend.batch_invariant` is set, what a token gets has the same bits whatever the step has beside it.
    `spans`: it reads `ForwardBatch.spans` in layers that have `AttentionLayer.spans`.
    """

    devices: frozenset[str]
    dtypes: frozenset[str]
    head_dims: frozenset[int] | None = None
    page_sizes: frozenset[int] | None = None
    graph: Literal["none", "decode", "mixed"] = "none"
    batch_invariant: bool = False
    sliding_window: bool = False
    chunked: bool = False
    sinks: bool = False
    soft_cap: bool = False
    bidirectional: bool = False
    spans: bool = False
    mixers: frozenset[Mixer] = frozenset({"kv"})
    unequal_dims: bool = False
    needs_cpu_lens: bool = False
    cache_dtypes: frozenset[str] = frozenset()


MIXERS: dict[Mixer, str] = {"kv": "keys and values for each head", "latent": "latent rows (MLA)"}
FLAGS = {
    "unequal_dims": "keys and values of different widths",
    "sliding_window": "a sliding window",
    "chunked": "attention within chunks",
    "soft_cap": "a soft cap on attention scores",
    "sinks": "attention sinks",
    "bidirectional": "attention in both directions",
    "spans": "attention in both directions within images",
}
"""Needs that a backend's caps of the same name serve."""


def needs_of(config: ModelConfig) -> Needs:
    """Derive a model's needs from its layers."""
    specs = [spec for spec in config.layers if not isinstance(spec.reach, Recurrent)]
    return Needs(
        head_dims=frozenset(dim for spec in specs if spec.mixer == "kv" for dim in (spec.qk_dim, spec.v_dim)),
        mixers=frozenset(spec.mixer for spec in specs),
        unequal_dims=any(spec.mixer == "kv" and spec.qk_dim != spec.v_dim for spec in specs),
        sliding_window=any(isinstance(spec.reach, Window) for spec in specs),
        chunked=any(isinstance(spec.reach, Chunk) for spec in specs),
        soft_cap=any(spec.soft_cap is not None for spec in specs),
        sinks=any(spec.sinks for spec in specs),
        bidirectional=any(not spec.causal for spec in specs),
        spans=any(spec.spans for spec in specs),
        cache_dtypes=frozenset(spec.cache_dtype for spec in specs if spec.cache_dtype is not None),
    )


def unmet(config: ModelConfig, caps: AttentionCaps) -> str | None:
    """Say in one line what a model needs and a backend does not provide, or None."""
    needs, lacking = needs_of(config), []
    if caps.head_dims is not None and not needs.head_dims <= caps.head_dims:
        lacking.append(f"head dim {_list(needs.head_dims - caps.head_dims)} (possible: {_list(caps.head_dims)})")
    lacking += [what for mixer, what in MIXERS.items() if mixer in needs.mixers - caps.mixers]
    lacking += [what for name, what in FLAGS.items() if getattr(needs, name) and not getattr(caps, name)]
    lacking += [f"a cache in {name} with scales" for name in sorted(needs.cache_dtypes - caps.cache_dtypes)]
    return f"{config.architecture} needs {', '.join(lacking)}, which it does not provide" if lacking else None


def unserved(config: ModelConfig) -> str | None:
    """Say in one line what a model's layers need and nothing provides, whatever the backend; or None."""
    specs, name = config.layers, config.architecture
    wrong = [spec.index for spec in specs if not 0 <= spec.index < config.num_layers]
    if not specs or wrong or len({spec.index for spec in specs}) < len(specs):
        what = f"layers {sorted({spec.index for spec in specs})}" if specs else "no layer"
        return f"{name}: its layer specs are for {what}; give one for each of its {config.num_layers} at most"
    if (reason := _misread(specs)) is not None:
        return f"{name}: {reason}"
    if 0 < sum(not spec.causal for spec in specs) < len(specs):
        return f"{name}: some of its layers attend to later tokens and some do not; all must, or none"
    return None


def _misread(specs: Sequence[LayerSpec]) -> str | None:
    """Say which layer reads a cache that is not as it reads it, or None."""
    by_index = {spec.index: spec for spec in specs}
    for spec in specs:
        if spec.cache_layer is None:
            continue
        source = by_index.get(spec.cache_layer)
        if source is None or source.cache_layer is not None or source.state or source.index >= spec.index:
            return f"layer {spec.index} reads the cache of layer {spec.cache_layer}, which is none before it with one"
        if _layout(spec) != _layout(source):
            return f"layer {spec.index} reads the cache of layer {source.index}, and has another reach, heads or widths"
    return None


def _layout(spec: LayerSpec) -> tuple[object, ...]:
    return spec.reach, spec.mixer, spec.num_kv_heads, spec.qk_dim, spec.v_dim, spec.cache_dtype


def _list(dims: frozenset[int]) -> str:
    """Name widths; more than three at equal distances as a range."""
    widths = sorted(dims)
    steps = {b - a for a, b in pairwise(widths)}
    if len(widths) > 3 and len(steps) == 1:
        return f"{widths[0]} to {widths[-1]} in steps of {steps.pop()}"
    return ", ".join(map(str, widths))
