"""The same model in plain torch, one sequence at a time: a memory that is written token by token, and nothing kept."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["RecurrentForCausalLM"],
    "model_type": "recurrent",
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "full_attn_idxs": [1],
    "conv_L_cache": 3,
    "chunk_size": 8,
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
    queries, keys = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        if i in config["full_attn_idxs"]:
            shapes |= {f"{at}self_attn.q_proj.weight": (queries, hidden)}
            shapes |= {f"{at}self_attn.{name}_proj.weight": (keys, hidden) for name in "kv"}
            shapes |= {f"{at}self_attn.o_proj.weight": (hidden, queries)}
        else:
            shapes |= {f"{at}mixer.in_proj.weight": (3 * hidden, hidden), f"{at}mixer.out_proj.weight": (hidden,) * 2}
            shapes |= {f"{at}mixer.taps.weight": (config["conv_L_cache"], hidden)}
        shapes |= {f"{at}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{at}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
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


def attend(x: Tensor, at: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """Causal attention with grouped heads."""
    dim = config["head_dim"]
    q, k, v = (F.linear(x, at[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, dim)) for name in "qkv")
    q, k = rotate(q, config["rope_theta"]), rotate(k, config["rope_theta"])
    k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(len(x), len(x)).triu(1).bool()
    heads = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
    return F.linear(heads.flatten(1), at["self_attn.o_proj.weight"])


def remember(x: Tensor, at: dict[str, Tensor]) -> Tensor:
    """Convolution and memory, token by token."""
    value, decay, gate = F.linear(x, at["mixer.in_proj.weight"]).chunk(3, -1)
    taps = at["mixer.taps.weight"]
    padded = F.pad(value, (0, 0, len(taps) - 1, 0))
    memory, found = torch.zeros(value.shape[1]), []
    for t in range(len(x)):
        keep = torch.sigmoid(decay[t])
        memory = keep * memory + (1 - keep) * (padded[t : t + len(taps)] * taps).sum(0)
        found.append(memory)
    return F.linear(torch.stack(found) * F.silu(gate), at["mixer.out_proj.weight"])


@torch.inference_mode()
def logits(folder: Path, ids: Sequence[int]) -> Tensor:
    """Return the logits `[T, V]` of a sequence."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights, eps = load_file(folder / "model.safetensors"), config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][list(ids)]
    for i in range(config["num_hidden_layers"]):
        at = {name.removeprefix(f"model.layers.{i}."): w for name, w in weights.items() if f"layers.{i}." in name}
        normed = norm(x, at["input_layernorm.weight"], eps)
        x = x + (attend(normed, at, config) if i in config["full_attn_idxs"] else remember(normed, at))
        normed = norm(x, at["post_attention_layernorm.weight"], eps)
        gate, up = (F.linear(normed, at[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, at["mlp.down_proj.weight"])
    return F.linear(norm(x, weights["model.norm.weight"], eps), weights["lm_head.weight"])
