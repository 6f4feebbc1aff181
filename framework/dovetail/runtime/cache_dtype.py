"""What `--kv-cache-dtype` and `--state-dtype` make of a model's cache, as data. Does not import torch."""

from __future__ import annotations

from dataclasses import replace

from dovetail.base.settings import EngineSettings
from dovetail.contracts.cache import CacheTensor, Recurrent, ScaledDtype
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ConfigError

NAMES: dict[str, ScaledDtype] = {"fp8": "float8_e4m3fn", "int8": "int8"}


def with_cache_dtype(config: ModelConfig, settings: EngineSettings) -> ModelConfig:
    """Return the model as the settings have it cached.

    Raises:
        ConfigError: The model does not cache what a setting names, or not in another dtype.
    """
    return _with_states(_with_keys_and_values(config, settings), settings)


def _with_keys_and_values(config: ModelConfig, settings: EngineSettings) -> ModelConfig:
    name = settings.kv_cache_dtype
    if name == "auto":
        return config
    paged = {spec.index for spec in config.layers if spec.causal and not isinstance(spec.reach, Recurrent)}
    if not paged:
        raise ConfigError(f"--kv-cache-dtype {name}: {config.architecture} caches no keys and values; leave it out")
    layers = [replace(spec, cache_dtype=NAMES[name]) if spec.index in paged else spec for spec in config.layers]
    return replace(config, layers=tuple(layers))


def _with_states(config: ModelConfig, settings: EngineSettings) -> ModelConfig:
    name = settings.state_dtype
    if name == "float32":
        return config
    own = {tensor.dtypes for spec in config.layers for tensor in spec.state if tensor.dtype == "float32"}
    if not own:
        raise ConfigError(f"--state-dtype {name}: {config.architecture} keeps no states in float32; leave it out")
    if any(name not in dtypes for dtypes in own):
        raise ConfigError(f"--state-dtype {name}: {config.architecture} keeps its states in float32 only; leave it out")
    layers = [replace(spec, state=tuple(_in_dtype(tensor, name) for tensor in spec.state)) for spec in config.layers]
    return replace(config, layers=tuple(layers))


def _in_dtype(tensor: CacheTensor, name: str) -> CacheTensor:
    return replace(tensor, dtype=name) if tensor.dtype == "float32" else tensor
