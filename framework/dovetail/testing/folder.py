"""Stands for a model folder where none is read."""

from __future__ import annotations

from pathlib import Path

from dovetail.runtime.checkpoint.folder import ModelFolder


def unread_model(architecture: str = "Qwen3ForCausalLM") -> ModelFolder:
    """Return a folder of which nothing but the model's class is known."""
    return ModelFolder(path=Path(), architecture=architecture, config={}, headers=None, files=None, notes=())
