"""Checkpoints and config files as other people make them: shortened, extended, cut up, written by older programs.

Of each the log probabilities are transformers', or it is refused in one line. What a missing key means, and a key that
transformers does not know, is asked of every family with a plugin of its own, by what its plugin makes of the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from survey import alone
from test_random_configs import KINDS, config_of, read
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ConfigError, ModelError

LONGEST = 450
"""Characters of a refusal, without the folder's name."""
MOST = 1e-4
WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]
Edit = Callable[[Path], object]


def keys(*absent: str, **values: Any) -> Edit:
    """Change `config.json`."""

    def edit(folder: Path) -> None:
        file = folder / "config.json"
        given = {key: value for key, value in json.loads(file.read_text()).items() if key not in absent}
        file.write_text(json.dumps(given | values))

    return edit


def tensors(change: Callable[[Tensors], Tensors]) -> Edit:
    """Change the weights."""

    def edit(folder: Path) -> None:
        made = {name: value.contiguous().clone() for name, value in change(load_file(folder / WEIGHTS)).items()}
        save_file(made, folder / WEIGHTS, metadata={"format": "pt"})

    return edit


def without(part: str) -> Edit:
    """Leave out the tensors whose names have a part."""
    return tensors(lambda all_: {name: value for name, value in all_.items() if part not in name})


def cast(dtype: torch.dtype, *, spared: str = "-") -> Edit:
    """Store the weights in another dtype, but for some."""
    return tensors(lambda all_: {name: all_[name] if spared in name else all_[name].to(dtype) for name in all_})


def renamed(change: Callable[[str], str]) -> Edit:
    """Rename the tensors."""
    return tensors(lambda all_: {change(name): value for name, value in all_.items()})


def sharded(num: int, *, folder_name: str = "", keeps: bool = False, metadata: bool = True) -> Edit:
    """Cut the weights into files, with an index; `keeps` leaves other weights behind under the whole file's name."""

    def edit(folder: Path) -> None:
        whole = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        index: dict[str, Any] = {"weight_map": {}, **({"metadata": {"total_size": 1}} if metadata else {})}
        (folder / folder_name).mkdir(exist_ok=True)
        for at in range(num):
            file = str(Path(folder_name) / f"model-{at + 1:05}-of-{num:05}.safetensors")
            part = {name: whole[name] for name in sorted(whole)[at::num]}
            save_file(part, folder / file, metadata={"format": "pt"})
            index["weight_map"] |= dict.fromkeys(part, file)
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
        if keeps:
            save_file({name: value + 1 for name, value in whole.items()}, folder / WEIGHTS, metadata={"format": "pt"})

    return edit


def older_rope(theta: float, **scaling: Any) -> Edit:
    """Write the rope as transformers 4 did."""
    return keys("rope_parameters", rope_theta=theta, rope_scaling=scaling or None)


def both(*edits: Edit) -> Edit:
    """Do one after the other."""
    return lambda folder: [edit(folder) for edit in edits]


def nothing(folder: Path) -> None:
    """Leave it as it is."""


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
ODD = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "hidden_size": 60, "intermediate_size": 97}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3}
OUTPUTS = {"return_dict": False, "torchscript": True, "output_attentions": True, "output_hidden_states": True}

