"""The bundled demo model: a small Qwen3 checkpoint that a fresh machine can serve without a hub.

`MODEL_DIR` is an ordinary checkpoint folder; `tests/demo_training` of the sources holds the script that made it.
Importing this module costs nothing: no tensor library is loaded.
"""

from pathlib import Path
from typing import Final

MODEL_DIR: Final[Path] = Path(__file__).parent / "model"
"""The folder with `config.json`, `tokenizer.json`, the chat template and `model.safetensors`."""

__all__ = ["MODEL_DIR"]
