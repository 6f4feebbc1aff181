"""Llama 4 as quantisers write it: experts one by one and packed, the tower as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

from packers import METHODS
from quantised_models import pack_model
from safetensors.torch import load_file, save_file
from seeing import Prompts, make_vl, picture
from torch import Tensor

from dovetail.messages import Submit
from dovetail_testing.engine import serve, tokens


def divide_experts(folder: Path) -> None:
    """Store each expert's matrices by themselves, `[out, in]`."""
    file, made = folder / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        parts: dict[str, Tensor] = {name: tensor}
        if name.endswith("experts.gate_up_proj"):
            pairs = {index: expert.T.chunk(2) for index, expert in enumerate(tensor)}
            parts = {f"{index}.gate_proj": gate for index, (gate, _) in pairs.items()}
            parts |= {f"{index}.up_proj": up for index, (_, up) in pairs.items()}
        elif name.endswith("experts.down_proj"):
            parts = {f"{index}.down_proj": expert.T for index, expert in enumerate(tensor)}
        if name not in parts:
            parts = {f"{name.rpartition('.')[0]}.{part}.weight": matrix for part, matrix in parts.items()}
        made |= {part: matrix.contiguous() for part, matrix in parts.items()}
    save_file(made, file, {"format": "pt"})


def said(folder: Path, submits: list[Submit]) -> list[list[int]]:
    return [tokens(deltas) for deltas in serve(folder, submits, page_size=4)]


def test_experts_may_stand_alone_and_be_packed(tmp_path: Path) -> None:
    """Divided experts give the same tokens about an image; packed ones give those of what was packed."""
    make_vl(tmp_path / "plain", "llama4", intermediate_size=64)
    prompts = Prompts(tmp_path / "plain", tmp_path / "files")
    submits = [prompts.submit([[3, 4, 5], picture(57, 91), [6, 7]]), prompts.submit([[8, 9]])]
    shutil.copytree(tmp_path / "plain", tmp_path / "divided")
    divide_experts(tmp_path / "divided")
    assert said(tmp_path / "divided", submits) == said(tmp_path / "plain", submits)
    num = pack_model(tmp_path / "divided", tmp_path / "packed", METHODS["ct-int4"], only="language_model")
    names = load_file(tmp_path / "packed/model.safetensors").keys()
    assert num == sum(name.endswith(".weight_packed") for name in names) > 60
    assert not any("vision" in name and "packed" in name for name in names)
    assert said(tmp_path / "packed", submits) == said(tmp_path / "divided", submits)
