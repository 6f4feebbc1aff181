"""Tiny random checkpoints of every encoder with a plugin, by `model_type`, as transformers writes them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from families import perturb

SIZES: dict[str, Any] = {
    **{"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"max_position_embeddings": 130, "pad_token_id": 1, "initializer_range": 0.2},
}
MODERN = {"local_attention": 16, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
ENCODERS: dict[str, dict[str, Any]] = {"bert": {}, "roberta": {}, "xlm-roberta": {}, "mpnet": {}, "modernbert": MODERN}
"""Changes of `SIZES`."""


def make_encoder(folder: Path, kind: str, task: str = "", *, seed: int = 0, **changes: Any) -> Any:
    """Write a random checkpoint and return transformers' model.

    Args:
        folder: Where to.
        kind: Its `model_type`.
        task: Empty for the base, `MaskedLM` or `SequenceClassification`.
        seed: Of its weights.
        changes: Of its configuration.
    """
    import transformers

    torch.manual_seed(seed)
    config = transformers.CONFIG_MAPPING[kind](**deepcopy({**SIZES, **ENCODERS.get(kind, {}), **changes}))
    auto = getattr(transformers, f"AutoModelFor{task}" if task else "AutoModel")
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    perturb(model)
    model.save_pretrained(folder)
    return model.requires_grad_(False)
