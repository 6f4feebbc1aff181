"""Tiny random checkpoints of every decoder that transformers can build and save, by `model_type`."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
MOE: dict[str, Any] = {"moe_intermediate_size": 40, "num_experts": 5, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    **{"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"num_key_value_heads": 4, "head_dim": 8},
}
DEEPSEEK: dict[str, Any] = {
    **LATENT,
    **{"moe_intermediate_size": 40, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3},
    **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3},
}
DELTA: dict[str, Any] = {
    **{"num_hidden_layers": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "full_attention_interval": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4},
    "initializer_range": 0.08,  # with wider weights, transformers' own decode differs from its prompts too much
}
MAMBA: dict[str, Any] = {
    **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16}
}
FEW = {"num_local_experts": 5, "num_experts_per_tok": 2}
CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
INDEXER = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 256}

PLAIN = """
llama qwen2 qwen3 ministral3 glm4 gemma phi phi3 seed_oss olmo2 granite ernie4_5 hunyuan_v1_dense apertus starcoder2
stablelm nemotron gpt_neox internlm3 granite_swa
"""
DECODERS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in PLAIN.split()},
    "mistral": {"sliding_window": 24},
    "ministral": {"num_hidden_layers": 4, "sliding_window": 24},
    "mixtral": FEW,
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 48, "norm_topk_prob": False},
    "qwen3_moe": {**MOE, "norm_topk_prob": True},
    "qwen3_next": {**MOE, "shared_expert_intermediate_size": 48, **DELTA},
    "olmo_hybrid": {key: value for key, value in DELTA.items() if key != "full_attention_interval"},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**MOE, "shared_expert_intermediate_size": 48, **DELTA},
    "deepseek_v2": {**DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": {**DEEPSEEK, **INDEXER},
    "deepseek_v4": {},
    "gpt_oss": {**FEW, "sliding_window": 24},
    "glm4_moe": {**MOE, "n_routed_experts": 5, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1}
    | {"topk_group": 1},
    "glm4_moe_lite": DEEPSEEK,
    "glm_moe_dsa": {**DEEPSEEK, **INDEXER},
    "minimax_m2": {**FEW, "rotary_dim": 8},
    "llama4_text": {**FEW, "intermediate_size_mlp": 96, "num_hidden_layers": 4, "attention_chunk_size": 24}
    | {"no_rope_layer_interval": 4, "num_experts_per_tok": 1},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 24},
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 24, "query_pre_attn_scalar": 24},
    "gemma4_text": {"num_hidden_layers": 6, "sliding_window": 24, "hidden_size_per_layer_input": 8}
    | {"vocab_size_per_layer_input": 300, "global_head_dim": 32},
    "phimoe": FEW,
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 24},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "granitemoe": FEW,
    "granitemoehybrid": {**FEW, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"], **MAMBA}
    | {"initializer_range": 0.08},  # with wider weights, its unscaled scores differ by 4e-4 from chunk to chunk
    "nemotron_h": {
        **{"num_hidden_layers": 4, "layers_block_type": ["mamba", "moe", "attention", "moe"], "mamba_num_heads": 4},
        **{"mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 16, "chunk_size": 16, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32},
    },
    "lfm2": CONV,
    "lfm2_moe": {**CONV, **MOE, "num_dense_layers": 1},
    "smollm3": {"num_hidden_layers": 4},
    "exaone4": {"num_hidden_layers": 4, "sliding_window": 24},
    "ernie4_5_moe": {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 40, "moe_num_shared_experts": 1}
    | {"moe_layer_start_index": 1},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 24},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "kimi_linear": {key: value for key, value in DEEPSEEK.items() if key != "n_routed_experts"}
    | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 8}
    | {"linear_num_heads": 4, "linear_head_dim": 16, "n_group": 1, "topk_group": 1},
    "bailing_hybrid": {key: value for key, value in DEEPSEEK.items() if key not in ("n_routed_experts", "q_lora_rank")}
    | {"num_hidden_layers": 4, "layer_group_size": 2, "head_dim": 16, "num_local_experts": 8}
    | {"n_group": 1, "topk_group": 1, "initializer_range": 0.08},
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
    | {"mamba_d_state": 8, "mamba_dt_rank": 4},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "mamba_d_head": 16},
    "mimo_v2_flash": {**MOE, "n_routed_experts": 5, "sliding_window": 24},
    "longcat_flash": {**LATENT, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "num_layers": 2}
    | {"n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 1},
    "hy_v3": MOE,
    "minimax_m3_vl_text": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "solar_open": {**DEEPSEEK, "n_group": 1, "topk_group": 1},
    "minicpm3": DEEPSEEK,
    "zamba2": {
        **{"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 16},
        **{"mamba_headdim": 32, "n_mamba_heads": 4, "chunk_size": 16, "num_key_value_heads": 4, "num_mem_blocks": 1},
        **{"attention_head_dim": 32, "mamba_ngroups": 1},
    },
    "roberta": {"is_decoder": True, "pad_token_id": 1, "max_position_embeddings": 300},
    "xlm-roberta-xl": {"is_decoder": True, "pad_token_id": 1, "max_position_embeddings": 300},
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 96},
}
"""Changes of `SIZES` by `model_type`."""


FAMILIES = """
mistral mixtral qwen2_moe qwen3_moe olmoe minimax_m2 glm4_moe cohere2 deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5
ernie4_5_moe exaone4 gemma2 gemma3_text gemma4_text glm4 glm4_moe_lite gpt_oss granite granitemoe hunyuan_v1_dense
ministral3 olmo2 olmo3 phi3 seed_oss smollm3 stablelm starcoder2 llama4_text qwen3_next qwen3_5_text qwen3_5_moe_text
granitemoehybrid bamba falcon_h1 nemotron_h lfm2 lfm2_moe
olmo_hybrid mamba2 mamba falcon_mamba jamba kimi_linear bailing_hybrid
"""
OWN = FAMILIES.split()
"""Families with a plugin of their own, besides Llama, Qwen2 and Qwen3."""


def config_of(kind: str, **changes: Any) -> Any:
    """Make transformers' config of a tiny model."""
    from transformers import CONFIG_MAPPING

    # A copy: some configs write into the dicts that they are given.
    return CONFIG_MAPPING[kind](**deepcopy({**SIZES, **DECODERS.get(kind, {}), **changes}))


