"""Every family gives transformers' logits and tokens in every schedule, by its own plugin and through transformers.

A sample, of one plugin each; `make test-all` takes them all, for ten minutes.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import DECODERS, OWN, SEEING, TURNS, make_checkpoint, make_seeing
from parity import check, check_logits, check_schedules
from quantised_models import plugin_of

from dovetail.contracts.errors import ConfigError
from dovetail.plugins import Registry
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.weight_size import weight_size
from dovetail.sdk.checkpoint import dense_numel
from dovetail_testing.engine import make_core

REFUSED = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), "other values for a prompt in two pieces"),
    "deepseek_v32": "layers of type indexed_attention",
    "glm_moe_dsa": "layers of type indexed_attention",
    "deepseek_v4": "layers of type heavily_compressed_attention",
}
"""What transformers builds and is not served through it, and a part of the reason."""
SERVED = [kind for kind in DECODERS if kind not in REFUSED]
SAMPLE = {"gpt_oss", "nemotron_h", "llama4_text"}
"""Experts, windows, sinks; states, and layers that look at one token; chunks."""
ON_TRITON = {"gemma4_text", "mimo_v2_flash", "deepseek_v2"}
"""Two widths of heads; values of another width than keys, sinks; latent rows."""


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in SAMPLE else pytest.mark.full) for k in SERVED])
def test_through_transformers(kind: str, tmp_path: Path) -> None:
    """Transformers' own modules over the paged cache."""
    model = make_checkpoint(tmp_path, kind)
    check_schedules(tmp_path, model, model_impl="transformers")


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
FACTORS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 5.0}
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
WITHOUT_OWN = {"hidden_size_per_layer_input": 0, "tie_word_embeddings": False}
GEMMA4_EXPERTS = {
    **{"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 40, **WITHOUT_OWN},
    **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "tie_word_embeddings": True},
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gpt_oss", {"intermediate_size": 64, "hidden_size": 64}),  # a square matrix: its shape does not tell how it lies
    ("gpt_oss", {"head_dim": 24, "num_hidden_layers": 3}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma3_text", {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 60, "head_dim": 20}),
    ("gemma4_text", {"num_kv_shared_layers": 2, "layer_types": TURNS, "use_double_wide_mlp": True}),
    ("gemma4_text", {"num_kv_shared_layers": 4, "layer_types": TURNS, "final_logit_softcapping": 3.0}),
    ("gemma4_text", {**GEMMA4_EXPERTS, "hidden_size_per_layer_input": 8, "num_global_key_value_heads": None}),
    ("gemma4_text", {**GEMMA4_EXPERTS, "attention_bias": True, "head_dim": 20, "global_head_dim": 48}),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True}),
    ("seed_oss", {"attention_bias": False}),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": 1, "head_dim": 16}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    ("stablelm", {"partial_rotary_factor": 0.5}),
    ("granite", {**FACTORS, "attention_bias": True, "mlp_bias": True}),
    ("granitemoe", FACTORS),
    ("cohere2", {"logit_scale": 0.5, "attention_bias": True}),
    ("smollm3", {"no_rope_layers": [1, 0, 0, 1], "tie_word_embeddings": True}),
    ("smollm3", {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True, "sliding_window": 20}),
    ("exaone4", {"layer_types": MIXED}),
    ("exaone4", {"layer_types": ["full_attention"] * 4, "sliding_window": None}),
    ("olmo3", {"layer_types": MIXED, "attention_bias": True}),
    ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}}),
    ("ministral3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}}),
    ("phi3", {"sliding_window": 20, "partial_rotary_factor": 0.5}),
    ("glm4", {"attention_bias": False, "partial_rotary_factor": 1.0}),
    ("ernie4_5", {"use_bias": True, "tie_word_embeddings": True}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "num_hidden_layers": 4}),
    ("starcoder2", {"use_bias": False, "sliding_window": 20}),
    ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
    ("deepseek_v3", {"attention_bias": True, "norm_topk_prob": False, "routed_scaling_factor": 0.7}),
    ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.9}}),
    ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": None, "first_k_dense_replace": 0}),
    ("llama4_text", {"floor_scale": 16, "attn_scale": 0.5, "use_qk_norm": False, "num_experts_per_tok": 2}),
    ("llama4_text", {"interleave_moe_layer_step": 2, "intermediate_size": 64, "attention_bias": True}),
    ("llama4_text", {"attn_temperature_tuning": False, "no_rope_layers": [0, 1, 1, 0]}),
    ("glm4_moe_lite", {"n_group": 1, "topk_group": 1, "num_attention_heads": 3, "num_key_value_heads": 3}),
    ("qwen3_moe", {"head_dim": 40, "num_key_value_heads": 1, "num_experts": 7, "moe_intermediate_size": 36}),
    ("mixtral", {"head_dim": 112, "num_local_experts": 7, "num_experts_per_tok": 3, "num_hidden_layers": 1}),
    ("gpt_oss", {"head_dim": 80, "num_local_experts": 7, "num_experts_per_tok": 3, "vocab_size": 133}),
    (
        "deepseek_v3",
        {"qk_nope_head_dim": 24, "v_head_dim": 40, "kv_lora_rank": 36, "qk_rope_head_dim": 6, "head_dim": 6},
    ),
    ("glm4_moe", {"head_dim": 96, "n_routed_experts": 7, "num_experts": 7, "num_key_value_heads": 1}),
    (
        "exaone4",
        {"head_dim": 24, "num_key_value_heads": 1, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
    ),
]
"""Other configurations of these families."""


