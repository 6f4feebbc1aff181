"""Models of Mamba 2 and 1 with weak decays: transformers' logits, and with `--batch-invariant` the same bits anyhow."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from families import config_of
from mamba_models import make_mamba
from parity import check_pieces, check_schedules
from recurrent_replies import LENGTHS, check_reply, check_retracted

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.runtime.checkpoint.config_keys import check_numbers, translate
from dovetail_models.falcon_h1 import ONE
from dovetail_testing.engine import make_core

FACTORS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 5.0}
PERTURBED: dict[str, list[dict[str, Any]]] = {
    "granitemoehybrid": [
        {"hidden_size": 60, "mamba_n_heads": 6, "mamba_d_head": 20, "mamba_n_groups": 2, "mamba_d_state": 24,
         "mamba_d_conv": 3, "mamba_chunk_size": 32},
        {**FACTORS, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True,
         "mamba_conv_bias": False, "tie_word_embeddings": True, "attention_bias": True},
        {"layer_types": ["attention", "mamba", "mamba"], "num_hidden_layers": 3, "mamba_n_groups": 4,
         "time_step_limit": (0.01, 0.05), "num_key_value_heads": 1},
    ],
    "bamba": [
        {"hidden_size": 60, "mamba_n_heads": 6, "mamba_d_head": 20, "mamba_n_groups": 3, "mamba_d_state": 24,
         "mamba_d_conv": 3, "attn_layer_indices": [0]},
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "tie_word_embeddings": True, "attention_bias": True,
         "mlp_bias": True, "num_key_value_heads": 1},
        {"num_hidden_layers": 3, "mamba_n_groups": 4, "time_step_limit": (0.01, 0.05), "head_dim": 24,
         "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
    ],
    "falcon_h1": [
        {"mamba_d_ssm": 120, "mamba_n_heads": 6, "mamba_d_head": 20, "mamba_n_groups": 2, "mamba_d_state": 24,
         "mamba_d_conv": 3, "mamba_rms_norm": True, "tie_word_embeddings": True},
        {**dict.fromkeys(ONE, 0.7), "ssm_multipliers": [0.9, 1.2, 0.8, 1.3, 0.7], "mlp_multipliers": [0.6, 1.4],
         "mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True, "mlp_bias": True},
        {"mamba_d_ssm": None, "mamba_d_head": 32, "mamba_n_groups": 4, "mamba_rms_norm": True,
         "mamba_norm_before_gate": False, "mamba_conv_bias": False, "ssm_in_multiplier": 0.5},
    ],
    "nemotron_h": [
        {"mamba_num_heads": 6, "mamba_head_dim": 20, "n_groups": 2, "ssm_state_size": 24, "conv_kernel": 3,
         "layers_block_type": ["mlp", "mamba", "attention", "mlp", "mamba"], "num_hidden_layers": 5},
        {"layers_block_type": ["attention", "mamba", "moe"], "num_hidden_layers": 3, "moe_latent_size": 24,
         "n_groups": 4, "time_step_min": 0.02, "n_routed_experts": 6, "n_group": 3, "topk_group": 2,
         "routed_scaling_factor": 2.5, "norm_topk_prob": False},
        {"use_bias": True, "use_conv_bias": False, "mlp_bias": True, "mlp_hidden_act": "relu2", "head_dim": 24,
         "tie_word_embeddings": True, "layers_block_type": ["mamba", "mlp", "attention", "moe"],
         "moe_shared_expert_intermediate_size": 48},
    ],
    "mamba2": [
        {"hidden_size": 60, "num_heads": 6, "head_dim": 20, "n_groups": 2, "state_size": 24, "conv_kernel": 3},
        {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True, "n_groups": 4,
         "layer_norm_epsilon": 1e-3},
        {"num_hidden_layers": 3, "expand": 3, "num_heads": 12, "n_groups": 3, "time_step_limit": (0.01, 0.05)},
    ],
    "mamba": [
        {"hidden_size": 60, "state_size": 6, "conv_kernel": 3, "time_step_rank": 5},
        {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
        {"num_hidden_layers": 3, "intermediate_size": 180, "state_size": 24},
    ],
    "falcon_mamba": [
        {"hidden_size": 60, "state_size": 6, "conv_kernel": 3, "time_step_rank": 5, "mixer_rms_eps": 1e-2},
        {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
        {"num_hidden_layers": 3, "intermediate_size": 180, "state_size": 24},
    ],
    "jamba": [
        {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "mamba_d_state": 6,
         "mamba_d_conv": 3, "mamba_dt_rank": "auto"},
        {"num_experts": 5, "expert_layer_period": 3, "expert_layer_offset": 0, "mamba_proj_bias": True,
         "mamba_conv_bias": False},
        {"num_experts": 1, "tie_word_embeddings": True, "attn_layer_period": 3, "attn_layer_offset": 2,
         "mamba_expand": 3, "rms_norm_eps": 1e-3},
    ],
}  # fmt: skip
"""Three changes of each family."""
OFTEN = {
    **{"granitemoehybrid": 1, "bamba": 2, "falcon_h1": 1, "nemotron_h": 1, "mamba2": 0},
    **{"mamba": 1, "falcon_mamba": 0, "jamba": 1},
}
"""Of each family the change that `make test` tries: what only it has; odd widths, biases and groups once a version.

