"""Sizes that a checkpoint claims are held against its own tensors before torch has a say."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from quantised_models import plugin_of

from dovetail.base.model_files import read_json
from dovetail.contracts.errors import ModelError
from dovetail.demo import MODEL_DIR
from dovetail.processing.embeddings import Dense, Embedder
from dovetail.processing.plugin_settings import PluginSettings
from dovetail.processing.prepare import check_model
from dovetail.runtime.checkpoint.claims import MAX_INTEGER, CheckpointContents, check_claims, check_params, held
from dovetail.runtime.checkpoint.folder import EmbeddingModule, ModelFolder
from dovetail.runtime.checkpoint.quantization import factory_of
from dovetail.runtime.checkpoint.weight_files import index_of
from dovetail_models.qwen3 import Qwen3
from dovetail_server.quantize.partial import check_new

DEMO: dict[str, Any] = json.loads((MODEL_DIR / "config.json").read_text())
HUGE = 1 << 62


def folder_of(tmp_path: Path, config: Mapping[str, Any]) -> Path:
    """Make a folder with the demo model's weights and another config."""
    (tmp_path / "model.safetensors").symlink_to(MODEL_DIR / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000; a model has from 1 to 10,000 layers"),
        ({"num_hidden_layers": 9, "layer_types": None}, "num_hidden_layers = 9, and the weights are of 8 layers"),
        ({"max_position_embeddings": HUGE}, r"max_position_embeddings = 46\d+; at most 268,435,456 tokens"),
        (
            {"vocab_size": 1 << 31},
            "vocab_size = 2147483648, and the longest axis of a tensor is 4,096; at mo",
        ),
        ({"head_dim": 1 << 31}, "head_dim = 2147483648, and"),
        ({"head_dim": 1 << 15}, "num_attention_heads x head_dim = 262144, and"),
        ({"num_attention_heads": 60_000, "head_dim": 1, "num_key_value_heads": 1}, "a model of .* parameters, and the"),
        ({"hidden_size": 65_536}, "a model of .* parameters, and the weights hold 7,607,552 numbers"),
        ({"intermediate_size": 1.5}, "intermediate_size = 1.5; give a whole number"),
        ({"num_key_value_heads": True}, "num_key_value_heads = True; give a whole number"),
        ({"mamba_d_conv": 4.5}, "mamba_d_conv = 4.5; give a whole number"),
        ({"num_experts_per_token": 1.5}, "num_experts_per_token = 1.5; give a whole number"),
        ({"q_lora_rank": []}, r"q_lora_rank = \[\]; give a whole number"),
        ({"mamba_n_groups": {}}, r"mamba_n_groups = \{\}; give a whole number"),
        ({"vocab_size": "4096"}, "vocab_size = '4096'; give a whole number"),
        ({"sliding_window": float("inf"), "use_sliding_window": True}, "sliding_window = inf; give a whole number"),
        ({"head_dim": float("nan")}, r"head_dim is not a number \(NaN\)"),
        ({"embedding_multiplier": float("nan")}, r"embedding_multiplier is not a number \(NaN\)"),
        ({"their_own_key": 1 << 40}, f"their_own_key = 1099511627776; at most {MAX_INTEGER:,} is possible"),
        ({"moe": {"num_experts": [4, HUGE]}}, r"moe\.num_experts = 46\d+, and the longest axis"),
        ({"text_config": {"num_hidden_layers": 99}}, r"text_config\.num_hidden_layers = 99, and the weights are of 8"),
    ],
    ids=str,
)
def test_a_claim_is_held_against_the_files(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Any key and kind of number, nested or in a list: named with what there is, before anything is made for it."""
    with pytest.raises(ModelError, match=message):
        ModelFolder.read(folder_of(tmp_path, {**DEMO, **changes})).model_config(Qwen3.config_from_hf)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},  # an estimate, not the files' size: the head is missing, and the loader says so
        {"quantization_config": {"quant_method": "none", "bits": HUGE}},
        {"bos_token_id": -1, "seed": HUGE, "model_max_length": HUGE, "time_step_limit": [0.0, float("inf")]},
    ],
    ids=str,
)
def test_what_is_true_or_means_nothing_is_served(changes: dict[str, Any], tmp_path: Path) -> None:
    """The model itself, parts that are not served, ids and seeds."""
    read = ModelFolder.read(folder_of(tmp_path, {**DEMO, **changes}))
    assert read.model_config(Qwen3.config_from_hf).num_layers == 8


def test_dummies_have_bounds_of_their_own(tmp_path: Path) -> None:
    """Without weights there is nothing to compare with: 2^24 is the end."""
    read = ModelFolder.read(folder_of(tmp_path, {**DEMO, "vocab_size": 1 << 24}), weights=False)
    assert read.model_config(Qwen3.config_from_hf).vocab_size == 1 << 24
    with pytest.raises(ModelError, match="vocab_size = 16777217; at most 16,777,216 is possible"):
        check_claims({"vocab_size": (1 << 24) + 1})
    check_claims({"vision_config": {"hidden_size": HUGE, "depth": 1 << 40}, "sliding_window": False})


def test_what_files_hold() -> None:
    """Layers by any number in a name, the longest axis or two of three, packed numbers as many as fit."""
    tensors = [
        ("m.layers.0.q.weight", (4, 8, 16), 1),
        ("m.layers.1.experts.7.w", (64, 2), 16),
        ("m.layers.1.b", (3,), 1),
    ]
    assert held(tensors) == CheckpointContents(num_layers=2, longest=1024, num_numbers=512 + 2048 + 3)
    check_params(2 * 2563, held(tensors))
    with pytest.raises(ModelError, match="5,127 parameters, and the weights hold 2,563"):
        check_params(5127, held(tensors))


def test_a_config_nested_without_end_is_one_line(tmp_path: Path) -> None:
    """Objects, lists, and more than the parser itself takes."""
    for opened, closed, depth in (('{"a":', "}", 400), ("[", "]", 400), ("[", "]", 100_000)):
        text = '{"architectures": ["A"], "x": ' + opened * depth + "1" + closed * depth + "}"
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"nested deeper than 32 levels|cannot be read as JSON"):
            ModelFolder.read(tmp_path, weights=False)


def test_files_that_a_file_names_are_in_the_folder(tmp_path: Path) -> None:
    """An index and a list of modules that point elsewhere."""
    for name in ("../../secret.safetensors", "/etc/passwd", "a/../../b", "a\0b"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ModelError, match="only files in the folder are read"):
            index_of(tmp_path)
        (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": name}]))
        (tmp_path / "config.json").write_text(json.dumps(DEMO))
        assert "only files in the folder are read" in Embedder.of_folder(ModelFolder(tmp_path)).obstacle
        with pytest.raises(ModelError, match="only files in the folder are read"):
            ModelFolder.read(tmp_path, weights=False)


def test_a_json_file_has_a_size(tmp_path: Path) -> None:
    """What is larger than any config is not parsed."""
    file = tmp_path / "config.json"
    with file.open("wb") as opened:
        opened.truncate(9 << 20)
    with pytest.raises(ModelError, match="9,437,184 bytes; at most 8,388,608 are read"):
        read_json(file)


@pytest.mark.parametrize("value", ["<eos>", [1, "2"], 1.5, True, [HUGE], -2])
def test_ends_are_ids(value: object, tmp_path: Path) -> None:
    """Whatever else stands there is named."""
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id is .*; give the number of a token"):
        check_model(PluginSettings(model_path=str(folder_of(tmp_path, {**DEMO, "eos_token_id": value}))))


def test_a_dense_module_is_held_against_its_matrix(tmp_path: Path) -> None:
    """`out_features` is that of the file."""
    header = json.dumps({"linear.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))
    for size in (2, HUGE):
        (tmp_path / "config.json").write_text(json.dumps({"out_features": size}))
        if size == 2:
            assert Dense.of_module(EmbeddingModule("Dense", tmp_path)).out_features == 2
            continue
        with pytest.raises(ModelError, match=r"out_features is 4611686018427387904, and linear.weight is \[2, 3\]"):
            Dense.of_module(EmbeddingModule("Dense", tmp_path))


def test_a_new_folder_can_take_its_name(tmp_path: Path) -> None:
    """A link that points nowhere, or at an empty folder, is found before the work and not after it."""
    (tmp_path / "empty").mkdir()
    for name, target in (("dangling", "nowhere"), ("link", "empty")):
        (tmp_path / name).symlink_to(tmp_path / target)
        with pytest.raises(ModelError, match="is a symbolic link"):
            check_new(tmp_path / name)
    for fine in ("new", "empty", "a/b/c"):
        check_new(tmp_path / fine)
    for bad, match in (
        ("/", "mount point"),
        (str(tmp_path), "not an empty folder"),
        (f"{tmp_path}/..", "not an empty|a name"),
    ):
        with pytest.raises(ModelError, match=match):
            check_new(Path(bad))


def test_a_value_that_a_quantisation_cannot_read_is_the_files() -> None:
    """As for a model's plugin: one line, with what was raised."""
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": 7, "config_groups": {}}
    chosen = plugin_of("quantization", "compressed-tensors")
    with pytest.raises(ModelError, match=r"quantization_config: CompressedTensors raised TypeError: .*; correct conf"):
        factory_of(chosen, {"quantization_config": config}, (), [])
