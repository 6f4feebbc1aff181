"""The least time of a decode step: what it reads, by the model's own facts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.demo import MODEL_DIR
from dovetail_server.bench.roofline import Bandwidth, ModelFacts, Roofline, facts_of, quantised_by


def test_the_floor_is_what_a_step_reads(tmp_path: Path) -> None:
    """Weights of a known shape give the known floor, and a prefix that all share is read once."""
    shape = {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 4096,
        "tie_word_embeddings": True, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    facts = facts_of(tmp_path)
    assert isinstance(facts, ModelFacts)
    assert facts.weight_bytes == 988_010_240
    assert facts.kv_bytes_per_token == 12_288
    floor = Roofline(facts=facts, bandwidth=Bandwidth(bytes_per_s=4.3e12, origin="test"))
    alone = floor.step_s(1, 0)
    assert alone is not None
    assert 1 / alone == pytest.approx(4352, abs=1)
    shared, own = floor.step_s(64, 2048, 2048), floor.step_s(64, 2048)
    assert shared is not None
    assert own is not None
    assert shared - alone == pytest.approx((own - alone) / 64)
    (tmp_path / "config.json").write_text(json.dumps({**shape, "architectures": ["SomeMoeForCausalLM"]}))
    assert "SomeMoeForCausalLM" in str(facts_of(tmp_path))


def test_the_floor_of_experts_is_what_tokens_choose(tmp_path: Path) -> None:
    """A token reads the experts that it chooses, many tokens nearly all; a latent row counts as it is cached."""
    shape = {
        "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 4096, "q_lora_rank": None,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "rope_theta": 1e4,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "first_k_dense_replace": 1,
        "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    facts = facts_of(tmp_path)
    assert isinstance(facts, ModelFacts)
    expert = 3 * 64 * 40 * 2
    assert facts.experts is not None
    assert facts.experts.num_params * 2 == 2 * 8 * expert
    assert facts.read_bytes(1) - facts.weight_bytes == pytest.approx(2 * 2 * expert)
    assert facts.read_bytes(2) - facts.weight_bytes == pytest.approx(2 * 8 * expert * (1 - 0.75**2))
    assert facts.kv_bytes_per_token == 3 * (32 + 8) * 2
    attention = 64 * 4 * 24 + 64 * 40 + 32 * 4 * 32 + 4 * 16 * 64 + 2 * 64
    rest = 3 * attention + 3 * 64 * 96 + 2 * 8 * 64 + 64 + 100 * 64
    assert facts.weight_bytes == pytest.approx(2 * rest, rel=0.01)
    (tmp_path / "config.json").write_text(json.dumps({**shape, "quantization_config": {"quant_method": "fp8"}}))
    assert "quantization_config" in str(facts_of(tmp_path))


def test_states_are_read_and_written_by_every_stream(tmp_path: Path) -> None:
    """Of Qwen3.5: the layers that attend cache tokens, the others keep a state of each stream."""
    shape = {
        "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "dtype": "bfloat16",
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    facts = facts_of(tmp_path)
    assert isinstance(facts, ModelFacts)
    assert facts.kv_bytes_per_token == 2 * 2 * 16 * 2
    assert facts.state_bytes == 3 * (4 * 8 * 16 * 4 + 4 * (2 * 2 * 8 + 4 * 16) * 2)
    floor = Roofline(facts=facts, bandwidth=Bandwidth(bytes_per_s=1e9, origin="test"))
    one, two = floor.step_s(1, 0), floor.step_s(2, 0)
    assert one is not None
    assert two is not None
    assert two - one == pytest.approx(2 * facts.state_bytes / 1e9)
    assert "MB of states per stream both ways" in floor.describe()
    assert "float16" in str(facts_of(tmp_path, state_dtype="float16"))


def test_no_floor_where_the_server_quantised_a_plain_checkpoint() -> None:
    """Its files tell how many bytes they have, and the server reads fewer; a plain server's floor is known."""
    told = [
        ["model", "dovetail-llm:LlamaForCausalLM", "loaded", ""],
        ["quantization", "dovetail-llm:int4", "loaded", ""],
    ]
    assert quantised_by(told[:1]) is None
    assert "dovetail-llm:int4" in str(facts_of(MODEL_DIR, None, quantised_by(told)))
    assert isinstance(facts_of(MODEL_DIR, None, quantised_by(told[:1])), ModelFacts)


def test_the_floor_of_a_quantised_checkpoint_is_what_is_stored(tmp_path: Path) -> None:
    """Experts of half a byte a number and their scales count as in the file, the embedding table does not."""
    import torch
    from safetensors.torch import save_file

    shape = {
        "architectures": ["GptOssForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
        "max_position_embeddings": 4096, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e4,
        "sliding_window": 128, "layer_types": ["full_attention"], "rms_norm_eps": 1e-5, "dtype": "bfloat16",
        "tie_word_embeddings": False, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    packed, scales = torch.zeros(8, 64, 2, 16, dtype=torch.uint8), torch.zeros(8, 64, 2, dtype=torch.uint8)
    tensors = {"model.embed_tokens.weight": torch.zeros(100, 64).bfloat16()}
    tensors["lm_head.weight"] = torch.zeros(100, 64).bfloat16()
    tensors["model.layers.0.mlp.experts.down_proj_blocks"] = packed
    tensors["model.layers.0.mlp.experts.down_proj_scales"] = scales
    save_file(tensors, tmp_path / "model.safetensors")
    facts = facts_of(tmp_path)
    assert isinstance(facts, ModelFacts)
    assert facts.weight_bytes == 2 * 100 * 64
    assert facts.read_bytes(1) - facts.weight_bytes == (packed.numel() + scales.numel()) / 4
    assert facts.kv_bytes_per_token == 2 * 2 * 16 * 2


def test_a_checkpoint_and_its_sizes_give_the_same_floor(tmp_path: Path) -> None:
    """Without the weights, what a step reads follows from `config.json` to a thousandth."""
    (tmp_path / "config.json").write_text((MODEL_DIR / "config.json").read_text())
    exact, computed = facts_of(MODEL_DIR), facts_of(tmp_path)
    assert isinstance(exact, ModelFacts)
    assert isinstance(computed, ModelFacts)
    assert computed.weight_bytes == pytest.approx(exact.weight_bytes, rel=1e-3)
    assert 2 * exact.weight_bytes > sum(file.stat().st_size for file in MODEL_DIR.glob("*.safetensors"))
