"""How device memory is divided. Does not import torch, so that a plan can be made without it."""

from __future__ import annotations

from dovetail.contracts.model import ModelConfig
from dovetail.errors import ConfigError
from dovetail.settings import EngineSettings


def chunk_size(settings: EngineSettings, device: str, weight_bytes: int) -> int:
    """Return `--chunked-prefill-size`, or its default for a device type: most prompt tokens of a step, -1 for no bound.

    On CPU the default shrinks as the model grows, so that a step takes about as long.

    Raises:
        ConfigError: 0 was given.
    """
    chunk = settings.chunked_prefill_size
    if chunk is None:
        return 8192 if device == "cuda" else max(256, min(4096, (1 << 39) // max(weight_bytes, 1)))
    if chunk == 0:
        raise ConfigError("--chunked-prefill-size 0: give a number of tokens, or -1 for prompts that are never cut")
    return chunk


def context_len(settings: EngineSettings, config: ModelConfig) -> int:
    """Return the context asked for, at most the model's own: beyond it positions are untrained.

    Raises:
        ConfigError: More was asked for.
    """
    most = config.max_position_embeddings
    if settings.context_length is not None and settings.context_length > most:
        raise ConfigError(
            f"--context-length {settings.context_length}: the model has {most} positions (max_position_embeddings); "
            f"give at most {most}, or extend the model by rope scaling in its config.json"
        )
    return settings.context_length or most
