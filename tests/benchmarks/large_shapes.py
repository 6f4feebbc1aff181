"""The published shapes of models for four and eight GPUs, as their `config.json` says them; no weights.

Of each what decides how ranks divide it: sizes, experts, the way its matrices are packed. Qwen3-235B-A22B, DeepSeek-V3
and R1 are published in fp8 with a scale for each block of 128 by 128, GLM-4.5 and 4.5-Air in fp8 with one for each row
(compressed-tensors), Kimi-K2-Thinking with experts in int4, a scale for 32 inputs of a row, gpt-oss-120b with experts
in mxfp4, and all else in bfloat16, as Llama-3.3-70B is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BLOCKS: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
ROWS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head", r"re:.*mlp\.gate$"],
}  # fmt: skip
WORDS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True,
                "dynamic": False, "actorder": None,
            },
            "input_activations": None,
        }
    },
    "ignore": [
        "lm_head", r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        r"re:.*mlp\.gate$",
    ],
}  # fmt: skip
COMMON: dict[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "norm_topk_prob": True, "num_experts_per_tok": 8,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_hidden_layers": 61,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_shared_experts": 1, "moe_layer_freq": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rms_norm_eps": 1e-6, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True,
    "vocab_size": 151552, "max_position_embeddings": 131072, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1,
    "quantization_config": ROWS,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-235b-a22b": COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 262144, "rope_theta": 5e6,
        "rms_norm_eps": 1e-6, "quantization_config": BLOCKS,
    },
    "glm-4.5": COMMON | GLM | {
        "hidden_size": 5120, "num_hidden_layers": 92, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True, "routed_scaling_factor": 2.5,
    },
    "glm-4.5-air": COMMON | GLM | {
        "hidden_size": 4096, "num_hidden_layers": 46, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_routed_experts": 128, "first_k_dense_replace": 1, "use_qk_norm": False, "routed_scaling_factor": 1.0,
    },
    "deepseek-v3": COMMON | LATENT | {
        "model_type": "deepseek_v3", "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "vocab_size": 129280,
        "max_position_embeddings": 163840, "rope_theta": 1e4, "num_nextn_predict_layers": 1,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": BLOCKS,
    },
    "kimi-k2": COMMON | LATENT | {
        "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "first_k_dense_replace": 1,
        "vocab_size": 163840, "max_position_embeddings": 262144, "rope_theta": 5e4, "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "type": "yarn", "factor": 64, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": WORDS,
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18, "vocab_size": 201088,
        "max_position_embeddings": 131072, "rope_theta": 150000, "rms_norm_eps": 1e-5, "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
    },
    "llama-3.3-70b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
    },
}  # fmt: skip
NUM_RANKS = {
    "qwen3-235b-a22b": 4, "glm-4.5": 4, "glm-4.5-air": 4, "deepseek-v3": 8, "kimi-k2": 8, "gpt-oss-120b": 4,
    "llama-3.3-70b": 4,
}  # fmt: skip
"""GPUs of 141 GB that each is meant for, or was measured on."""


def write_shape(folder: Path, name: str, **changes: Any) -> Path:
    """Write a folder with the `config.json` of a shape, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name] | changes))
    return folder


def write_checkpoint(folder: Path, name: str, device: str, **changes: Any) -> Path:
    """Write random weights of a shape, packed as it is published, and return the folder.

    Args:
        folder: Is made.
        name: The shape: in bfloat16, fp8 in blocks or rows, or mxfp4.
        device: Where they are drawn and packed.
        changes: Keys of its `config.json`.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = SHAPES[name] | changes
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "architectures")}
    with torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**plain), dtype=torch.bfloat16)
        for at, param in model.named_parameters():
            if param.dim() == 1:  # norms and biases start as ones and zeros, which would hide a mix-up
                param.data.normal_(1.0 if "norm" in at else 0.0, 0.1)
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        made: dict[str, Any] = {}
        for at, tensor in load_file(file).items():
            made |= packed(at, tensor.to(device), config.get("quantization_config", {}))
        save_file({at: tensor.cpu().contiguous() for at, tensor in made.items()}, file, metadata={"format": "pt"})
    return write_shape(folder, name, **changes)


def packed(name: str, weight: Any, method: dict[str, Any]) -> dict[str, Any]:
    """Return what stands for a tensor in a checkpoint of a method: blocks, rows or mxfp4; else itself."""
    import torch

    from dovetail.sdk.quantization.forms import Mxfp4, Scaled

    if method.get("quant_method") == "mxfp4" and ".experts." in name and weight.dim() == 3:
        made = [Mxfp4().quantise(one.T) for one in weight]  # one by one: each takes 64 bytes a number meanwhile
        blocks, scales = (torch.stack([one[key] for one in made]) for key in ("weight_packed", "weight_scale"))
        return {f"{name}_blocks": blocks.unflatten(-1, (-1, 16)), f"{name}_scales": scales}
    is_matrix = weight.dim() == 2 and ".layers." in name and not name.endswith("mlp.gate.weight")
    if not is_matrix or method.get("quant_method") not in ("fp8", "compressed-tensors"):
        return {name: weight}
    if method["quant_method"] == "compressed-tensors":
        rows = Scaled(torch.float8_e4m3fn, None).quantise(weight)
        return {name: rows["weight"], f"{name}_scale": rows["weight_scale"]}
    tiles = weight.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = tiles.abs().amax((1, 3), keepdim=True) / 448
    return {name: (tiles / scale).view(weight.shape).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale[:, 0, :, 0]}
