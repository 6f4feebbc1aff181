"""Tiny checkpoints with random weights, written by transformers itself: real files, no hub."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 198,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
"""Small, off powers of two where that is possible, and wide weights, so that greedy tokens vary."""


def make_model(folder: Path, architecture: str, *, seed: int = 0, shard_size: str = "5GB", **changes: Any) -> Path:
    """Write a random checkpoint of `architecture` with `SIZES` and `changes` applied to its config.

    Args:
        folder: Where to write; made if it does not exist.
        architecture: A class name of transformers, such as `Qwen3ForCausalLM`.
        seed: Of the weights.
        shard_size: Largest shard, as transformers takes it; a small one makes an index.
        changes: Fields of the config.

    Returns:
        `folder`.
    """
    model_class = getattr(transformers, architecture)
    usual = {"head_dim": 16, **SIZES}
    if "num_key_value_heads" not in (known := model_class.config_class().to_dict()):
        usual = {name: value for name, value in usual.items() if name in known}  # an encoder's has other names
    # Some configs write into the dicts that they are given, such as `rope_parameters`, which callers share.
    config = model_class.config_class(**deepcopy({**usual, **changes}))
    torch.manual_seed(seed)
    model = model_class(config)
    for name, param in model.named_parameters():
        if param.dim() == 1:  # norms and biases start as ones and zeros, which would hide a mix-up
            param.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder
