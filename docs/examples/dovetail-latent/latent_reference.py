"""The same model in plain torch, one sequence at a time: keys and values are made; nothing is cached or absorbed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["LatentForCausalLM"],
    "model_type": "latent",
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "eos_token_id": 198,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def write_checkpoint(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a checkpoint with random weights."""
    config = {**CONFIG, **changes}
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, rank, v = config["num_attention_heads"], config["kv_lora_rank"], config["v_head_dim"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (heads * (nope + rope), hidden),
            f"{at}self_attn.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
            f"{at}self_attn.kv_a_layernorm.weight": (rank,),
            f"{at}self_attn.kv_b_proj.weight": (heads * (nope + v), rank),
            f"{at}self_attn.o_proj.weight": (hidden, heads * v),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
        }
    rng = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=rng) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotate heads `[T, H, D]`, halves apart, by their positions."""
    half = x.shape[-1] // 2
    freqs = theta ** (-torch.arange(half) / half)
    angles = (torch.arange(x.shape[0])[:, None] * freqs)[:, None]
    one, other = x[..., :half], x[..., half:]
    return torch.cat((one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), -1)


@torch.inference_mode()
def logits(folder: Path, ids: Sequence[int]) -> Tensor:
    """Return the logits `[T, V]` of a sequence."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights, eps, theta = load_file(folder / "model.safetensors"), config["rms_norm_eps"], config["rope_theta"]
    nope, rope, v_dim = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    x = weights["model.embed_tokens.weight"][list(ids)]
    places = torch.arange(len(ids))
    for i in range(config["num_hidden_layers"]):
        at = {name.removeprefix(f"model.layers.{i}."): w for name, w in weights.items() if f"layers.{i}." in name}
        normed = norm(x, at["input_layernorm.weight"], eps)
        q = F.linear(normed, at["self_attn.q_proj.weight"]).unflatten(-1, (-1, nope + rope))
        row, shared = F.linear(normed, at["self_attn.kv_a_proj_with_mqa.weight"]).split(
            [config["kv_lora_rank"], rope], -1
        )
        row = norm(row, at["self_attn.kv_a_layernorm.weight"], eps)
        kv = F.linear(row, at["self_attn.kv_b_proj.weight"]).unflatten(-1, (-1, nope + v_dim))
        keys, values = kv.split([nope, v_dim], -1)
        shared = rotate(shared[:, None], theta).expand(-1, keys.shape[1], -1)
        q = torch.cat((q[..., :nope], rotate(q[..., nope:], theta)), -1)
        scores = torch.einsum("qhd,khd->hqk", q, torch.cat((keys, shared), -1)) * (nope + rope) ** -0.5
        hidden = places[None, :] > places[:, None]
        heads = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)
        x = x + F.linear(heads.flatten(1), at["self_attn.o_proj.weight"])
        normed = norm(x, at["post_attention_layernorm.weight"], eps)
        gate, up = (F.linear(normed, at[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, at["mlp.down_proj.weight"])
    return F.linear(norm(x, weights["model.norm.weight"], eps), weights["lm_head.weight"])
