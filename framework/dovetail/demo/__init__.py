"""The bundled demo models: small checkpoints that a fresh machine can serve without a hub.

Both are ordinary checkpoint folders; `tests/demo_training` of the sources holds the scripts that made them. Importing
this module costs nothing: no tensor library is loaded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

PREFIX: Final = "demo:"
MODEL_DIR: Final[Path] = Path(__file__).parent / "model"
"""A Qwen3 that chats: `config.json`, `tokenizer.json`, the chat template and `model.safetensors`."""
DIGITS_DIR: Final[Path] = Path(__file__).parent / "digits"
"""A Qwen3-VL that reads numbers in images; it has `preprocessor_config.json`, too."""
BUNDLED: Final[Mapping[str, Path]] = {f"{PREFIX}chat": MODEL_DIR, f"{PREFIX}digits": DIGITS_DIR}
"""Folders by the names that stand for a model's path."""

__all__ = ["BUNDLED", "DIGITS_DIR", "MODEL_DIR", "PREFIX"]
