"""What a model folder's `config.json` says of the model, without its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.contracts.config import ModelConfig
    from dovetail.runtime.checkpoint.folder import ModelFolder

DENSE = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Architectures that the usual keys of `config.json` describe whole: their facts are read without torch."""


def config_of(model: ModelFolder, impl: str = "auto") -> ModelConfig:
    """Read the model's facts: from the usual keys of `config.json` if they suffice, else from the plugin, with torch.

    Args:
        model: What its folder says.
        impl: As `--model-impl`.

    Raises:
        ConfigError: No plugin serves the architecture, or the config cannot be served.
    """
    from dovetail.plugins import Registry
    from dovetail.plugins.loader import import_planned
    from dovetail.plugins.plan import as_planned, model_plugin
    from dovetail.runtime.hf_config import CONFIG_KEYS

    registry = Registry.scan()
    record = registry.resolve("model", model_plugin(registry, model.architecture, impl))
    if record.builtin and record.name in DENSE:
        return model.plain_config()
    return model.model_config(import_planned(as_planned(record)).config_from_hf, served=CONFIG_KEYS)