As it is, `test_schedules_give_transformers_tokens` holds it against transformers.
"""
CASES = [
    pytest.param(kind, one, marks=() if number == OFTEN[kind] else pytest.mark.full)
    for kind, changes in PERTURBED.items()
    for number, one in enumerate([*changes, {}])
]

RETRACTED = [pytest.param(k, marks=() if k in ("granitemoehybrid", "jamba") else pytest.mark.full) for k in PERTURBED]
"""One of Mamba 2 and one of Mamba 1: retraction is the engine's, and others have these layers, too."""


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_logits_and_tokens_are_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A prompt whole, in chunks that cut pieces, and decoded tokens."""
    check_pieces(tmp_path, make_mamba(tmp_path, kind, **changes))


@pytest.mark.parametrize("kind", PERTURBED)
def test_schedules_give_transformers_tokens(kind: str, tmp_path: Path) -> None:
    """Requests that hit cached states, and that are retracted."""
    outcome = check_schedules(tmp_path, make_mamba(tmp_path, kind), model_impl="dovetail")
    assert outcome.cached
    assert outcome.retractions


@pytest.fixture(scope="module", params=PERTURBED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose context is long enough."""
    made = tmp_path_factory.mktemp("mamba")
    make_mamba(made, request.param, max_position_embeddings=8192)
    return made


@pytest.mark.sampled
@pytest.mark.parametrize("length", LENGTHS)
def test_a_reply_has_the_same_bits_however_it_came(length: int, folder: Path) -> None:
    """Cold, behind a cached state, in other chunks, and beside others."""
    check_reply(folder, length)


@pytest.mark.parametrize("folder", RETRACTED, indirect=True)
def test_a_retracted_reply_goes_on_with_the_same_bits(folder: Path) -> None:
    """What was decoded is computed again as a prompt, and behind it nothing differs."""
    check_retracted(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mamba_d_head": 31}, "4 mamba_n_heads of 31 numbers .mamba_d_head. are not 128"),
        ({"mamba_n_groups": 3}, "mamba_n_heads is 4; possible: multiples of mamba_n_groups, 3"),
        ({"time_step_limit": [0.1]}, "time_step_limit is .*; possible: two numbers"),
        ({"layer_types": ["mamba", "moe"]}, "layer_types is .*; possible: 2 of mamba and attention"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    """The message says what was given, and what is possible."""
    from dovetail_models.granite_hybrid import GraniteMoeHybrid

    hf = {**config_of("granitemoehybrid").to_dict(), "architectures": ["GraniteMoeHybridForCausalLM"], **changes}
    with pytest.raises(ModelError, match=said):
        GraniteMoeHybrid.config_from_hf(hf)


@pytest.mark.parametrize("kind", ["granitemoehybrid", "bamba", "falcon_h1", "jamba"])
def test_short_convolutions_are_not_served_with_another_activation(kind: str) -> None:
    """One key says that of MLPs and of convolutions; the MLPs would take it."""
    with pytest.raises(ModelError, match="hidden_act is 'gelu'; possible: silu"):
        read(kind, hidden_act="gelu")
    assert read(kind, hidden_act="swish").hidden_act == "swish"


@pytest.mark.parametrize(
    ("kind", "key", "said"),
    [
        ("mamba", "state_size", "layer 0: a size of its state 'state' is -1; it must be 1 at least"),
        ("jamba", "mamba_d_conv", "layer 0: a size of its state 'conv' is -1; it must be 1 at least"),
        ("lfm2", "conv_L_cache", "layer 0: a size of its state 'conv' is -1; it must be 1 at least"),
        ("bamba", "mamba_n_groups", "mamba_n_heads is 4; possible: multiples of mamba_n_groups, -1"),
        ("falcon_mamba", "time_step_rank", "time_step_rank is -1; it must be 1 at least"),
        ("qwen3_5_text", "linear_conv_kernel_dim", "layer 0: a size of its state 'conv' is -1"),
        ("qwen3_5_text", "linear_num_key_heads", "value_heads is 8; possible: multiples of linear_num_key_heads, -1"),
    ],
)
def test_sizes_below_one_are_refused_by_name(kind: str, key: str, said: str) -> None:
    """Before a weight is read; a tensor of such a size would be refused by PyTorch, in many lines."""
    with pytest.raises(ModelError, match=said):
        check_numbers(read(kind, **{key: -1}))


@pytest.mark.parametrize("kind", ["granitemoehybrid", "jamba"])
def test_no_expert_at_all_is_not_the_usual_two(kind: str) -> None:
    """Zero is said; only what is not said is two."""
    with pytest.raises(ModelError, match="num_experts_per_tok is 0, and there are"):
        read(kind, num_experts_per_tok=0)


def test_a_negative_width_is_one_line(tmp_path: Path) -> None:
    """Wherever it stands: when weights are made room for, before one is read."""
    config = {**config_of("granitemoehybrid").to_dict(), "architectures": ["GraniteMoeHybridForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "shared_intermediate_size": -1}, default=str))
    with pytest.raises(ModelError, match=r"^config.json: a weight would be \[.*-\d+.*\]; correct the negative number"):
        make_core(tmp_path, load_format="dummy", model_impl="dovetail")


@pytest.mark.parametrize(("key", "num"), [("mlp_multipliers", 2), ("ssm_multipliers", 5)])
def test_factors_of_another_number_are_refused(key: str, num: int) -> None:
    """Transformers counts them when it computes."""
    with pytest.raises(ModelError, match=rf"{key} is \[0\.5\]; possible: {num} numbers"):
        read("falcon_h1", **{key: [0.5]})


def read(kind: str, **changes: Any) -> ModelConfig:
    """What the plugin of a tiny config, changed behind transformers' back, makes of it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = config_of(kind)
    name = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    [entry] = entry_points(group="dovetail.models.v1", name=name)
    hf = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [name], **changes}
    found: ModelConfig = translate(entry.load().config_from_hf, hf)
    return found
