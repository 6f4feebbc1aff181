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
