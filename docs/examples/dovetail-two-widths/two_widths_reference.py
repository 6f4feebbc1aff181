"""The same model in plain torch, one sequence at a time without a cache; and tiny random checkpoints of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["TwoWidthsForCausalLM"],
    "model_type": "two_widths",
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "eos_token_id": 198,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def width(config: dict[str, Any], layer: int) -> int:
    """Of a head of that layer."""
    is_wide = config["layer_types"][layer] == "full_attention"
    return int(config["global_head_dim"] if is_wide else config["head_dim"])


def num_own(config: dict[str, Any]) -> int:
    """How many layers have keys and values; those behind them read the last ones' of their kind."""
    return int(config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0))


def write_checkpoint(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a checkpoint with random weights."""
    config = {**CONFIG, **changes}
    config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(config["num_hidden_layers"]):
        at, dim = f"model.layers.{i}.", width(config, i)
        queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
        shapes |= {f"{at}self_attn.q_proj.weight": (queries, hidden), f"{at}self_attn.o_proj.weight": (hidden, queries)}
        if i < num_own(config):
            shapes |= {f"{at}self_attn.{name}_proj.weight": (keys, hidden) for name in "kv"}
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


@torch.inference_mode()
def logits(folder: Path, ids: Sequence[int]) -> Tensor:
    """Return the logits `[T, V]` of a sequence."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights, eps = load_file(folder / "model.safetensors"), config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][list(ids)]
    places = torch.arange(len(ids))
    last: dict[str, tuple[Tensor, Tensor]] = {}
    for i, kind in enumerate(config["layer_types"]):
        at = {name.removeprefix(f"model.layers.{i}."): w for name, w in weights.items() if f"layers.{i}." in name}
        normed = norm(x, at["input_layernorm.weight"], eps)
        project = "qkv" if i < num_own(config) else "q"
        q, *kv = (
            F.linear(normed, at[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, width(config, i)))
            for name in project
        )
        q = rotate(q, config["rope_theta"])
        if kv:
            last[kind] = rotate(kv[0], config["rope_theta"]), kv[1]
        k, v = last[kind]
        k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        hidden = places[None, :] > places[:, None]
        if kind == "sliding_attention":
            hidden |= places[None, :] <= places[:, None] - config["sliding_window"]
        heads = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
        x = x + F.linear(heads.flatten(1), at["self_attn.o_proj.weight"])
        normed = norm(x, at["post_attention_layernorm.weight"], eps)
        gate, up = (F.linear(normed, at[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, at["mlp.down_proj.weight"])
    return F.linear(norm(x, weights["model.norm.weight"], eps), weights["lm_head.weight"])
