"""A model that is tied by its configuration, and whose files have an output head all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.messages import SamplerParams
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail_models.qwen3 import Qwen3
from dovetail_testing.engine import generate, tokens
from dovetail_testing.models import make_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    return make_model(tmp_path, "Qwen3ForCausalLM", num_hidden_layers=1, tie_word_embeddings=False)


def tie(folder: Path) -> None:
    """Say in the configuration that the head is tied."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


def test_another_head_is_used_and_told(untied: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was dropped without a word, and every token came from the embedding."""
    params = SamplerParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    want = tokens(generate(untied, [[3, 5, 7]], params)[0])
    assert "lm_head" not in caplog.text
    tie(untied)
    assert tokens(generate(untied, [[3, 5, 7]], params)[0]) == want
    assert "the files have another lm_head: it is used" in caplog.text


@pytest.mark.parametrize("differs", [False, True], ids=["a copy", "another last number"])
def test_a_copy_of_the_embedding_is_none(differs: bool, untied: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Some tools write both names; every byte is compared."""
    tie(untied)
    file = untied / "model.safetensors"
    weights = load_file(file)
    weights[HEAD] = weights[EMBEDDING].clone()
    weights[HEAD][-1, -1] += differs
    save_file(weights, file)
    assert ModelFolder.read(untied).model_config(Qwen3.config_from_hf).tie_word_embeddings is not differs
    assert bool(caplog.records) is differs
    assert ModelFolder.read(untied, weights=False).model_config(Qwen3.config_from_hf).tie_word_embeddings


def test_a_quantised_head_is_one_of_its_own(untied: Path) -> None:
    """Numbers beside the head are never the embedding's."""
    tie(untied)
    file = untied / "model.safetensors"
    save_file({**load_file(file), "lm_head.weight_scale": torch.ones(1)}, file)
    assert not ModelFolder.read(untied).model_config(Qwen3.config_from_hf).tie_word_embeddings
