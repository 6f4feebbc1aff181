"""Reads `config.json` of Gemma 4: which layers have which heads, whose cache they read, what stands beside the MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.config import LayerSpec, ModelConfig, RoutedExperts
from dovetail.contracts.errors import ModelError
from dovetail.sdk.config import alternating, dense_config, layer_types, with_missing
from dovetail.sdk.layers.routing import Routing
from dovetail_models.experts import needed

FULL = "full_attention"
ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
"""What holds where `config.json` says nothing of rotation."""
USUAL: dict[str, Any] = {
    **{"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256, "sliding_window": 512},
    **{"hidden_size_per_layer_input": 256, "rope_parameters": ROPES},
}
"""What transformers takes for keys that are not there; the widths are those of every published model."""


def gemma4_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate a config.

    Raises:
        ModelError: A value that is not served, by name.
    """
    if hf.get("use_bidirectional_attention") == "all":
        raise ModelError("config.json: use_bidirectional_attention 'all' is not served for Gemma 4; possible: 'vision'")
    given = with_missing(hf, **USUAL, layer_types=alternating(needed(hf, "num_hidden_layers"), 6))
    types = layer_types(given) or []
    if types and types[-1] != FULL:  # as transformers has it
        types[-1] = FULL
    given = {**given, "layer_types": types}
    cap = given.get("final_logit_softcapping")
    config = dense_config(
        given,
        scale=1.0,
        bias=bool(given.get("attention_bias", False)),
        logit_cap=None if cap is None else float(cap),
        key_is_value=[bool(given.get("attention_k_eq_v")) and kind == FULL for kind in types],
        **_per_layer_inputs(given),
        **_experts(given),
    )
    layers = _sharing(_own_widths(config.layers, given, types), given, types)
    config = replace(config, layers=layers)
    _check_values(config)
    shared = [spec.index for spec in layers if spec.cache_layer is not None]
    twice = shared if given.get("use_double_wide_mlp") else []
    inner = [config.intermediate_size * (2 if index in twice else 1) for index in range(config.num_layers)]
    # Published files have keys and values of layers that read another's, too.
    numbers = "|".join(map(str, shared))
    unused = rf"model\.layers\.(?:{numbers})\.self_attn\.[kv]_(?:proj|norm)\..*" if shared else ""
    config = replace(config, not_loaded=unused, extra={**config.extra, "inner": inner, "unused": unused})
    return replace(config, num_params=_num_params(config), experts=_routed(config))


def _per_layer_inputs(hf: Mapping[str, Any]) -> dict[str, Any]:
    width, vocab = needed(hf, "hidden_size_per_layer_input"), needed(hf, "vocab_size")
    table = int(hf.get("vocab_size_per_layer_input") or vocab)
    if width and table < vocab:
        raise ModelError(
            f"config.json: vocab_size_per_layer_input is {table}, and there are {vocab} tokens (vocab_size)"
        )
    return {"per_layer_width": width, "per_layer_vocab": table}


def _experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    if not hf.get("enable_moe_block"):
        return {"routing": None, "expert_inner": 0}
    routing = Routing(num=needed(hf, "num_experts"), top_k=needed(hf, "top_k_experts"))
    if not 0 < routing.top_k <= routing.num:
        raise ModelError(f"config.json: top_k_experts is {routing.top_k}, and there are {routing.num} experts")
    return {"routing": routing, "expert_inner": needed(hf, "moe_intermediate_size")}


def _own_widths(specs: Sequence[LayerSpec], hf: Mapping[str, Any], types: Sequence[str]) -> list[LayerSpec]:
    """Give layers the heads that are theirs: `per_layer_config` says it, or the keys of full layers do."""
    heads = hf.get("num_global_key_value_heads") if hf.get("attention_k_eq_v") else None
    full = {"head_dim": hf.get("global_head_dim") or 512} | ({} if heads is None else {"num_key_value_heads": heads})
    by_layer = hf.get("per_layer_config")
    if by_layer is None:
        by_layer = {str(index): full for index, kind in enumerate(types) if kind == FULL}
    by_layer = {int(index): dict(values) for index, values in by_layer.items()}
    others = sorted({key for values in by_layer.values() for key in values} - {"head_dim", "num_key_value_heads"})
    if others:
        raise ModelError(f"config.json: per_layer_config has {others[0]!r}; possible: head_dim, num_key_value_heads")
    found = []
    for spec in specs:
        own = by_layer.get(spec.index, {})
        width, num = int(own.get("head_dim", spec.qk_dim)), int(own.get("num_key_value_heads", spec.num_kv_heads))
        found.append(replace(spec, qk_dim=width, v_dim=width, num_kv_heads=num))
    return found


def _sharing(specs: Sequence[LayerSpec], hf: Mapping[str, Any], types: Sequence[str]) -> tuple[LayerSpec, ...]:
    """Have the last `num_kv_shared_layers` layers read the last one of their type before them."""
    first = len(specs) - int(hf.get("num_kv_shared_layers") or 0)
    last = {kind: index for index, kind in enumerate(types[: max(first, 0)])}
    absent = sorted(set(types[first:] if first >= 0 else types) - set(last))
    if absent:
        raise ModelError(
            f"config.json: num_kv_shared_layers is {len(specs) - first} of {len(specs)} layers, and no layer of type "
            f"{absent[0]} is left whose keys they could read"
        )
    own, shared = specs[:first], specs[first:]
    return (*own, *(replace(spec, cache_layer=last[types[spec.index]]) for spec in shared))


def _check_values(config: ModelConfig) -> None:
    """Refuse values that would be keys in another order than the checkpoint's."""
    for spec, is_value in zip(config.layers, config.extra["key_is_value"], strict=True):
        rope = config.rope_of(spec.index)
        if is_value and rope.kind not in ("proportional", "none") and rope.partial != 1.0:
            raise ModelError(
                f"config.json: attention_k_eq_v with a rope of kind {rope.kind!r} that rotates a part of each head "
                f"({rope.partial}); possible: 'proportional', or the whole head"
            )


def _num_params(config: ModelConfig) -> int:
    extra, hidden, num = config.extra, config.hidden_size, config.num_layers
    total: int = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2) + hidden
    total += num * extra["per_layer_width"] * (extra["per_layer_vocab"] + 3 * hidden)
    for spec, inner, is_value in zip(config.layers, extra["inner"], extra["key_is_value"], strict=True):
        keys = 0 if spec.cache_layer is not None else spec.num_kv_heads * (1 if is_value else 2)
        total += hidden * ((2 * spec.num_qo_heads + keys) * spec.qk_dim + 3 * inner + 4)
    routing = extra["routing"]
    return total if routing is None else total + num * routing.num * hidden * (3 * extra["expert_inner"] + 1)


def _routed(config: ModelConfig) -> RoutedExperts | None:
    routing = config.extra["routing"]
    if routing is None:
        return None
    weights = config.num_layers * routing.num * config.extra["expert_inner"] * 3 * config.hidden_size
    return RoutedExperts(routing.num, routing.top_k, weights)
