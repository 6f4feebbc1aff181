"""What `--kv-cache-dtype` makes of a model: layers that keep keys and values in 8 bits. Does not import torch."""

from __future__ import annotations

from dataclasses import replace

from dovetail.contracts.cache import Recurrent, ScaledDtype
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ConfigError
from dovetail.settings import EngineSettings

NAMES: dict[str, ScaledDtype] = {"fp8": "float8_e4m3fn", "int8": "int8"}


def with_cache_dtype(config: ModelConfig, settings: EngineSettings) -> ModelConfig:
    """Return the model as the settings have it cached; states of recurrent layers keep their dtype.

    Raises:
        ConfigError: The model caches no keys and values.
    """
    name = settings.kv_cache_dtype
    if name == "auto":
        return config
    paged = {spec.index for spec in config.layers if spec.causal and not isinstance(spec.reach, Recurrent)}
    if not paged:
        raise ConfigError(f"--kv-cache-dtype {name}: {config.architecture} caches no keys and values; leave it out")
    layers = [replace(spec, cache_dtype=NAMES[name]) if spec.index in paged else spec for spec in config.layers]
    return replace(config, layers=tuple(layers))
