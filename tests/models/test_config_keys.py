"""Every key of `config.json` is read, harmless, refused, or named in a warning."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import pytest
import transformers

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.demo import MODEL_DIR
from dovetail.runtime.checkpoint.config_keys import CHANGING, HARMLESS, NEUTRAL, TrackedConfig, divide, translate
from dovetail.sdk.config import dense_config
from dovetail_models.deepseek import DeepseekV2, DeepseekV3
from dovetail_models.gemma2 import Gemma2
from dovetail_models.gpt_oss import GptOss
from dovetail_models.kimi_linear import KimiLinear
from dovetail_models.lfm2 import Lfm2
from dovetail_models.llama import Llama
from dovetail_models.mistral import Mistral
from dovetail_models.qwen2 import Qwen2
from dovetail_models.qwen3 import Qwen3
from dovetail_models.qwen3_moe import Qwen3Moe
from dovetail_testing.folder import unread_model

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}

HUB = {
    "llama-3.1": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2, 3], "head_dim": 4,
        "hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False, "model_type": "llama", "pretraining_tp": 1,
        "num_key_value_heads": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            "rope_type": "llama3",
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True,
    },
    "qwen2.5": {
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "max_window_layers": 21,
        "model_type": "qwen2", "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
        "architectures": ["Qwen2ForCausalLM"],
    },
    "qwen3": {
        "attention_bias": False, "head_dim": 8, "hidden_act": "silu", "max_window_layers": 28, "model_type": "qwen3",
        "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
        "architectures": ["Qwen3ForCausalLM"],
    },
    "qwen3-30b-a3b": {
        "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 8, "hidden_act": "silu", "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 8, "norm_topk_prob": True,
        "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1, "output_router_logits": False,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False,
        "architectures": ["Qwen3MoeForCausalLM"],
    },
    "gpt-oss-20b": {
        "attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 2, "head_dim": 4, "hidden_act": "silu",
        "initial_context_length": 64, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "model_type": "gpt_oss", "num_experts_per_tok": 2, "num_key_value_heads": 1, "num_local_experts": 4,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "rope_type": "yarn", "truncate": False,
        },
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True,
        "architectures": ["GptOssForCausalLM"],
    },
    "deepseek-v2-lite": {
        "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1,
        "hidden_act": "silu", "kv_lora_rank": 8, "model_type": "deepseek_v2", "moe_intermediate_size": 8,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 4, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_experts_per_tok": 2, "num_key_value_heads": 2, "pretraining_tp": 1, "q_lora_rank": None,
        "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "rms_norm_eps": 1e-06, "rope_theta": 10000,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False,
        "topk_group": 1, "topk_method": "greedy", "v_head_dim": 4, "architectures": ["DeepseekV2ForCausalLM"],
    },
    "deepseek-v3": {
        "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_act": "silu", "kv_lora_rank": 8, "model_type": "deepseek_v3", "moe_intermediate_size": 8,
        "moe_layer_freq": 1, "n_group": 2, "n_routed_experts": 4, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_experts_per_tok": 2, "num_key_value_heads": 2, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
        "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "rms_norm_eps": 1e-06, "rope_theta": 10000,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
        "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 4, "architectures": ["DeepseekV3ForCausalLM"],
    },
    "lfm2-1.2b": {
        "block_auto_adjust_ff_dim": True, "block_dim": 8, "block_ff_dim": 48, "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0, "block_multiple_of": 8, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0,
        "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 8,
        "conv_dim_out": 8, "conv_use_xavier_init": True, "full_attn_idxs": [1, 3], "model_type": "lfm2",
        "norm_eps": 1e-05, "num_heads": 2, "num_key_value_heads": 1, "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16", "use_pos_enc": True, "architectures": ["Lfm2ForCausalLM"],
    },
    "kimi-linear-48b": {
        "first_k_dense_replace": 1, "head_dim": 6, "hidden_act": "silu", "kv_lora_rank": 8, "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": [4], "head_dim": 4, "kda_layers": [1, 2, 3], "num_heads": 2,
            "short_conv_kernel_size": 4,
        },
        "model_type": "kimi_linear", "moe_intermediate_size": 8, "moe_layer_freq": 1, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "num_experts": 4, "num_experts_per_token": 2,
        "num_key_value_heads": 2, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None,
        "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1e4,
        "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1, "use_grouped_topk": True,
        "v_head_dim": 4, "architectures": ["KimiLinearForCausalLM"],
    },
}  # fmt: skip
PLUGINS = {
    "llama-3.1": Llama,
    "qwen2.5": Qwen2,
    "qwen3": Qwen3,
    "qwen3-30b-a3b": Qwen3Moe,
    "gpt-oss-20b": GptOss,
    "deepseek-v2-lite": DeepseekV2,
    "deepseek-v3": DeepseekV3,
    "lfm2-1.2b": Lfm2,
    "kimi-linear-48b": KimiLinear,
}


@pytest.mark.parametrize("name", HUB)
def test_what_the_hub_and_transformers_write_is_served_without_a_word(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Configs of both generations have no key that is refused or unknown."""
    plugin = PLUGINS[name]
    translate(plugin.config_from_hf, {**BASE, **HUB[name]})
    sized = {key: HUB[name][key] for key in ("num_key_value_heads", "num_experts_per_tok") if key in HUB[name]}
    new = transformers.AutoConfig.for_model(HUB[name]["model_type"], **BASE, **sized)
    translate(plugin.config_from_hf, new.to_dict())
    assert not [record for record in caplog.records if record.name.startswith("dovetail")]


