"""Tiny random checkpoints of layers with states whose decays are weak, as those of trained models are.

With a fresh model's (`dt_bias` 1, A up to 16) a state forgets within a few tokens, and hides where a prompt was cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from families import make_checkpoint, save

KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")


def make_delta(folder: Path, kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """Write a checkpoint; steps are 0.001 to 0.1, and A 1 to 16. Returns transformers' model."""
    model = make_checkpoint(folder, kind, seed=seed, **changes)
    for name, param in model.named_parameters():
        if name.endswith(("dt_bias", "dt_proj.bias")):
            param.copy_((10 ** (torch.rand_like(param) * 2 - 3)).expm1().log())
        elif name.endswith("A_log"):
            param.copy_((1 + 15 * torch.rand_like(param)).log())
    save(model, folder)
    return model
