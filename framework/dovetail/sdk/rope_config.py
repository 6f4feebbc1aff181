"""Reads the rotary embedding from `config.json`, as transformers 4 and 5 write it. Does not import torch.

transformers 5 has `rope_parameters`, one mapping or one for each type of layer; transformers 4 `rope_scaling` beside
`rope_theta`, `partial_rotary_factor` and `original_max_position_embeddings`, which hold for all layers unless a mapping
says otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.contracts.config import ModelConfig, RopeConfig
from dovetail.contracts.errors import ModelError

logger = logging.getLogger(__name__)

NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
"""Numbers that each kind cannot do without."""

TAKEN: dict[str, tuple[str, ...]] = {
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
    "proportional": ("factor",),
}
"""Numbers that it takes if they are there."""

ALIASES = {"su": "longrope", "mrope": "default"}
"""Of `mrope` the three positions are one in text, and its sections mean nothing."""
HAS_ORIGINAL = ("yarn", "longrope", "llama3")


def rope_config(hf: Mapping[str, Any]) -> RopeConfig:
    """Return the rotary embedding of all layers.

    Raises:
        ModelError: An unknown kind, a number that is missing, or another embedding for each type of layer.
    """
    given = _given(hf)
    if _is_nested(given):
        raise ModelError("config.json: rope parameters per layer type, and layer_types does not say which is which")
    return _one(hf, given)


def ropes_by_layer(hf: Mapping[str, Any]) -> tuple[RopeConfig, ...]:
    """Return the rotary embedding of each layer if they differ by type; empty if one holds for all.

    Raises:
        ModelError: As `rope_config`, or a type of layer has none.
    """
    given, types = _given(hf), hf.get("layer_types")
    if not _is_nested(given) or types is None:
        return ()
    absent = sorted(kind for kind in set(types) if not isinstance(given.get(kind), Mapping))
    if absent:
        raise ModelError(f"config.json: rope_parameters says nothing of layers of type {', '.join(absent)}")
    by_type = {kind: _one(hf, given[kind]) for kind in dict.fromkeys(types)}
    return tuple(by_type[kind] for kind in types)


def whole_heads(config: ModelConfig) -> ModelConfig:
    """Return the config of an architecture that rotates whole heads: its reference ignores `partial_rotary_factor`.

    Raises:
        ModelError: The factor stands beside a kind of rope with which the reference cannot ignore it, and fails.
    """
    odd = [rope for rope in (config.rope, *config.layer_ropes) if _is_partial(rope)]
    if not odd:
        return config
    given = f"config.json: partial_rotary_factor {odd[0].partial:g}"
    if other := [rope.kind for rope in odd if rope.kind != "default"]:
        raise ModelError(
            f"{given} with rope kind {other[0]!r}: {config.architecture} rotates whole heads; possible: 1, or the rope "
            "kind 'default', with which it is ignored"
        )
    logger.warning("%s is ignored: %s rotates whole heads, as in transformers.", given, config.architecture)
    rope, *others = (replace(one, partial=1.0) if one in odd else one for one in (config.rope, *config.layer_ropes))
    return replace(config, rope=rope, layer_ropes=tuple(others))


def _is_partial(rope: RopeConfig) -> bool:
    return 0.0 < rope.partial < 1.0 and rope.kind not in ("proportional", "none")


def interleaved(config: ModelConfig) -> ModelConfig:
    """Return the config with pairs of neighbours rotated in all layers."""
    ropes = tuple(replace(rope, interleaved=True) for rope in config.layer_ropes)
    return replace(config, rope=replace(config.rope, interleaved=True), layer_ropes=ropes)


def with_window_ropes(config: ModelConfig, *, theta: float) -> ModelConfig:
    """Return the config with windowed layers rotated plainly by `theta`, if `rope_parameters` does not say by type."""
    if config.layer_ropes:
        return config
    plain = RopeConfig(theta=theta)
    ropes = tuple(config.rope if spec.sliding_window is None else plain for spec in config.layers)
    return replace(config, layer_ropes=ropes)


def _given(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is said beside theta; where both spellings are there, the older one holds, as in transformers."""
    old, new = hf.get("rope_scaling"), hf.get("rope_parameters")
    given = old or new or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: rope parameters are a mapping, not {given!r}")
    return given


def _is_nested(given: Mapping[str, Any]) -> bool:
    return any(key.endswith("_attention") for key in given)


def _one(hf: Mapping[str, Any], given: Mapping[str, Any]) -> RopeConfig:
    kind, older = given.get("rope_type"), given.get("type")  # files of transformers 4 have both
    kind = str(kind or older or "default")
    kind = ALIASES.get(kind, kind)
    if kind not in NEEDED:
        raise ModelError(f"config.json: rope kind {kind!r} is not supported; possible: {', '.join(NEEDED)}")
    given.get("mrope_section"), given.get("mrope_interleaved")
    missing = [key for key in NEEDED[kind] if given.get(key) is None]
    if missing:
        raise ModelError(f"config.json: rope kind {kind!r} needs the parameter {missing[0]!r}")
    keys = (*NEEDED[kind], *TAKEN.get(kind, ()))
    params = {key: float(given[key]) for key in keys if given.get(key) is not None}
    if kind in HAS_ORIGINAL:
        # Beside the mapping it wins over the one inside, as in transformers (Phi-3 writes it there).
        outer, inner = (where.get("original_max_position_embeddings") for where in (hf, given))
        params["original_max_position_embeddings"] = float(outer or inner or hf["max_position_embeddings"])
    short, long = ((), ()) if kind != "longrope" else (_numbers(given, key) for key in ("short_factor", "long_factor"))
    if kind == "longrope" and not (short and long):
        raise ModelError("config.json: rope kind 'longrope' needs the parameters 'short_factor' and 'long_factor'")
    theta = [where.get("rope_theta") for where in (given, hf)]
    partial = [where.get("partial_rotary_factor") for where in (given, hf)]
    return RopeConfig(
        theta=_first(theta, 10000.0),
        kind=kind,
        params=params,
        partial=_first(partial, 1.0),
        short_factor=short,
        long_factor=long,
    )


def _numbers(given: Mapping[str, Any], key: str) -> tuple[float, ...]:
    return tuple(map(float, given.get(key) or ()))


def _first(values: list[float | None], default: float) -> float:
    return float(next((value for value in values if value is not None), default))
