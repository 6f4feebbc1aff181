"""Finds the device and the attention backend that serve a model, and says why the others do not."""

from __future__ import annotations

import logging

import torch

from dovetail.contracts.attention import AttentionBackend
from dovetail.contracts.model import ModelConfig
from dovetail.errors import ConfigError, PluginError
from dovetail.plugins import LoadedPlugins
from dovetail.settings import EngineSettings

logger = logging.getLogger(__name__)


def find_device(name: str) -> torch.device:
    """Return the device of `--device`.

    Raises:
        ConfigError: It is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def choose_backend(
    plugins: LoadedPlugins, config: ModelConfig, device: torch.device, dtype: torch.dtype, settings: EngineSettings
) -> tuple[type[AttentionBackend], str]:
    """Return the first planned backend that can serve the model here, and its name.

    Raises:
        PluginError: The one asked for cannot, or no candidate of `auto` can; every reason is given.
    """
    reasons: list[str] = []
    for planned, backend in plugins.candidates("attention_backend"):
        reason = backend.why_not(config, device, dtype, settings.page_size)
        if reason is None:
            if not planned.requested:
                refused = f" ({'; '.join(reasons)})" if reasons else ""
                logger.info("Attention backend not given; using %s.%s", planned.name, refused)
            return backend, planned.name
        reasons.append(f"{planned.name}: {reason}")
    raise PluginError(
        f"--attention-backend {settings.attention_backend!r} cannot serve this model: {'; '.join(reasons)}"
    )
