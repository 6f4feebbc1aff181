"""GGUF files: transformers' answers from the same file, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from quantised_models import loaded, plugin_of

from dovetail.contracts.errors import ModelError
from dovetail.runtime.checkpoint.config_keys import translate
from dovetail.runtime.hf_config import CONFIG_KEYS, architecture, read_config
from dovetail_testing.conformance.model_runtime import TinyEngine

pytest.importorskip("gguf", reason="it writes the files")
from gguf_files import WIDE, write_gguf

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text")
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 5, "sliding_window": None},
    "qwen3_moe": {"moe_intermediate_size": 256},
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3_text": {"query_pre_attn_scalar": 64},
}
TAKEN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 128, "moe_intermediate_size": 768},
}
GEMMA = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1} | {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
}
"""transformers' reader takes its defaults for some of what a file says."""
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "mixed")
KINDS += ("IQ4_NL", "IQ4_XS")
PROMPTS = [[5, 7, 11, 13, 17, 19, 23, 29], [3, 4], list(range(60))]


def of_transformers(file: Path) -> Any:
    """Read a file with transformers."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).requires_grad_(False)


def engine_of(plain: Path, file: Path) -> TinyEngine:
    """Make an engine of a file; its sizes are those of the folder that it was written from."""
    engine = TinyEngine(plugin_of("model", architecture(read_config(plain), plain)), plain)
    engine.model, _ = loaded(file, "gguf")
    return engine


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num: int) -> list[int]:
    """Return what a model of transformers says."""
    ids = list(prompt)
    for _ in range(num):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_checkpoint_that_it_was_written_from(family: str, tmp_path: Path) -> None:
    """Names, order of rows, offsets of norms, experts and configuration are undone."""
    model = make_checkpoint(tmp_path / "plain", family, **WIDE | CHANGES.get(family, {}))
    file = tmp_path / "tiny.gguf"
    write_gguf(tmp_path / "plain", file)
    engine = engine_of(tmp_path / "plain", file)
    for mine, prompt in zip(engine.prefill_logits(PROMPTS), PROMPTS, strict=True):
        want = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(mine, want, rtol=2e-4, atol=2e-4 * float(want.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_says_what_config_json_says(family: str, tmp_path: Path) -> None:
    """The facts of the model are the same, however they are spelled."""
    make_checkpoint(tmp_path / "plain", family, **WIDE | CHANGES.get(family, {}))
    file = tmp_path / "tiny.gguf"
    write_gguf(tmp_path / "plain", file)
    hf, mine = read_config(tmp_path / "plain"), read_config(file)
    facts = [
        translate(plugin_of("model", str(each["architectures"][0])).config_from_hf, each, served=CONFIG_KEYS)
        for each in (hf, mine)
    ]
    ropes = [[each.rope_of(index) for index in range(each.num_layers)] for each in facts]
    assert ropes[0] == ropes[1]
    names = {*type(facts[0]).__slots__} - {"architecture", "norm_eps", "rope", "layer_ropes"}
    for name in names:
        assert getattr(facts[0], name) == getattr(facts[1], name), name
    assert facts[0].norm_eps == pytest.approx(facts[1].norm_eps)


def mixed(name: str) -> str:
    """Types as files of Q4_K_M have them: values and embeddings in more bits."""
    return "Q6_K" if "attn_v" in name or "token_embd" in name else "Q4_0" if "attn_output" in name else "Q4_K"


@pytest.mark.first(5)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_every_type_give_the_tokens_of_transformers(kind: str, tmp_path: Path) -> None:
    """Packed or written out, every product sees the numbers that the file stands for."""
    make_checkpoint(tmp_path / "plain", "llama", **WIDE)
    file = tmp_path / "tiny.gguf"
    write_gguf(tmp_path / "plain", file, mixed if kind == "mixed" else lambda name: kind)
    check_against_transformers(tmp_path / "plain", file)


@pytest.mark.first(3)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mixtral"])
def test_a_family_in_blocks_gives_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    """Fused matrices, experts and embeddings of blocks; transformers reads no Mixtral."""
    sizes = GEMMA if "gemma" in family else WIDE | CHANGES.get(family, {}) | TAKEN.get(family, {})
    make_checkpoint(tmp_path / "plain", family, **sizes)
    file = tmp_path / "tiny.gguf"
    write_gguf(tmp_path / "plain", file, lambda name: "F32" if "gate_inp" in name else "Q8_0")
    check_against_transformers(tmp_path / "plain", file)


def check_against_transformers(plain: Path, file: Path) -> None:
    """Compare logits and greedy tokens."""
    model, engine = of_transformers(file), engine_of(plain, file)
    for mine, prompt in zip(engine.prefill_logits(PROMPTS), PROMPTS, strict=True):
        want = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(mine, want, rtol=5e-4, atol=5e-4 * float(want.abs().max()))
    assert engine.greedy(PROMPTS, 12, 16) == [greedy(model, prompt, 12) for prompt in PROMPTS]


def test_frequencies_that_llama_3_stretches_are_read_as_they_stand(tmp_path: Path) -> None:
    """The converter writes their factors as a tensor; transformers leaves it out."""
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled |= {"original_max_position_embeddings": 32, "rope_theta": 500.0}
    model = make_checkpoint(tmp_path / "plain", "llama", **WIDE, rope_parameters=scaled)
    plain = 1 / 500.0 ** (torch.arange(0, 64, 2).double() / 64)
    factors = (plain / model.model.rotary_emb.inv_freq.double()).float().numpy()
    assert factors.max() > 7
    assert factors.min() == pytest.approx(1, abs=1e-5)
    file = tmp_path / "tiny.gguf"
    write_gguf(tmp_path / "plain", file, extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    check_against(model, engine_of(tmp_path / "plain", file))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions_are_read(kind: str, tmp_path: Path) -> None:
    """Numbers of `rope.scaling`."""
    import gguf

    scaled = {"rope_type": kind, "factor": 4.0, "rope_theta": 500.0}
    if kind == "yarn":
        scaled |= {"original_max_position_embeddings": 64}
    model = make_checkpoint(tmp_path / "plain", "qwen2", **WIDE, rope_parameters=scaled)

    def extra(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(64)

    file = tmp_path / "tiny.gguf"
    write_gguf(tmp_path / "plain", file, extra=extra)
    check_against(model, engine_of(tmp_path / "plain", file))


def test_a_divided_model_is_one(tmp_path: Path) -> None:
    """Any of its files, or their folder, stands for all."""
    model = make_checkpoint(tmp_path / "plain", "llama", **WIDE)
    (tmp_path / "files").mkdir()
    write_gguf(tmp_path / "plain", tmp_path / "files" / "tiny.gguf", split_max_tensors=6)
    files = sorted((tmp_path / "files").glob("*.gguf"))
    assert len(files) > 2
    (tmp_path / "files" / "mmproj-tiny.gguf").write_bytes(b"GGUF")  # a vision tower, which nobody reads here
    for path in (files[0], files[-1], tmp_path / "files"):
        check_against(model, engine_of(tmp_path / "plain", path))
    files[1].unlink()
    with pytest.raises(ModelError, match=files[1].name):
        read_config(tmp_path / "files")


def test_other_alignments_are_read(tmp_path: Path) -> None:
    """`general.alignment` says where tensors begin."""
    model = make_checkpoint(tmp_path / "plain", "llama", **WIDE)
    write_gguf(tmp_path / "plain", tmp_path / "t.gguf", extra=lambda writer: writer.add_custom_alignment(256))
    check_against(model, engine_of(tmp_path / "plain", tmp_path / "t.gguf"))


def test_what_says_the_usual_is_served_and_other_keys_are_named(tmp_path: Path) -> None:
    """Converters write a head's whole width and its usual scale; what nobody knows is told where the model starts."""
    model = make_checkpoint(tmp_path / "plain", "llama", **WIDE)

    def extra(writer: Any) -> None:
        writer.add_rope_dimension_count(64)
        writer.add_attention_scale(64**-0.5)
        writer.add_causal_attention(True)
        writer.add_float32("llama.rope.scaling.attn_factor", 1.0)
        writer.add_float32("llama.twists", 3.0)
        writer.add_string("general.description", "x" * (1 << 20))

    write_gguf(tmp_path / "plain", tmp_path / "t.gguf", extra=extra)
    check_against(model, engine_of(tmp_path / "plain", tmp_path / "t.gguf"))
    config = read_config(tmp_path / "t.gguf")["quantization_config"]
    assert plugin_of("quantization", "gguf").unknown(config) == ["llama.twists"]


def test_what_is_packed_and_what_is_written_out_is_told(tmp_path: Path) -> None:
    """Q4_0 stays packed where all parts of a matrix are in it; the memory table names the other types."""
    make_checkpoint(tmp_path / "plain", "llama", **WIDE)
    write_gguf(tmp_path / "plain", tmp_path / "t.gguf", mixed)
    model, read = loaded(tmp_path / "t.gguf", "gguf")
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    assert kinds["layers.0.attention.out"] == "PackedLinear"
    assert kinds["layers.0.attention.qkv"] == kinds["layers.0.mlp.down"] == "PlainLinear"
    assert {note.partition(" ")[0] for note in read.notes} == {"Q4_K", "Q6_K"}


def check_against(model: Any, engine: TinyEngine) -> None:
    """Compare logits with a model of transformers."""
    for mine, prompt in zip(engine.prefill_logits(PROMPTS), PROMPTS, strict=True):
        want = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(mine, want, rtol=3e-4, atol=3e-4 * float(want.abs().max()))