SERVED: dict[str, tuple[str, dict[str, Any], Edit]] = {
    "yarn with mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}, nothing),
    "yarn with factors": ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 16}}, nothing),
    "yarn not truncated": ("qwen2", {"rope_parameters": {**YARN, "truncate": False}}, nothing),
    "older linear rope": ("llama", {}, older_rope(5000.0, type="linear", factor=2.0)),
    "older llama3 rope": ("llama", {}, older_rope(5e5, **LLAMA_3)),
    "whole numbers in a rope": ("qwen3", {}, older_rope(10000, type="yarn", factor=4)),
    "rope of two names": ("llama", {}, older_rope(1e4, type="linear", rope_type="linear", factor=2.0)),
    "no rope": ("mistral", {}, keys("rope_parameters")),
    "rope that is null": ("qwen2", {}, keys(rope_parameters=None)),
    "two bases": ("llama", {}, keys(rope_theta=77.0)),
    "long rope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}, nothing),
    "tied, and a head that differs": ("llama", {"tie_word_embeddings": True}, tensors(
        lambda all_: {**all_, "lm_head.weight": all_["model.embed_tokens.weight"] + 1})),
    "tied, as is usual": ("gemma2", {"tie_word_embeddings": True}, keys("tie_word_embeddings")),
    "untied where that is unusual": ("gemma2", {"tie_word_embeddings": False}, nothing),
    "no caps": ("gemma2", {}, keys("attn_logit_softcapping", "final_logit_softcapping")),
    "caps that are null": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, nothing),
    "no epsilon": ("mixtral", {}, keys("rms_norm_eps")),
    "no scale of routes": ("deepseek_v3", {"topk_group": 4}, keys("routed_scaling_factor", "topk_group")),
    "no kv heads, head dim, act": ("llama", {"num_key_value_heads": 4}, keys(
        "num_key_value_heads", "head_dim", "hidden_act")),
    "odd heads": ("llama", {**ODD, "vocab_size": 197, "num_hidden_layers": 1}, nothing),
    "odd vocab": ("gemma3_text", {"vocab_size": 133, "num_key_value_heads": 1}, nothing),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, nothing),
    "frequencies stored": ("llama", {}, tensors(
        lambda all_: {**all_, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})),
    "half of it in float16": ("qwen3", {}, both(cast(torch.float16, spared="norm"), keys(dtype="float32"))),
    "float64": ("llama", {}, cast(torch.float64)),
    "older dtype": ("llama", {}, keys("dtype", torch_dtype="torch.float32")),
    "shards": ("llama", {}, sharded(3)),
    "shards below": ("qwen3", {}, sharded(2, folder_name="part")),
    "another maker's file beside": ("llama", {}, lambda folder: save_file(
        {"tok_embeddings.weight": torch.zeros(131, 64)}, folder / "consolidated.safetensors")),
    "outputs that nobody reads": ("gpt_neox", {}, keys(**OUTPUTS)),
    "outputs of layers with states": ("falcon_h1", {}, keys(**OUTPUTS)),
    "dropouts": ("phi", {}, keys(attention_dropout=0.3, resid_pdrop=0.3, embd_pdrop=0.3)),
    "code that is not there": ("phi", {}, keys(auto_map={"AutoModelForCausalLM": "modeling_x.X"})),
    "from the future": ("llama", {}, keys(transformers_version="99.1", pretraining_tp=4, use_cache=False)),
    "a window that Llama has not": ("llama", {}, keys(sliding_window=8)),
    "a window that latent rows have not": ("deepseek_v3", {}, keys(sliding_window=8)),
    "windows in some layers": ("qwen2", WINDOWS, keys("layer_types")),
    "windows that are off": ("qwen2", {}, keys("layer_types", use_sliding_window=False, sliding_window=8)),
    "one expert": ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}, nothing),
    "experts in some layers": ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 3}, nothing),
    "odd ids": ("llama", {}, keys(eos_token_id=[2, 3], pad_token_id=-1, bos_token_id=None)),
}  # fmt: skip
"""Kind, what it is built with, and what somebody did to the folder."""
FEW = {"no caps", "a window that Llama has not", "outputs that nobody reads", "shards below", "odd heads", "no epsilon"}

REFUSED: dict[str, tuple[str, dict[str, Any], Edit, str]] = {
    "no head": ("llama", {}, without("lm_head"), "missing: lm_head.weight"),
    "no biases": ("qwen2", {}, without(".bias"), "and 3 more"),
    "names of a wrapper": ("llama", {}, renamed(lambda name: f"module.{name}"), "unexpected: module.lm_head.weight"),
    "another vocab": ("llama", {}, keys(vocab_size=160), "[131, 64] instead of [160, 64]"),
    "fewer layers": ("llama", {"num_hidden_layers": 3}, keys(num_hidden_layers=2), "unexpected: model.layers.2"),
    "other heads": ("qwen3", {"head_dim": 128}, keys(head_dim=16), "k_norm.weight [128] instead of [16]"),
    "a text for a switch": ("qwen3", {}, keys(tie_word_embeddings="false"), "write true or false, without quotes"),
    "no vocab": ("llama", {}, keys("vocab_size"), "the key 'vocab_size' is missing"),
    "two sets of weights": ("phi", {}, sharded(2, keeps=True), "stands beside an index that names other files"),
    "an encoder's": ("llama", {}, keys(is_encoder_decoder=True), "is_encoder_decoder = True"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.full) for n in SERVED])
