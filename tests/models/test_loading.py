"""Checkpoints and configs: what loads, and what is said about what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.messages import SamplerParams
from dovetail.runtime.hf_config import architecture, read_config
from dovetail.sdk.config import dense_config
from dovetail_testing.engine import generate
from dovetail_testing.models import make_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fresh tiny Llama, to be damaged."""
    return make_model(tmp_path / "model", "LlamaForCausalLM")


def run(folder: Path, **changes: Any) -> None:
    """Start an engine on a checkpoint and generate one token."""
    generate(folder, [[1]], SamplerParams(max_tokens=1), **changes)


def edit(folder: Path, **changes: Any) -> None:
    """Change tensors of the checkpoint: None removes one."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


MISSING = (
    r"missing: model\.layers\.1\.self_attn\.k_proj\.weight \(layers\.1\.attention\.qkv\.weight\[k\]\), norm\.weight"
)


def test_missing_weights_are_named_down_to_the_part(folder: Path) -> None:
    """A missing part of a fused weight, as the checkpoint would name it, and a missing norm are both in the message."""
    edit(folder, **{"model.layers.1.self_attn.k_proj.weight": None, "model.norm.weight": None})
    with pytest.raises(ConfigError, match=MISSING):
        run(folder)


def test_unexpected_weights_are_named(folder: Path) -> None:
    """A tensor that the model does not have is in the message."""
    edit(folder, **{"model.layers.0.adapter.weight": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"unexpected: model\.layers\.0\.adapter\.weight \(model\.safetensors\)"):
        run(folder)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    """A tensor of another shape is refused with the shape it has and the one expected."""
    edit(folder, **{"model.norm.weight": torch.zeros(5)})
    with pytest.raises(ConfigError, match=r"wrong shape or type: model\.norm\.weight \[5\] instead of \[64\] \("):
        run(folder)


def test_a_tied_checkpoint_may_repeat_the_head(tmp_path: Path) -> None:
    """With tied embeddings a stored lm_head.weight is not needed and not an error."""
    folder = make_model(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
    edit(folder, **{"lm_head.weight": torch.zeros(199, 64)})
    run(folder)


def test_pickled_weights_are_refused_with_the_way_to_convert(folder: Path) -> None:
    """A folder with only `.bin` weights names them and the converter."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*save_pretrained"):
        run(folder)


def test_a_broken_file_is_named(folder: Path) -> None:
    """A truncated safetensors file is an error that names the file."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors: broken safetensors file"):
        run(folder)


def test_an_index_that_names_an_absent_shard_is_refused(tmp_path: Path) -> None:
    """A missing shard is named before anything is loaded."""
    folder = make_model(tmp_path, "LlamaForCausalLM", shard_size="100KB")
    sorted(folder.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(ConfigError, match="model-00002-of-"):
        run(folder)


def test_dummy_weights_need_no_checkpoint(folder: Path) -> None:
    """`--load-format dummy` serves a folder that holds only a config."""
    (folder / "model.safetensors").unlink()
    run(folder, load_format="dummy")


def test_a_context_beyond_the_model_s_positions_is_refused(folder: Path) -> None:
    """A context length that the model was not made for names both numbers and the way out."""
    with pytest.raises(ConfigError, match=r"--context-length 600: the model has 512 positions.*rope scaling"):
        run(folder, context_length=600)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_dtype_serves(folder: Path, dtype: str) -> None:
    """Weights are converted to the dtype asked for."""
    run(folder, dtype=dtype)


BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def test_both_spellings_of_config_mean_the_same() -> None:
    """transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`) agree."""
    scaling = {"factor": 2.0, "type": "linear"}
    old = dense_config({**BASE, "rope_theta": 5e5, "rope_scaling": scaling, "torch_dtype": "bfloat16"})
    rope = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    new = dense_config({**BASE, "rope_parameters": rope, "dtype": "bfloat16"})
    assert old == new
    assert (new.rope.theta, new.rope.kind, new.rope.params, new.dtype) == (5e5, "linear", {"factor": 2.0}, "bfloat16")
    plain = dense_config({**BASE, "rope_scaling": None})
    assert (plain.rope.kind, plain.rope.theta, plain.dtype) == ("default", 1e4, "float32")
    assert {(spec.num_kv_heads, spec.qk_dim, spec.v_dim) for spec in plain.layers} == {(2, 4, 4)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"torch_dtype": "int8"}, "dtype 'int8' is not supported"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope kind 'spiral' is not supported; possible: default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs the parameter 'factor'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ],
)
def test_a_config_that_cannot_be_served_says_which_key(change: dict[str, Any], message: str, folder: Path) -> None:
    """Unsupported or missing values are named with what is possible."""
    hf = {**json.loads((folder / "config.json").read_text()), **change}
    if "rope_scaling" in change or "torch_dtype" in change:
        hf.pop("rope_parameters", None)
        hf.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in hf.items() if v is not None}))
    with pytest.raises(ConfigError, match=message):
        run(folder)


def test_a_folder_that_is_no_model_says_what_is_missing(tmp_path: Path) -> None:
    """No folder, no config, no JSON, no architecture: each has its own message."""
    with pytest.raises(ModelError, match="no such folder"):
        read_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="architectures"):
        architecture({}, tmp_path)