@pytest.mark.parametrize("kind", OWN)
def test_by_its_own_plugin(kind: str, tmp_path: Path) -> None:
    """Dovetail's layers over the paged cache; the configuration alone tells how many weights there are, nearly."""
    model = make_checkpoint(tmp_path, kind)
    assert type(model).__name__ in {record.name for record in Registry.scan().of_kind("model")}
    made = plugin_of("model", type(model).__name__)
    config = made.config_from_hf(json.loads((tmp_path / "config.json").read_text()))
    loaded = [one.numel() for name, one in model.named_parameters() if not re.fullmatch(config.not_loaded, name)]
    assert dense_numel(config) == pytest.approx(sum(loaded), rel=0.02)
    check_logits(tmp_path, model, chunk=13, num_new=4, model_impl="dovetail")


@pytest.mark.full
@pytest.mark.parametrize("kind", [*OWN, *SEEING])
def test_every_schedule_by_its_own_plugin(kind: str, tmp_path: Path) -> None:
    """Chunks of several sizes, decode, prefixes that are hit, and retractions."""
    model = (make_seeing if kind in SEEING else make_checkpoint)(tmp_path, kind)
    check(tmp_path, model, model_impl="dovetail")


@pytest.mark.first(20)
@pytest.mark.parametrize(("kind", "changes"), VARIANTS, ids=lambda value: value if isinstance(value, str) else "")
def test_other_configurations(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """What a family's checkpoints may say otherwise."""
    model = make_checkpoint(tmp_path, kind, **changes)
    check_logits(tmp_path, model, chunk=13, num_new=4, model_impl="dovetail")


PARTLY: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
BY_TYPE = {"gemma3_text", "gemma4_text"}
WITHOUT = {"glm4_moe_lite", "ministral3"}
"""Transformers cannot compute the first with such a factor, and the second needs yarn."""
WHOLE = {"llama", "gpt_oss", "deepseek_v3", "phi3"}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k in WHOLE else pytest.mark.full) for k in ("llama", *OWN) if k not in WITHOUT],
)
def test_a_share_of_heads_is_rotated_where_transformers_does(kind: str, tmp_path: Path) -> None:
    """Most ignore `partial_rotary_factor` in `rope_parameters`, and some go by it."""
    rope: dict[str, Any] = dict(PARTLY)
    if kind in BY_TYPE:
        rope = {"sliding_attention": dict(PARTLY), "full_attention": dict(PARTLY)}
    if kind == "gemma4_text":
        rope["full_attention"]["rope_type"] = "proportional"
    model = make_checkpoint(tmp_path, kind, rope_parameters=rope)
    check_logits(tmp_path, model, chunk=13, num_new=4, model_impl="dovetail")


def test_what_ignores_a_share_of_heads_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the log; with a rope of another kind transformers fails, and the start does."""
    make_checkpoint(tmp_path, "llama", rope_parameters=dict(PARTLY))
    make_core(tmp_path)
    assert "partial_rotary_factor 0.5 is ignored: LlamaForCausalLM rotates whole heads" in caplog.text
    path = tmp_path / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config["rope_parameters"] = {**PARTLY, "rope_type": "linear", "factor": 2.0}
    path.write_text(json.dumps(config), "utf-8")
    with pytest.raises(ConfigError, match=r"partial_rotary_factor 0.5 with rope kind 'linear': LlamaForCausalLM"):
        make_core(tmp_path)


def test_gemma_3_caps_no_scores(tmp_path: Path) -> None:
    """Gemma 2 does; the third has the key and norms queries and keys in the cap's place."""
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    model = make_checkpoint(tmp_path, "gemma3_text", **caps)
    check_logits(tmp_path, model, chunk=13, num_new=4, model_impl="dovetail")


