"""Numbers of a model's config that nothing can be computed with: refused by name, before a weight is read.

JSON has no ranges, and Python's reader takes `NaN` and `Infinity`. With a rotary base of zero or a negative window a
server starts, and every token is wrong. How large a number may be, `claims.py` says. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from dovetail.contracts.cache import Chunk, Window
from dovetail.contracts.config import LayerSpec, ModelConfig, RopeConfig
from dovetail.contracts.errors import ModelError

SPELLED_OUT = ("true", "false", "yes", "no")
POSITIVE_OF_ROPES = ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow")


def check_switches(read: Mapping[str, Any]) -> None:
    """Check that what was read is no `"false"` in quotes, which counts as true.

    Raises:
        ModelError: One is.
    """
    for key, value in read.items():
        if isinstance(value, str) and value.strip().lower() in SPELLED_OUT:
            raise ModelError(f"config.json: {key} = {value!r} is text; write true or false, without quotes")


def check_numbers(config: ModelConfig) -> None:
    """Check what a plugin has made of `config.json`.

    Raises:
        ModelError: A number is out of its range, or is none; the first one is named.
    """
    wrong = next((what for what in chain(_sizes(config), _ropes(config), _layers(config)) if what), None)
    if wrong is not None:
        raise ModelError(f"config.json: {wrong}")


def _sizes(config: ModelConfig) -> Iterator[str]:
    if not isinstance(config.hidden_act, str):
        yield f"hidden_act is {config.hidden_act!r}; it must be a name"
    for name in ("vocab_size", "hidden_size", "max_position_embeddings"):
        yield _at_least_one(name, getattr(config, name))
    if not 0 <= config.norm_eps < math.inf:
        yield f"the norms' epsilon is {config.norm_eps}; it must be 0 or more"


def _ropes(config: ModelConfig) -> Iterator[str]:
    for rope in {id(rope): rope for rope in (config.rope, *config.layer_ropes)}.values():  # layers share a few
        yield from _rope(rope)


def _rope(rope: RopeConfig) -> Iterator[str]:
    if rope.kind == "none":
        return
    if not 1 < rope.theta < math.inf:
        yield f"the base of the rotary embedding (rope_theta) is {rope.theta}; it must be above 1"
    if not 0 < rope.partial <= 1:
        yield f"partial_rotary_factor is {rope.partial}; it must be above 0, and 1 at most"
    for name, value in rope.params.items():
        if not math.isfinite(value) or (name in POSITIVE_OF_ROPES and value <= 0):
            yield f"{name} of the rotary embedding is {value}; it must be above 0"
    low, high = rope.params.get("low_freq_factor", 0.0), rope.params.get("high_freq_factor", math.inf)
    if low >= high:
        yield f"low_freq_factor of the rotary embedding is {low}; it must be below high_freq_factor, {high}"
    for name in ("short_factor", "long_factor"):
        if any(not 0 < value < math.inf for value in getattr(rope, name)):
            yield f"a {name} of the rotary embedding is not above 0"


def _layers(config: ModelConfig) -> Iterator[str]:
    yield _at_least_one("num_hidden_layers", config.num_layers)
    for spec in config.layers:
        yield from (f"layer {spec.index}: {what}" for what in _layer(spec) if what)


def _layer(spec: LayerSpec) -> Iterator[str]:
    if isinstance(spec.reach, Window | Chunk) and spec.reach.size < 1:
        what = "sliding window" if isinstance(spec.reach, Window) else "chunk"
        yield f"its {what} is {spec.reach.size}; it must be 1 token at least, and null means none"
    if spec.state:
        return
    for name in ("num_qo_heads", "num_kv_heads", "qk_dim", "v_dim"):
        yield _at_least_one(name, getattr(spec, name))
    if spec.num_kv_heads > 0 and spec.num_qo_heads % spec.num_kv_heads:
        yield f"{spec.num_qo_heads} query heads cannot share {spec.num_kv_heads} key and value heads evenly"
    if isinstance(spec.scale, complex) or not 0 < spec.scale < math.inf:  # complex: the root of a negative number
        yield f"its scores are multiplied by {spec.scale}; that must be above 0"
    if spec.soft_cap is not None and not 0 < spec.soft_cap < math.inf:
        yield f"its scores are capped at {spec.soft_cap}; that must be above 0, and null means no cap"


def _at_least_one(name: str, value: float) -> str:
    return "" if 1 <= value < math.inf else f"{name} is {value}; it must be 1 at least"
