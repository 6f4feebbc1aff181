"""What a key means that `config.json` does not have: transformers' default, where it differs from the common one.

Only of keys that no tensor's shape gives away: a wrong one of these would be a wrong answer. Files that transformers
writes have all keys; such as people shorten by hand do not. Does not import torch.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

EPS: dict[str, Any] = {"rms_norm_eps": 1e-5}
WINDOW: dict[str, Any] = {"sliding_window": 4096}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 4096, "rope_theta": 150000.0}
GROUPS: dict[str, Any] = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}

ABSENT: dict[str, dict[str, Any]] = {
    "BailingHybridForCausalLM": {"topk_group": 4, "routed_scaling_factor": 2.5, "rope_theta": 6000000.0},
    "Cohere2ForCausalLM": WINDOW,
    "DeepseekV3ForCausalLM": GROUPS,
    "DeepseekV32ForCausalLM": GROUPS,
    "Ernie4_5ForCausalLM": EPS,
    "Ernie4_5_MoeForCausalLM": EPS,
    "Exaone4ForCausalLM": EPS | WINDOW,
    "Gemma2ForCausalLM": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **WINDOW},
    "Gemma3ForCausalLM": WINDOW,
    "Glm4ForCausalLM": {"rms_norm_eps": 1.5625e-07},
    "Glm4MoeForCausalLM": EPS | {"partial_rotary_factor": 0.5},
    "Glm4MoeLiteForCausalLM": EPS | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8},
    "GptOssForCausalLM": EPS | {"sliding_window": 128, "rope_parameters": YARN},
    "HunYuanDenseV1ForCausalLM": EPS,
    "KimiLinearForCausalLM": EPS | {"routed_scaling_factor": 2.446},
    "Llama4ForCausalLM": EPS | {"attention_chunk_size": 8192, "rope_theta": 500000.0},
    "MiniMaxM2ForCausalLM": {"rope_theta": 5000000.0},
    "Ministral3ForCausalLM": EPS,
    "MistralForCausalLM": WINDOW,
    "MixtralForCausalLM": EPS | {"rope_theta": 1000000.0},
    "Olmo2ForCausalLM": EPS,
    "Olmo3ForCausalLM": EPS | WINDOW,
    "OlmoeForCausalLM": EPS,
    "Phi3ForCausalLM": EPS,
}

COMMON: dict[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
GEMMA3: dict[str, Any] = {
    **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072},
}
UNSAID: dict[str, dict[str, Any]] = {
    "gemma3_text": GEMMA3,
    "llama": COMMON | {"intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": COMMON | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
}
"""By `model_type` of a text part, sizes that transformers 4 did not write where they are these; Gemma 3 lacks some."""


def with_absent(hf: Mapping[str, Any], architecture: str) -> Mapping[str, Any]:
    """Return a config with an architecture's values for keys that it does not have; one that is null has it.

    Ropes have two spellings: where `rope_scaling` is there, `rope_parameters` is not absent.
    """
    absent = {key: value for key, value in ABSENT.get(architecture, {}).items() if key not in hf}
    if "rope_scaling" in hf:
        absent.pop("rope_parameters", None)
    return ChainMap(absent, cast("MutableMapping[str, Any]", hf)) if absent else hf
