"""Configurations of models that see as the hub has them: what they leave out, transformers knows."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
from seeing import VISION

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import ModelPlugin
from dovetail.runtime.checkpoint.config_keys import translate
from dovetail_models.gemma3_vl import Gemma3_VL
from dovetail_models.gemma4_vl import Gemma4_VL
from dovetail_models.glm4v import Glm4v
from dovetail_models.llama4_vl import Llama4_VL
from dovetail_models.pixtral import Pixtral

SIGLIP = {
    **{"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model"},
    **{"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False},
}
PIXTRAL = {"head_dim": 64, "hidden_act": "silu", "image_size": 1024, "model_type": "pixtral", "patch_size": 16}
GLM = {
    **{"attention_bias": True, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13696},
    **{"num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    **{"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 151552},
    **{"rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}, "max_position_embeddings": 32768},
}
GLM_TOWER = {
    **{"depth": 24, "hidden_size": 1536, "image_size": 336, "intermediate_size": 13696, "num_heads": 12},
    **{"out_hidden_size": 4096, "patch_size": 14},
}
DEFAULT = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MISTRAL: dict[str, Any] = {
    **{"model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "num_hidden_layers": 40, "vocab_size": 131072},
    **{"intermediate_size": 14336, "rope_theta": 1e9, "sliding_window": None, "max_position_embeddings": 1024000},
}
LLAMA4_TEXT: dict[str, Any] = {
    **{"attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1, "floor_scale": 8192, "head_dim": 128},
    **{"attn_temperature_tuning": True, "for_llm_compressor": False, "hidden_size": 5120, "intermediate_size": 8192},
    **{"interleave_moe_layer_step": 1, "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760},
    **{"model_type": "llama4_text", "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48},
    **{"no_rope_layers": [1, 1, 1, 0] * 12, "num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-5},
    **{"router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_qk_norm": True, "vocab_size": 202048},
    "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
    | {"original_max_position_embeddings": 8192},
    "rope_theta": 500000.0,
}
"""As in Llama 4 Scout."""
MAVERICK = {
    **{"interleave_moe_layer_step": 2, "max_position_embeddings": 1048576, "num_local_experts": 128},
    **{"rope_scaling": None, "use_qk_norm": False},
}
LLAMA4_TOWER = {
    **{"hidden_act": "gelu", "hidden_size": 1408, "image_size": 336, "intermediate_size": 5632, "norm_eps": 1e-5},
    **{"model_type": "llama4_vision_model", "multi_modal_projector_bias": False, "num_attention_heads": 16},
    **{"num_channels": 3, "num_hidden_layers": 34, "patch_size": 14, "pixel_shuffle_ratio": 0.5},
    **{"projector_dropout": 0.0, "projector_input_dim": 4096, "projector_output_dim": 4096, "rope_theta": 10000},
    **{"vision_feature_layer": -1, "vision_feature_select_strategy": "default", "vision_output_dim": 4096},
}
LLAMA4 = {
    **{"boi_token_index": 200080, "eoi_token_index": 200081, "image_token_index": 200092},
    "vision_config": LLAMA4_TOWER,
}
Published = tuple[type[ModelPlugin], str, dict[str, Any]]
PUBLISHED: dict[str, Published] = {
    "Gemma 3 4B": (
        Gemma3_VL,
        "gemma3",
        {
            "text_config": {
                **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"},
                **{"num_hidden_layers": 34, "sliding_window": 1024},
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
            "vision_config": SIGLIP,
        },
    ),
    "Pixtral 12B": (
        Pixtral,
        "llava",
        {
            **{"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_token_index": 10},
            **{"text_config": MISTRAL, "vision_config": PIXTRAL},
        },
    ),
    "Llama 4 Scout": (Llama4_VL, "llama4", {**LLAMA4, "text_config": LLAMA4_TEXT}),
    "Llama 4 Maverick": (Llama4_VL, "llama4", {**LLAMA4, "text_config": {**LLAMA4_TEXT, **MAVERICK}}),
    "LLaVA 1.5": (
        Pixtral,
        "llava",
        {
            "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
            "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": 24},
        },
    ),
    "GLM-4.1V, whose text keys stand beside the others": (
        Glm4v,
        "glm4v",
        {**GLM, "image_token_id": 151343, "vision_config": GLM_TOWER},
    ),
    "a rotation by row and column that goes by `default`": (
        Glm4v,
        "glm4v",
        {
            "image_token_id": 151343,
            "vision_config": GLM_TOWER | DEFAULT,
            "text_config": {**GLM, "model_type": "glm4v_text"},
        },
    ),
}


def facts(config: ModelConfig) -> ModelConfig:
    """Leave out what no layer reads where layers have ropes of their own."""
    return replace(config, rope=config.layer_ropes[0]) if config.layer_ropes else config


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_published_file_leaves_out_is_transformers_default(name: str) -> None:
    from transformers import CONFIG_MAPPING

    cls, kind, given = PUBLISHED[name]
    given = {"architectures": [cls.architectures[0]], "model_type": kind, **given}
    full = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(given)).to_dict()
    full |= {"architectures": given["architectures"]}
    assert facts(cls.config_from_hf(given)) == facts(cls.config_from_hf(full))


@pytest.mark.parametrize("name", ["Llama 4 Scout", "Llama 4 Maverick"])
def test_no_key_of_llama_4_is_unknown(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Every key is read or known to mean nothing; images have tiles of 24 x 24 patches, four of which are a token."""
    _, kind, given = PUBLISHED[name]
    given = {**given, "architectures": ["Llama4ForConditionalGeneration"], "model_type": kind}
    with caplog.at_level(logging.WARNING):
        config = translate(Llama4_VL.config_from_hf, given)
    assert not caplog.records
    assert config.vision is not None
    assert (config.vision.embed_id, config.vision.width, config.vision.patches_per_token) == (200092, 1408, 4)
    assert config.extra["tower"] | {"side": 24, "adapter": 4096, "depth": 34} == config.extra["tower"]


def test_a_tower_of_gemma_4_may_call_its_rotation_default() -> None:
    """Files of before transformers named it do; another one is refused."""
    tower = Gemma4_VL.tower_facts({**VISION["gemma4"], "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}})
    assert tower["theta"] == 50.0
    with pytest.raises(ModelError, match="rope_type 'yarn' is not supported; possible: 'axial', and 'default' for it"):
        Gemma4_VL.tower_facts({**VISION["gemma4"], "rope_parameters": {"rope_type": "yarn"}})


def test_a_key_in_two_spellings_is_read_in_both(caplog: pytest.LogCaptureFixture) -> None:
    """Some transformers wrote the pattern of windows and the kind of a rope twice."""
    _, kind, given = PUBLISHED["Gemma 3 4B"]
    rope = {"factor": 8.0, "rope_type": "linear", "type": "linear"}
    text = {**given["text_config"], "sliding_window_pattern": 5, "_sliding_window_pattern": 5, "rope_scaling": rope}
    given = {**given, "architectures": ["Gemma3ForConditionalGeneration"], "model_type": kind, "text_config": text}
    with caplog.at_level(logging.WARNING):
        config = translate(Gemma3_VL.config_from_hf, given)
    assert [spec.index for spec in config.layers if spec.sliding_window is None] == [4, 9, 14, 19, 24, 29]
    assert not caplog.records
    text["_sliding_window_pattern"] = 6
    with pytest.raises(ModelError, match="sliding_window_pattern is 5 and _sliding_window_pattern is 6; keep one"):
        translate(Gemma3_VL.config_from_hf, given)