@pytest.mark.first(4)
@pytest.mark.parametrize("kind", SEEING)
def test_the_text_part_of_models_that_see(kind: str, tmp_path: Path) -> None:
    """It is found under its prefix, and what belongs to images is left out."""
    model = make_seeing(tmp_path, kind)
    check_logits(tmp_path, model, chunk=13, num_new=4, model_impl="dovetail")
    runner: Any = make_core(tmp_path, page_size=4, max_total_tokens=64).executor.runner  # type: ignore[attr-defined]
    planned = weight_size(ModelFolder(tmp_path).headers, runner.config, "float32").num_bytes
    assert planned == pytest.approx(runner.weight_bytes, rel=0.02)  # norms of heads are repeated


OLDER: dict[str, dict[str, Any]] = {
    "gemma2": {"rope_theta": 10000.0, "layer_types": None},
    "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6}
    | {"layer_types": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "olmo3": {"rope_theta": 5e5, "layer_types": None, "rope_scaling": {**YARN, "attention_factor": 1.2}},
    "cohere2": {"rope_theta": 50000.0, "sliding_window_pattern": 4, "layer_types": None},
    "exaone4": {"rope_theta": 1e6, "sliding_window_pattern": 4, "layer_types": None},
    "smollm3": {"rope_theta": 5e6, "no_rope_layers": None, "layer_types": None},
    "gpt_oss": {"rope_theta": 150000.0, "layer_types": None, "rope_scaling": {**YARN, "truncate": False}},
    "glm4": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "deepseek_v3": {
        "rope_theta": 10000.0,
        "rope_scaling": {**YARN, "type": "yarn", "mscale_all_dim": 1.0, "mscale": 1},
    },
}
"""Keys of `config.json` as transformers 4 writes them; None: the key is not there."""


@pytest.mark.parametrize("kind", OLDER)
def test_older_spellings(kind: str, tmp_path: Path) -> None:
    """A config of transformers 4 means what transformers 5 reads in it."""
    from transformers import AutoModelForCausalLM

    make_checkpoint(tmp_path, kind)
    path = tmp_path / "config.json"
    older = json.loads(path.read_text("utf-8"))
    older["torch_dtype"] = older.pop("dtype")
    for key in ("rope_parameters", "_sliding_window_pattern"):
        older.pop(key, None)
    for key, value in OLDER[kind].items():
        older[key] = value
        if value is None:
            del older[key]
    path.write_text(json.dumps(older), "utf-8")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float().eval()
    check_logits(tmp_path, model.requires_grad_(False), chunk=64, num_new=8, model_impl="dovetail")


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="without a GPU, Triton runs in its interpreter")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in ON_TRITON else pytest.mark.full) for k in SERVED])
def test_on_triton(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the other built-in backend, in its interpreter: every family, by its own plugin where it has one."""
    from dovetail_backends.triton import TritonBackend

    monkeypatch.setattr(TritonBackend, "caps", replace(TritonBackend.caps, devices=frozenset({"cpu", "cuda"})))
    monkeypatch.setattr("dovetail.plugins.plan._why_not", lambda record, device: None)  # its manifest says CUDA
    model = make_checkpoint(tmp_path, kind)
    check_logits(tmp_path, model, chunk=64, num_new=2, attention_backend="triton")


def test_an_indexer_that_picks_all_is_left_out(tmp_path: Path) -> None:
    """DeepSeek V3.2 is served for as many tokens as it picks for each one; more are refused."""
    make_checkpoint(tmp_path, "deepseek_v32", index_topk=48)
    core = make_core(tmp_path, page_size=4, max_total_tokens=256)
    assert core.executor.runner.config.max_position_embeddings == 48  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="--context-length 49: the model has 48 positions"):
        make_core(tmp_path, page_size=4, max_total_tokens=256, context_length=49)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_served_is_refused(kind: str, tmp_path: Path) -> None:
    """With its name and a reason."""
    model = make_checkpoint(tmp_path, kind)
    with pytest.raises(ConfigError, match=REFUSED[kind]) as caught:
        check_schedules(tmp_path, model, model_impl="transformers")
    assert type(model).__name__ in str(caught.value)


def test_most_are_served() -> None:
    """Of the decoders that can be built."""
    assert len(SERVED) >= 55