def test_the_demo_model_s_config_is_served_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """So is the one in the wheel."""
    translate(Qwen3.config_from_hf, json.loads((MODEL_DIR / "config.json").read_text()))
    assert not caplog.records


def test_a_key_that_changes_the_arithmetic_is_refused() -> None:
    """Every one that the plugin does not read, by name and value; where it changes nothing it is served."""
    read = {key for key in CHANGING if not is_refused(key, 3)}
    assert read == {
        "attention_bias", "head_dim", "hidden_act", "hidden_activation", "intermediate_size", "layer_types",
        "mlp_bias", "num_key_value_heads", "original_max_position_embeddings", "partial_rotary_factor", "rms_norm_eps",
        "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings",
    }  # fmt: skip
    for key in sorted(CHANGING - read):
        for value in (None, *NEUTRAL.get(key, ()), *(() if key == "is_causal" else (False, [], {}))):
            assert not is_refused(key, value)
    assert is_refused("is_causal", False)
    assert is_refused("linear_num_key_heads", 4)
    assert TrackedConfig(BASE).unread() == BASE
    with pytest.raises(ModelError, match=r"attn_logit_softcapping = 50\.0: this changes what .* LlamaForCausalLM"):
        translate(Llama.config_from_hf, {**BASE, "attn_logit_softcapping": 50.0})


def is_refused(key: str, value: Any) -> bool:
    """Whether a plain Llama plugin, with whatever it reads optional, is refused for a key."""

    def reads_what_llama_reads(hf: Mapping[str, Any]) -> ModelConfig:
        config = Llama.config_from_hf({name: hf[name] for name in BASE})
        for name in PROBE:
            hf.get(name)
        return config

    try:
        translate(reads_what_llama_reads, {**BASE, key: value})
    except ModelError:
        return True
    return False


