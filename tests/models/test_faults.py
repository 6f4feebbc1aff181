"""One tensor deleted, renamed, cut short or NaN is named with its file: five layouts, by plugins and transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from dovetail.contracts.errors import DovetailError
from dovetail_testing.engine import make_core

TENSORS = {
    "llama": "model.layers.1.mlp.up_proj.weight",
    "phi3": "model.layers.0.self_attn.qkv_proj.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.3.down_proj.weight",
    "gpt_oss": "model.layers.0.mlp.experts.gate_up_proj",
    "deepseek_v3": "model.layers.2.self_attn.kv_b_proj.weight",
}
"""A tensor of each: of a plain, a fused and an expert's matrix, of all experts', and of what makes latent rows."""
FILE = "model.safetensors"
Change = Callable[[dict[str, Tensor], str], list[str]]


def deleted(tensors: dict[str, Tensor], name: str) -> list[str]:
    del tensors[name]
    return [name]


def renamed(tensors: dict[str, Tensor], name: str) -> list[str]:
    other = name.replace("model.layers", "model.layer_s")
    tensors[other] = tensors.pop(name)
    return [name, other, FILE]


def shortened(tensors: dict[str, Tensor], name: str) -> list[str]:
    tensors[name] = tensors[name][..., :-2].contiguous()
    return [name, FILE]


def poisoned(tensors: dict[str, Tensor], name: str) -> list[str]:
    tensors[name].view(-1)[5] = torch.nan
    return [name, FILE]


@pytest.fixture(scope="module", params=TENSORS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A sound checkpoint, and the tensor that will not be."""
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(folder, request.param)
    return folder, TENSORS[request.param]


@pytest.mark.sampled
@pytest.mark.parametrize("change", [deleted, renamed, shortened, poisoned])
@pytest.mark.parametrize("model_impl", ["dovetail", "transformers"])
def test_a_faulty_tensor_is_named(checkpoint: Any, model_impl: str, change: Change, tmp_path: Path) -> None:
    """By the name that the checkpoint has for it."""
    folder, name = checkpoint
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    tensors = load_file(broken / FILE)
    named = change(tensors, name)
    save_file(tensors, broken / FILE, metadata={"format": "pt"})
    with pytest.raises(DovetailError) as caught:
        make_core(broken, page_size=4, max_total_tokens=64, model_impl=model_impl)
    assert [part for part in named if part not in str(caught.value)] == [], str(caught.value)
