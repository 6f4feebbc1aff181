"""Which keys of `config.json` a plugin has read, and what the others mean: nothing, something that is missing, unknown.

A key that changes what a model computes and that its plugin does not read would give wrong tokens without a word; it is
refused. One that nobody knows may be such a key; it is named in a warning. Does not import torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import Any

from dovetail.contracts.cache import Chunk, Window
from dovetail.contracts.config import LayerSpec, ModelConfig, RopeConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.tables import table
from dovetail.runtime.checkpoint.claims import OTHER_PARTS

logger = logging.getLogger(__name__)


# Numbers of a model's config that nothing can be computed with: refused by name, before a weight is read.
#
# JSON has no ranges, and Python's reader takes `NaN` and `Infinity`. With a rotary base of zero or a negative window a
# server starts, and every token is wrong. How large a number may be, `claims.py` says. Does not import torch.

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
    if low > high:
        yield f"low_freq_factor of the rotary embedding is {low}; it must be high_freq_factor, {high}, or less"
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
        yield from (_at_least_one(f"a size of its state {t.name!r}", min(t.shape, default=1)) for t in spec.state)
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


def _listed(name: str) -> frozenset[str]:
    """Return a list of `config_keys.json`, beside this file, which has its keys by what they are of."""
    return frozenset(chain.from_iterable(_DATA[name].values()))


_DATA: dict[str, dict[str, list[str]]] = table(__file__)
HARMLESS, CHANGING = _listed("harmless"), _listed("changing")
"""Keys that change nothing of what a text model computes, and keys that do."""
CHANGING_PREFIXES = ("linear_", "mamba_", "ssm_", "index_", "indexer_", "moe_", "altup_", "laurel_", "hc_", "kda_")

TEXT_PART = "text_config"
"""Where models of several kinds of input keep the text model's keys: they are judged as if they stood alone."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "attention_value_scale"), (1.0,)),
    **dict.fromkeys(("key_multiplier", "partial_rotary_factor", "rotary_pct", "embedding_multiplier"), (1.0,)),
    **dict.fromkeys(("residual_multiplier", "logits_scaling", "logit_scale", "output_multiplier"), (1.0,)),
    **dict.fromkeys(("lm_head_multiplier", "scale_emb"), (1.0,)),
    "is_causal": (True,),
    "position_embedding_type": ("rope", "rotary"),
}
"""Values of changing keys that leave everything as it is; so do null, zero, false and empty ones."""

MEANS_SOMETHING_IF_FALSE = frozenset({"is_causal"})


class TrackedConfig(Mapping[str, Any]):
    """A parsed `config.json` that remembers which keys were read; asking whether one is there is no reading."""

    def __init__(self, values: Mapping[str, Any], path: str = "", trail: list[tuple[str, Any]] | None = None) -> None:
        """Wrap it, and what stands in it under `rope_parameters` and the like, whose `path` that is.

        `trail` is shared by all of one file, and holds what was read last.
        """
        self._path, self._trail = path, [] if trail is None else trail
        self._values = {
            key: TrackedConfig(value, f"{path}{key}.", self._trail) if isinstance(value, Mapping) else value
            for key, value in values.items()
        }
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        value = self._values[key]
        self._trail[:] = [(f"{self._path}{key}", value)]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __repr__(self) -> str:
        return repr(self._values)

    @property
    def last_read(self) -> str:
        """The key that was read last and is there, with its value; "" before any."""
        return next((f"{key} = {_short(value)}" for key, value in self._trail), "")

    def read(self) -> dict[str, Any]:
        """Return what was read of the outer keys."""
        return {key: value for key, value in self._values.items() if key in self._read}

    def unread(self) -> dict[str, Any]:
        """Return what was not read, inner keys by their path (`rope_parameters.factor`)."""
        found: dict[str, Any] = {}
        for key, value in self._values.items():
            if key not in self._read:
                found[key] = value
            elif isinstance(value, TrackedConfig):
                found |= {f"{key}.{inner}": left for inner, left in value.unread().items()}
        return found


def translate(
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig],
    hf: Mapping[str, Any],
    served: Collection[str] = (),
    *,
    warns: bool = True,
) -> ModelConfig:
    """Let a plugin translate `config.json`, and look at what neither it nor anybody else has read.

    Args:
        config_from_hf: The plugin's.
        hf: The parsed file, whose claims have been checked: `ModelFolder.check` does it.
        served: Keys that another plugin reads.
        warns: Whether keys that nobody knows are logged: once for a start.

    Raises:
        ModelError: It cannot serve the config, or leaves out what changes the arithmetic; a number is none, or out of
            its range.
    """
    tracked = TrackedConfig(hf)
    config = made_by(config_from_hf, tracked)
    check_switches(tracked.read())
    refused, unknown = divide({key: value for key, value in tracked.unread().items() if key not in served})
    if refused:
        named = ", ".join(f"{key} = {_short(value)}" for key, value in refused.items())
        raise ModelError(
            f"config.json: {named}: this changes what the model computes, and the plugin for "
            f"{config.architecture} does not serve it"
        )
    if unknown and warns:
        logger.warning(
            "config.json: unknown keys %s; if it changes what the model computes, the output is wrong.",
            ", ".join(f"{key} = {_short(value)}" for key, value in unknown.items()),
        )
    return config


def made_by(config_from_hf: Callable[[Mapping[str, Any]], ModelConfig], hf: TrackedConfig) -> ModelConfig:
    """Return what a plugin makes of a config whose claims were checked, with its numbers checked.

    Raises:
        ModelError: It cannot read a value, or a number is none, or out of its range.
    """
    try:
        config = config_from_hf(hf)
        check_numbers(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A file's value far more often than a plugin's fault: the key is what the user can look at.
        name = getattr(config_from_hf, "__qualname__", "config_from_hf")
        raise ModelError(
            f"config.json: {name} raised {type(error).__name__}: {' '.join(str(error).split())}; the key read last is "
            f"{hf.last_read or 'none'}; correct the file, or report this to the plugin's author"
        ) from error
    return config


def divide(unread: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide keys that were not read into those that change the arithmetic and those that nobody knows."""
    refused, unknown = {}, {}
    for path, value in unread.items():
        part, _, key = path.rpartition(".")
        if key in HARMLESS or value is None or part in OTHER_PARTS:
            continue
        if part not in ("", TEXT_PART) or (key not in CHANGING and not key.startswith(CHANGING_PREFIXES)):
            unknown[path] = value
        elif not _is_neutral(key, value):
            refused[path] = value
    return refused, unknown


def _is_neutral(key: str, value: Any) -> bool:
    return value in NEUTRAL.get(key, ()) or (not value and key not in MEANS_SOMETHING_IF_FALSE)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
