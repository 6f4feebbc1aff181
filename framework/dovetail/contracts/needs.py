"""What a model asks of an attention backend, and whether one has it: pure data, compared before anything is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.contracts.attention import AttentionCaps
    from dovetail.contracts.model import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the attention layers of a model ask of a backend; a factor of the scores (`scale`) every backend has.

    Attributes:
        head_dims: Widths of query, key and value heads.
        sliding_window: A layer sees only the last tokens.
        soft_cap: A layer caps its scores.
        sinks: A layer has sinks.
        bidirectional: A layer sees what is behind a token.
    """

    head_dims: frozenset[int]
    sliding_window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    bidirectional: bool = False


FLAGS = {
    "sliding_window": "a sliding window",
    "soft_cap": "a soft cap on attention scores",
    "sinks": "attention sinks",
    "bidirectional": "attention in both directions",
}
"""Needs that a backend's caps of the same name serve."""


def needs_of(config: ModelConfig) -> Needs:
    """Derive a model's needs from its layers."""
    specs = config.layer_specs
    return Needs(
        head_dims=frozenset(dim for spec in specs for dim in (spec.qk_dim, spec.v_dim)),
        sliding_window=any(spec.sliding_window is not None for spec in specs),
        soft_cap=any(spec.soft_cap is not None for spec in specs),
        sinks=any(spec.sinks for spec in specs),
        bidirectional=any(not spec.causal for spec in specs),
    )


def unmet(config: ModelConfig, caps: AttentionCaps) -> str | None:
    """Say in one line what a model needs and a backend does not provide, or None."""
    needs, lacking = needs_of(config), []
    if caps.head_dims is not None and not needs.head_dims <= caps.head_dims:
        lacking.append(f"head dim {_list(needs.head_dims - caps.head_dims)} (possible: {_list(caps.head_dims)})")
    lacking += [what for name, what in FLAGS.items() if getattr(needs, name) and not getattr(caps, name)]
    return f"{config.architecture} needs {', '.join(lacking)}, which it does not provide" if lacking else None


def one_shape(config: ModelConfig) -> str | None:
    """Say in one line why one KV cache of one shape cannot serve all layers, or None."""
    want = (config.num_kv_heads, config.head_dim, config.head_dim)
    found = {(spec.num_kv_heads, spec.qk_dim, spec.v_dim) for spec in config.layer_specs}
    if found == {want} and len(config.layer_specs) == config.num_layers:
        return None
    shapes = "; ".join(f"{heads} KV heads, keys {k}, values {v} wide" for heads, k, v in sorted(found))
    return (
        f"{config.architecture} has {len(config.layer_specs)} attention layers of these shapes: {shapes}; the KV cache "
        f"holds {config.num_layers} of {want[0]} heads {want[1]} wide"
    )


def _list(dims: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(dims)))
