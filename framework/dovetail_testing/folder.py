"""Stands for a model folder where none is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.runtime.checkpoint.folder import ModelFolder


def unread_model(architecture: str = "Qwen3ForCausalLM", config: Mapping[str, Any] | None = None) -> ModelFolder:
    """Return a folder without files.

    Args:
        architecture: The model's class.
        config: What its `config.json` would say beside that.
    """
    folder = ModelFolder(Path(), weights=False)
    vars(folder).update(config={**(config or {}), "architectures": [architecture]})
    return folder