def test_it_is_served_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    """A prompt in chunks, and what is decoded."""
    kind, changes, edit = SERVED[name]
    make_checkpoint(tmp_path, kind, seed=3, **changes)
    edit(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    model.config.return_dict, model.config.use_cache = True, False
    assert max(alone(tmp_path, model.eval().requires_grad_(False), dtype="float32")) <= MOST


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    """With what is wrong, and no error of Python in it."""
    kind, changes, edit, said = REFUSED[name]
    model = make_checkpoint(tmp_path, kind, seed=3, **changes)
    edit(tmp_path)
    with pytest.raises(ConfigError) as info:
        alone(tmp_path, model, dtype="float32")
    line = str(info.value).replace(str(tmp_path), "FOLDER")
    assert said in line
    assert len(line) <= LONGEST
    assert "\n" not in line
    assert "Error" not in line


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma2", marks=pytest.mark.full)])
def test_a_gguf_file_of_it_is_served_as_well(kind: str, tmp_path: Path) -> None:
    """With odd heads and a tied head."""
    (tmp_path / "in").mkdir()
    scale = {"query_pre_attn_scalar": ODD["head_dim"]} if kind == "gemma2" else {}  # such a file has no other
    model = make_checkpoint(tmp_path / "in", kind, seed=3, **ODD, **scale, tie_word_embeddings=True)
    write_gguf(tmp_path / "in", tmp_path / "model.gguf")
    assert max(alone(tmp_path / "model.gguf", model, dtype="float32")) <= MOST


SHAPES = frozenset({"head_dim", "num_key_value_heads", "n_shared_experts", "moe_num_shared_experts", "q_lora_rank"})
SHAPES |= {"first_k_dense_replace", "n_routed_experts", "vocab_size_per_layer_input"}
"""Keys that the tensors' shapes give away, so that a wrong guess ends in a refusal."""
OTHERS: dict[str, Any] = {
    **{"sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0, "logit_scale": 0.3},
    **{"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1},
    **{"partial_rotary_factor": 0.5, "query_pre_attn_scalar": 99, "norm_topk_prob": True, "n_group": 2},
    **{"routed_scaling_factor": 1.7, "scoring_func": "softmax", "attention_chunk_size": 8, "rope_interleave": True},
    **{"use_sliding_window": True, "attn_temperature_tuning": True, "hidden_activation": "gelu", "scale_emb": 12},
    **{"rms_norm_eps": 0.1, "layer_norm_eps": 0.1, "norm_eps": 0.1, "no_rope_layer_interval": 2, "topk_group": 1},
    **{"use_parallel_residual": True, "parallel_attn": True, "scale_depth": 1.4, "rotary_pct": 0.5},
}
"""Keys with which some architecture computes something else, and no tensor shows it."""


def file_of(config: Any) -> dict[str, Any]:
    """Return what transformers writes of a config, with every key."""
    written = json.loads(config.to_json_string(use_diff=False))
    return {**written, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]}


def meaning(given: Mapping[str, Any]) -> ModelConfig | None:
    """Return what is made of a file but for its size; None where it is refused."""
    try:
        return replace(read(dict(given)), num_params=None)
    except ModelError:
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_missing_means_what_transformers_takes_it_for(kind: str) -> None:
    """Unless it is refused: each key left out in turn, against the file with transformers' default in its place."""
    given = file_of(config_of(kind))
    differing = []
    for key in given.keys() - SHAPES - {"architectures", "model_type", "dtype", "transformers_version"}:
        less = {name: value for name, value in given.items() if name != key}
        try:
            told = file_of(CONFIG_MAPPING[kind](**{name: less[name] for name in less if name != "architectures"}))
        except Exception:  # its own check of what is left, of any type
            continue
        found = meaning(less)
        if found is not None and found != meaning(told):
            differing.append(key)
    assert not differing


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_transformers_does_not_know_changes_nothing(kind: str) -> None:
    """It is refused, or without meaning, as there."""
    config = config_of(kind)
    given = file_of(config)
    known = given.keys() | config.attribute_map.keys()
    found = {key: meaning({**given, key: value}) for key, value in OTHERS.items() if key not in known}
    assert not [key for key, made in found.items() if made is not None and made != meaning(given)]
