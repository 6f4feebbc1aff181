"""Quantised checkpoints as files: gpt-oss as published, shards, experts in one tensor, and what is no matrix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import make_checkpoint
from packers import METHODS
from quantised_models import loaded, logits, make, make_gpt_oss, pack_stacked, same
from safetensors.torch import load_file, save_file

from dovetail.sdk.layers.packed import PackedLinear
from dovetail_backends.kernels.cpu import CpuKernels


def test_gpt_oss_as_published(tmp_path: Path) -> None:
    """Blocks and scales of all experts in one tensor each, gate and up in turns, attention plain: equal logits."""
    same(logits(make_gpt_oss(tmp_path), "mxfp4"), logits(tmp_path / "plain"))


def test_forms_without_a_product_work_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written out today multiplies packed as well, which is what kernels are compared with."""
    for number, way in enumerate(("fp8-blocks", "fp8-rows", "fp8-tensor", "mxfp8", "ct-mxfp4", "ct-float-blocks")):
        folder = make(tmp_path / str(number), way)
        monkeypatch.setattr(CpuKernels, "keeps_packed", lambda _, ask: True)
        model, read = loaded(folder, METHODS[way].plugin)
        assert isinstance(model.layers[0].mlp.down, PackedLinear)
        assert not read.notes
        mine = logits(folder, METHODS[way].plugin)
        monkeypatch.undo()
        same(mine, logits(folder.with_name("plain")))


def test_a_weight_and_its_scale_in_two_files(tmp_path: Path) -> None:
    """Shards are cut between tensors, not between modules."""
    folder = make(tmp_path, "gptq-asymmetric")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {name: f"model-{index % 3 + 1:05}-of-00003.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    same(logits(folder, "gptq"), logits(folder.with_name("plain")))


def test_scales_of_activations_and_caches_are_left_out(tmp_path: Path) -> None:
    """They are neither missing nor surplus, and the table says that the cache keeps its dtype."""
    folder = make(tmp_path, "fp8-tensor")
    file = folder / "model.safetensors"
    scales = {f"model.layers.0.self_attn.{each}_scale": torch.tensor(0.5) for each in ("k", "v")}
    save_file({**load_file(file), **scales}, file)
    _, read = loaded(folder, "fp8")
    assert any("written out: no product for it on cpu" in note for note in read.notes)
    assert any("cache" in note for note in read.notes)
    same(logits(folder, "fp8"), logits(folder.with_name("plain")))


@pytest.mark.parametrize("stays", [False, True])
def test_experts_in_one_tensor(stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts' fp8 with the scales of their blocks, written out and packed: as each expert by itself."""
    make_checkpoint(tmp_path / "plain", "granitemoe")
    pack_stacked(tmp_path / "plain", tmp_path / "packed", METHODS["fp8-blocks"])
    if stays:
        monkeypatch.setattr(CpuKernels, "keeps_packed", lambda _, ask: True)
    same(logits(tmp_path / "packed", "fp8"), logits(tmp_path / "plain"))


@pytest.mark.parametrize("way", ["nf4", "nf4-nested", "bnb-int8", "fp8-rows", "ct-int4"])
def test_what_is_no_matrix_of_the_model_is_written_out(way: str, tmp_path: Path) -> None:
    """Tools pack latent attention's second matrix and the output head, too, which models use from other sides."""
    make_checkpoint(tmp_path / "plain", "deepseek_v3", vocab_size=136, moe_intermediate_size=64)
    method, file = METHODS[way], tmp_path / "plain/model.safetensors"
    tensors, packed = load_file(file), {}
    for name, tensor in list(tensors.items()):
        if not name.endswith(("kv_b_proj.weight", "lm_head.weight")):
            packed[name] = tensor
            continue
        parts = method.pack(tensor)
        packed |= {name.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in parts.items()}
        tensors[name] = method.unpack(parts).contiguous()
    assert len(packed) > len(tensors)
    save_file(tensors, file)
    config = json.loads((tmp_path / "plain/config.json").read_text())
    config["quantization_config"] = dict(method.config)
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed/config.json").write_text(json.dumps(config))
    save_file(packed, tmp_path / "packed/model.safetensors")
    same(logits(tmp_path / "packed", method.plugin), logits(tmp_path / "plain"))