def make_checkpoint(folder: Path, kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """Write a random checkpoint; vectors are perturbed, as fresh ones hide a missing `1 + w`. Returns the model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    # Eager: some have no other attention.
    model = AutoModelForCausalLM.from_config(config_of(kind, **changes), attn_implementation="eager").float().eval()
    perturb(model)
    save(model, folder)
    return model.requires_grad_(False)


def save(model: Any, folder: Path) -> None:
    """Write a model's files as the hub has them: transformers cuts OLMo Hybrid's convolution into equal thirds."""
    model.save_pretrained(folder)
    if model.config.model_type != "olmo_hybrid":
        return
    tensors = load_file(folder / "model.safetensors")
    places = [name.removesuffix("q_conv1d.weight") for name in tensors if name.endswith("q_conv1d.weight")]
    keys = model.config.linear_num_key_heads * model.config.linear_key_head_dim
    for names in ([f"{place}{part}_conv1d.weight" for part in "qkv"] for place in places):
        whole = torch.cat([tensors[name] for name in names])
        parts = torch.split(whole, [keys, keys, len(whole) - 2 * keys])
        tensors |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "image_size": 28, "patch_size": 14}
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}}
QUARTER = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    }
    | {"partial_rotary_factor": 0.25}
}
HALF = {**SECTIONS["rope_parameters"], "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}
GLM4V = {**MOE, "n_routed_experts": 5, "first_k_dense_replace": 1, "rope_parameters": HALF}
TURNS = ["sliding_attention", "full_attention"] * 3
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {**DECODERS["gemma3_text"]},
        {"vision_config": {**VISION, **LAYERS}, "mm_tokens_per_image": 4, "boi_token_index": 6, "eoi_token_index": 7},
    ),
    "gemma4": (
        {**DECODERS["gemma4_text"], "num_kv_shared_layers": 2, "layer_types": TURNS, "use_double_wide_mlp": True}
        | {"pad_token_id": 0},
        {"vision_config": {**VISION, **LAYERS, "head_dim": 16, "num_key_value_heads": 2}, "audio_config": None},
    ),
    "glm4v": (
        {"rope_parameters": HALF},
        {"vision_config": {**QWEN_VISION, "out_hidden_size": 64, "image_size": 56}, "image_token_id": 6},
    ),
    "glm4v_moe": (GLM4V, {"vision_config": {**QWEN_VISION, "out_hidden_size": 64, "image_size": 56}}),
    "internvl": (
        {"model_type": "qwen2"},
        {"vision_config": {**VISION, **LAYERS, "norm_type": "rms_norm", "use_qk_norm": True}, "image_token_id": 6}
        | {"tie_word_embeddings": False},
    ),
    "mistral3": ({"model_type": "mistral"}, {"vision_config": {**VISION, **LAYERS, "head_dim": 16}}),
    "llama4": (
        DECODERS["llama4_text"],
        {
            "vision_config": {**VISION, **LAYERS, "intermediate_size": 128, "projector_input_dim": 48}
            | {"projector_output_dim": 48, "vision_output_dim": 48}
        }
        | {"boi_token_index": 6, "eoi_token_index": 7, "image_token_index": 5},
    ),
    "llava": ({"model_type": "llama"}, {"vision_config": {**VISION, **LAYERS, "model_type": "clip_vision_model"}}),
    "qwen2_vl": (SECTIONS, {"vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}}),
    "qwen2_5_vl": (SECTIONS, {"vision_config": {**QWEN_VISION, "out_hidden_size": 64}}),
    "qwen3_vl": (
        SECTIONS,
        {"vision_config": {**QWEN_VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}},
    ),
    "qwen3_vl_moe": (
        {**SECTIONS, **MOE, "norm_topk_prob": True},
        {"vision_config": {**QWEN_VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}},
    ),
    "qwen3_5": ({**DELTA, **QUARTER}, {"vision_config": {**QWEN_VISION, "out_hidden_size": 64}}),
    "lfm2_vl": (
        {"model_type": "lfm2", **CONV},
        {"vision_config": {**VISION, **LAYERS, "num_patches": 4}, "projector_hidden_size": 48, "image_token_id": 6},
    ),
    "qwen3_5_moe": (
        {**DECODERS["qwen3_5_moe_text"], **QUARTER},
        {"vision_config": {**QWEN_VISION, "out_hidden_size": 64}},
    ),
}
"""Models that take images: their text part's changes of `SIZES`, and the other keys."""


def make_seeing(folder: Path, kind: str, **changes: Any) -> Any:
    """Write a random checkpoint of a model that takes images, as `make_checkpoint`."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    torch.manual_seed(0)
    text, others = SEEING[kind]
    config = CONFIG_MAPPING[kind](**deepcopy({"text_config": {**SIZES, **text, **changes}, **others}))
    made = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    perturb(made)
    made.save_pretrained(folder)
    return made.requires_grad_(False)


@torch.no_grad()
def perturb(model: Any) -> None:
    """Change vectors, as fresh ones hide a missing `1 + w`."""
    for name, param in [*model.named_parameters(), *model.named_buffers()]:
        if param.dim() == 1 and param.is_floating_point() and "inv_freq" not in name:
            param.add_(torch.randn_like(param) * 0.1)
