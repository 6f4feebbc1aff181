"""Reading of `config.json` that models share, as transformers 4 and 5 write it. Does not import torch."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, cast

from dovetail.contracts.cache import Window
from dovetail.contracts.config import LayerSpec, ModelConfig, RopeConfig, dense_layers
from dovetail.contracts.errors import ModelError
from dovetail.sdk.rope_config import rope_config, ropes_by_layer, whole_heads

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number, by the dtypes that models compute in."""


def some(names: Sequence[str], most: int = 8) -> str:
    """Join the first few names, with a count of the rest."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def dense_config(
    hf: Mapping[str, Any],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    has_windows: bool | None = None,
    norm_eps: str = "rms_norm_eps",
    rotates_parts: bool = False,
    **extra: Any,
) -> ModelConfig:
    """Translate the config of a dense decoder (Llama and its relatives).

    Args:
        hf: Parsed `config.json`.
        scale: Factor of attention scores; None: one over the square root of the head dim.
        soft_cap: Of attention scores.
        sinks: Whether attention has sinks.
        has_windows: Whether `sliding_window` means anything; None: it does unless `use_sliding_window` says otherwise.
        norm_eps: The key of the norms' epsilon.
        rotates_parts: Whether `partial_rotary_factor` means anything: most architectures ignore it.
        extra: What the architecture's layers need to know beyond the common fields.

    Raises:
        ModelError: A needed key is missing or a value is not supported.
    """
    try:
        heads = int(hf["num_attention_heads"])
        hidden, num = int(hf["hidden_size"]), int(hf["num_hidden_layers"])
        kv_heads, dim = int(hf.get("num_key_value_heads") or heads), int(hf.get("head_dim") or hidden // heads)
        specs = dense_layers(num, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=scale)
        plain = [replace(spec, soft_cap=soft_cap, sinks=sinks) for spec in specs]
        windows = layer_windows(hf, has_windows)
        layer_ropes = ropes_by_layer(hf)
        config = ModelConfig(
            architecture=str(hf["architectures"][0]),
            vocab_size=int(hf["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(hf["intermediate_size"]),
            num_layers=num,
            layers=tuple(_reaching(spec, window) for spec, window in zip(plain, windows, strict=True)),
            norm_eps=float(hf.get(norm_eps, 1e-5 if norm_eps != "rms_norm_eps" else 1e-6)),
            hidden_act=either(hf, "hidden_act", "hidden_activation", "silu"),
            max_position_embeddings=int(hf["max_position_embeddings"]),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            rope=layer_ropes[0] if layer_ropes else rope_config(hf),
            dtype=checkpoint_dtype(hf),
            layer_ropes=layer_ropes,
            extra=extra,
        )
        return config if rotates_parts else whole_heads(config)
    except KeyError as missing:
        raise ModelError(f"config.json: the key {missing} is missing") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"config.json: a value is not of the type that it must be ({error})") from None


def without_rope(config: ModelConfig, layers: Sequence[bool]) -> ModelConfig:
    """Return the config with no rotation in the layers for which `layers` is true."""
    ropes = [config.rope_of(index) for index in range(config.num_layers)]
    plain = tuple(RopeConfig(kind="none") if is_plain else rope for is_plain, rope in zip(layers, ropes, strict=True))
    return replace(config, layer_ropes=plain)


def alternating(num: int, every: int) -> list[str]:
    """Types of layers of which each `every`-th sees everything and the others a window."""
    return ["full_attention" if (index + 1) % every == 0 else "sliding_attention" for index in range(num)]


def with_missing(hf: Mapping[str, Any], **values: Any) -> Mapping[str, Any]:
    """Return a config with values for keys that it does not have, or has as null; which keys are read is still told."""
    missing = {key: value for key, value in values.items() if hf.get(key) is None}
    return ChainMap(missing, cast("MutableMapping[str, Any]", hf)) if missing else hf


def _reaching(spec: LayerSpec, window: int | None) -> LayerSpec:
    return spec if window is None else replace(spec, reach=Window(window))


def either(hf: Mapping[str, Any], name: str, other: str, default: Any) -> Any:
    """Return a value that is spelled in one of two ways.

    Raises:
        ModelError: Both are there, and they differ.
    """
    given = {key: hf[key] for key in (name, other) if hf.get(key) is not None}
    if len(given) == 2 and given[name] != given[other]:
        raise ModelError(f"config.json: {name} is {given[name]!r} and {other} is {given[other]!r}; keep one of them")
    return next(iter(given.values()), default)


def layer_types(hf: Mapping[str, Any]) -> list[str] | None:
    """Return the type of each layer, None if the config does not say.

    Raises:
        ModelError: Their number is not the number of layers, or one is not attention.
    """
    types = hf.get("layer_types")
    if types is None:
        return None
    num = int(hf["num_hidden_layers"])
    if len(types) != num:
        raise ModelError(f"config.json: layer_types has {len(types)} entries for {num} layers")
    others = sorted(set(types) - {"full_attention", "sliding_attention"})
    if others:
        raise ModelError(f"config.json: layers of type {', '.join(others)} are not supported for this architecture")
    return list(types)


def layer_windows(hf: Mapping[str, Any], has_windows: bool | None = None) -> tuple[int | None, ...]:
    """Sliding window of each layer, None for full attention.

    If `has_windows` does not say whether there are any, `use_sliding_window` does, and without it `sliding_window`.
    Windowed are the layers that `layer_types` says, else those from `max_window_layers` on, else all.
    """
    num, types, window = int(hf["num_hidden_layers"]), layer_types(hf), hf.get("sliding_window")
    if has_windows is None:
        switch = hf.get("use_sliding_window")
        has_windows = window is not None if switch is None else bool(switch)
    if not has_windows:
        return (None,) * num
    if types is None:
        first = int(hf.get("max_window_layers") or 0)
        types = ["sliding_attention" if index >= first else "full_attention" for index in range(num)]
    if window is None and "sliding_attention" in types:
        raise ModelError("config.json: layers have a sliding window, and sliding_window says no size")
    return tuple(int(window) if kind == "sliding_attention" and window is not None else None for kind in types)


def checkpoint_dtype(hf: Mapping[str, Any]) -> str:
    """The checkpoint's dtype name from `dtype` or `torch_dtype`; float32 if neither is there, as in transformers."""
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ModelError(f"config.json: dtype {name!r} is not supported; possible: {', '.join(ITEM_BYTES)}")
    return name