class Probe(dict[str, Any]):
    """Notes every key that is asked for."""

    def __init__(self) -> None:
        super().__init__(BASE)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def probed() -> set[str]:
    probe = Probe()
    Llama.config_from_hf({**BASE, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    Llama.config_from_hf(probe)
    probe["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0}
    Llama.config_from_hf(probe)
    return probe.asked


PROBE = probed()


def test_a_key_that_nobody_knows_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Also one inside the rope's parameters; one without a value, and those that are harmless, are not."""
    rope = {"rope_type": "default", "rope_theta": 5e3, "spiral": 3}
    with caplog.at_level(logging.WARNING):
        translate(Llama.config_from_hf, {**BASE, "glow": 7, "void": None, "use_cache": True, "rope_parameters": rope})
    [record] = caplog.records
    assert "unknown keys glow = 7, rope_parameters.spiral = 3" in record.getMessage()


def test_no_key_is_both() -> None:
    """A key is harmless or changes something."""
    assert not HARMLESS & CHANGING
    assert set(NEUTRAL) <= CHANGING
    assert divide({"bos_token_id": 1}) == ({}, {})


WINDOWS: list[tuple[dict[str, Any], list[int | None]]] = [
    ({}, [None] * 4),
    ({"sliding_window": None}, [None] * 4),
    ({"sliding_window": 7}, [7] * 4),
    ({"sliding_window": 7, "use_sliding_window": False}, [None] * 4),
    ({"sliding_window": 7, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 4}, [None] * 4),
    ({"sliding_window": 7, "use_sliding_window": True}, [7] * 4),
    ({"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 7]),
    ({"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 9}, [None] * 4),
    ({"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2}, [7, None, 7, None]),
]


@pytest.mark.parametrize(("keys", "windows"), WINDOWS, ids=str)
def test_sliding_windows_are_read_in_every_spelling(keys: dict[str, Any], windows: list[int | None]) -> None:
    """By switch, by type of layer, by the first windowed layer, or for all layers."""
    assert [spec.sliding_window for spec in dense_config({**BASE, **keys}).layers] == windows


def test_a_qwen_has_a_window_only_if_it_says_so() -> None:
    """Without `use_sliding_window` Qwen's size means nothing, as in transformers."""
    for plugin in (Qwen2, Qwen3):
        assert plugin.config_from_hf({**BASE, "sliding_window": 7}).layers[0].sliding_window is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "of type linear_attention are not supported"),
        ({"layer_types": ["sliding_attention"] * 4, "use_sliding_window": True}, "sliding_window says no size"),
        ({"hidden_act": "silu", "hidden_activation": "gelu"}, "hidden_act is 'silu' and hidden_activation is 'gelu'"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "needs the parameters 'short_factor' and"),
        (
            {"rope_parameters": {"full_attention": {}}, "layer_types": ["sliding_attention"] * 4},
            "says nothing of layer",
        ),
        ({"rope_scaling": "linear"}, "rope parameters are a mapping, not 'linear'"),
        ({"hidden_size": [8]}, "a value is not of the type that it must be"),
        ({"rope_theta": "much"}, "a value is not of the type that it must be"),
        ({"rope_parameters": {"full_attention": {}}}, "layer_types does not say which is which"),
    ],
)
def test_contradictions_are_named(keys: dict[str, Any], message: str) -> None:
    """What cannot be meant is refused with the key."""
    with pytest.raises(ModelError, match=message):
        dense_config({**BASE, **keys})


def rope(**numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **numbers}}


@pytest.mark.parametrize("more", [{}, {"mscale_all_dim": 0}, {"mscale_all_dim": 0.5}])
def test_yarn_sharpens_latent_attention_where_that_is_asked_for(more: dict[str, float]) -> None:
    """By `mscale_all_dim`, and not by the factor alone."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **more}
    config = DeepseekV3.config_from_hf({**BASE, **HUB["deepseek-v3"], "rope_scaling": yarn})
    wanted = 0.1 * more.get("mscale_all_dim", 0) * math.log(4) + 1
    assert config.layers[0].scale == pytest.approx((4 + 4) ** -0.5 * wanted**2)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (rope(rope_theta="NaN"), r"\(rope_theta\) is nan; it must be above 1"),
        (rope(rope_theta=0), r"\(rope_theta\) is 0.0"),
        (rope(rope_theta=-1e4), r"\(rope_theta\) is -10000"),
        (rope(rope_theta=1), r"\(rope_theta\) is 1.0"),
        (rope(rope_theta=float("inf")), r"\(rope_theta\) is inf"),
        (rope(rope_type="linear", factor=0), "factor of the rotary embedding is 0.0; it must be above 0"),
        (rope(rope_type="linear", factor=float("nan")), r"factor is not a number \(NaN\)"),
        (rope(rope_type="yarn", factor=-2), "factor of the rotary embedding is -2.0"),
        (rope(rope_type="yarn", factor=2, beta_slow=-1), "beta_slow of the rotary embedding is -1.0"),
        (rope(**{**LLAMA3, "high_freq_factor": 0.5}), r"low_freq_factor .* is 1.0; it must be high_freq_factor, 0.5"),
        (rope(**{**LONG, "short_factor": [1.0, 0.0]}), "a short_factor of the rotary embedding is not above 0"),
        (rope(partial_rotary_factor=0), "partial_rotary_factor is 0.0; it must be above 0, and 1 at most"),
        (rope(partial_rotary_factor=1.5), "partial_rotary_factor is 1.5"),
        ({"sliding_window": 0}, "layer 0: its sliding window is 0; it must be 1 token at least, and null means none"),
        ({"sliding_window": -3}, "layer 0: its sliding window is -3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0; a model has from 1 to 10,000 layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"num_hidden_layers": float("nan")}, r"num_hidden_layers is not a number \(NaN\)"),
        ({"num_key_value_heads": -2}, "num_key_value_heads = -2; give a whole number"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "3 query heads cannot share 2 key and value heads"),
        ({"head_dim": -4}, "head_dim = -4; give a whole number"),
        ({"vocab_size": -1}, "vocab_size = -1; give a whole number"),
        ({"hidden_size": 0, "head_dim": 4}, "hidden_size is 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps is not a number \(NaN\)"),
        ({"rms_norm_eps": -1e-6}, "the norms' epsilon is -1e-06"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false' is text; write true or false, without quo"),
        ({"attention_bias": "Yes"}, "attention_bias = 'Yes' is text"),
        ({"hidden_act": ["silu"]}, "hidden_act is .'silu'.; it must be a name"),
        ({"num_attention_heads": 0}, "config_from_hf raised ZeroDivisionError"),
    ],
)
def test_numbers_that_nothing_can_be_computed_with_are_refused(keys: dict[str, Any], message: str) -> None:
    """One line that names the number, whichever plugin reads the file; a server would start, and answer nonsense."""
    plugin = Mistral if "sliding_window" in keys else Llama  # which has none, whatever the file says
    with pytest.raises(ModelError, match=message) as error:
        unread_model("LlamaForCausalLM", {**BASE, **keys}).model_config(plugin.config_from_hf)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"query_pre_attn_scalar": 0},
            "raised ZeroDivisionError.*; the key read last is query_pre_attn_scalar = 0; cor",
        ),
        ({"query_pre_attn_scalar": -4}, r"layer 0: its scores are multiplied by .*; that must be above 0"),
        ({"attn_logit_softcapping": -1}, "layer 0: its scores are capped at -1.0; that must be above 0, and null mea"),
        ({"attn_logit_softcapping": "x"}, "raised ValueError: could not convert .* to float: 'x'; .* correct the file"),
    ],
)
def test_a_value_that_a_plugin_cannot_read_is_the_files(keys: dict[str, Any], message: str) -> None:
    """Not "upgrade the plugin": what was raised, which key was read last, and whose fault it may be."""
    with pytest.raises(ModelError, match=message):
        translate(Gemma2.config_from_hf, {**BASE, **keys})


def test_what_is_computed_in_range_is_served() -> None:
    """The ends of the ranges, and kinds that need none of the numbers."""
    for keys in (rope(**LLAMA3), rope(**LONG), {"sliding_window": 1}, {"rms_norm_eps": 0}, rope(rope_theta=1.5)):
        translate(Llama.config_from_hf, {**BASE, **keys})


def test_renamed_keys_mean_the_same() -> None:
    """`hidden_activation` is `hidden_act`; the rope's numbers may stand beside its mapping or inside."""
    assert dense_config({**BASE, "hidden_activation": "gelu"}).hidden_act == "gelu"
    assert dense_config({**BASE, "hidden_act": "gelu", "hidden_activation": "gelu"}).hidden_act == "gelu"
    inside = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 5e3, "partial_rotary_factor": 0.5}}
    inside["rope_parameters"]["original_max_position_embeddings"] = 32
    beside = {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 5e3, "partial_rotary_factor": 0.5}
    beside["original_max_position_embeddings"] = 32
    old, new = (dense_config({**BASE, **keys}, rotates_parts=True).rope for keys in (beside, inside))
    assert old == new


def test_a_text_part_is_judged_as_if_it_stood_alone() -> None:
    """Keys under `text_config` change as much as others; those of other inputs change nothing in text."""
    unread = {
        "text_config.attn_logit_softcapping": 50.0,
        "text_config.use_cache": True,
        "vision_config.hidden_act": "x",
    }
    refused, unknown = divide({**unread, "text_config.new_key": 1, "rope_parameters.sliding_window": 3})
    assert list(refused) == ["text_config.attn_logit_softcapping"]
    assert list(unknown) == ["text_config.new_key", "rope_parameters.sliding_window"]
