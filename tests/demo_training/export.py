"""Writes a trained network as a checkpoint folder that `transformers` loads unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3Config

from demo_training.model import EPSILON, DemoModel, Shape

POSITIONS: Final = 2048


def config_of(shape: Shape, tokenizer: Tokenizer) -> Any:
    """Returns the `Qwen3Config` of a network of this shape."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        tie_word_embeddings=True,
        attention_bias=False,
        use_sliding_window=False,
        dtype="bfloat16",
        bos_token_id=tokenizer.token_to_id("<|endoftext|>"),
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )


def generation_of(tokenizer: Tokenizer) -> Any:
    """Returns the sampling that servers use where a client names none: careful, as the answers are facts."""
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    return GenerationConfig(
        do_sample=True,
        temperature=0.3,
        top_p=0.9,
        top_k=20,
        bos_token_id=end_of_text,
        eos_token_id=[tokenizer.token_to_id("<|im_end|>"), end_of_text],
        pad_token_id=end_of_text,
    )


def export(model: DemoModel, tokenizer: Tokenizer, out: Path) -> int:
    """Writes configuration and weights into `out`; returns the size of the weights in bytes."""
    config_of(model.shape, tokenizer).save_pretrained(out)
    generation_of(tokenizer).save_pretrained(out)
    path = out / "model.safetensors"
    save_file(model.checkpoint(), path, metadata={"format": "pt"})
    return path.stat().st_size


def restore(model: DemoModel, folder: Path) -> None:
    """Puts the weights of an exported network of the same shape into `model`, to train it further.

    Raises:
        ValueError: The names or shapes of the weights are not those of `model`.
    """
    saved = load_file(folder / "model.safetensors")
    wanted = model.checkpoint()
    if {name: value.shape for name, value in saved.items()} != {name: value.shape for name, value in wanted.items()}:
        raise ValueError(f"{folder} holds a network of another shape")
    with torch.no_grad():
        for name, value in saved.items():
            model.weights[name.replace(".", "/")].copy_(value)
