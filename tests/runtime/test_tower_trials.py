"""The vision tower runs on blank images before an engine is ready."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.contracts.processor import Arrays
from dovetail.plugins import Registry, make_plan
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.device.row_images import RowImages
from dovetail.runtime.image_processor import processor_of
from dovetail.runtime.start import capture, tower

sys.path.append(str(Path(__file__).parents[1] / "models"))  # the models that see

from seeing import make_vl


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "internvl", "gemma4"])
def test_every_size_is_encoded(kind: str, tmp_path: Path) -> None:
    """A processor's arrays of blank images are what its tower takes; a rehearsal leaves all of them to be run."""
    make_vl(tmp_path, kind)
    folder = ModelFolder(tmp_path)
    plan = make_plan(Registry.scan(), model=folder.architecture, attention_backend="torch_native", processor="auto")
    processor = processor_of(plan, folder)
    assert processor is not None
    seen: list[Arrays] = []

    def encode(arrays: Any) -> Tensor:
        seen.append(arrays)
        return torch.zeros(1, 1, 1)

    images = RowImages(encode, 1, torch.device("cpu"), has_sections=False)
    trials = tower.TowerTrials(images, tower.blank_images(processor, 1 << 20))
    trials.rehearse()
    assert trials.num_left == len(seen) == len(tower.SIZES)
    while trials.num_left:
        trials.run_next()
    assert len(seen) == 2 * len(tower.SIZES)
    for size, arrays in zip(tower.SIZES, seen, strict=False):
        assert len(arrays["patches"]) == processor.layout(*size).num_patches


def test_what_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No image is larger than those that memory was planned for; without Pillow, none is run."""
    make_vl(tmp_path)
    folder = ModelFolder(tmp_path)
    plan = make_plan(Registry.scan(), model=folder.architecture, attention_backend="torch_native", processor="auto")
    processor = processor_of(plan, folder)
    assert processor is not None
    sizes = sorted(processor.layout(*size).num_patches for size in tower.SIZES)
    for most, num in ((sizes[0] - 1, 0), (sizes[0], 1), (sizes[-1] - 1, 2), (sizes[-1], 3)):
        assert len(list(tower.blank_images(processor, most))) == num
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert list(tower.blank_images(processor, 1 << 20)) == []


def test_a_start_prepares_what_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are compiled, a start runs the tower; elsewhere nothing has to be prepared."""
    make_vl(tmp_path)
    folder, cpu = ModelFolder(tmp_path), torch.device("cpu")
    plan = make_plan(Registry.scan(), model=folder.architecture, attention_backend="torch_native", processor="auto")
    images = RowImages(lambda arrays: torch.zeros(1, 1, 1), 1, cpu, has_sections=False)
    made: Any = SimpleNamespace(state=SimpleNamespace(images=images))
    checked: Any = SimpleNamespace(
        device=cpu, settings=SimpleNamespace(folder=tmp_path), plugins=SimpleNamespace(plan=plan)
    )
    planned: Any = SimpleNamespace(image_patches=1 << 20)
    assert capture._tower(checked, planned, made) is None
    monkeypatch.setattr(type(device_of(cpu)), "compiles", True)
    trials = capture._tower(checked, planned, made)
    assert trials is not None
    assert trials.num_left == len(tower.SIZES)
    made.state.images = None
    assert capture._tower(checked, planned, made) is None


@pytest.mark.parametrize(
    ("seconds", "num_layers", "most", "num_runs"),
    [
        (lambda num: num * (6 * 32 + num) * 1e-5, 1, 1132, 3),  # 1,132 * (192 + 1,132) * 1e-5 is 15 s
        (lambda num: num * (6 * 32 + num) * 1e-5, 4, 2355, 3),
        (lambda num: num * (6 * 32 + num) * 1e-4, 1, 303, 3),
        (lambda num: num * (6 * 32 + num) * 1e-4, 0, 303, 3),  # nothing counts layers
        (lambda num: 1e-9, 1, 5000, 4),  # memory is for no more
        (lambda num: 1000.0, 1, 16, 1),  # as many as the smallest image has
    ],
)
def test_a_cpu_bounds_images_by_time(seconds: Any, num_layers: int, most: int, num_runs: int, tmp_path: Path) -> None:
    """A layer of the largest image takes 15 s by what small ones take, and the smallest is always possible."""
    make_vl(tmp_path)
    folder = ModelFolder(tmp_path)
    plan = make_plan(Registry.scan(), model=folder.architecture, attention_backend="torch_native", processor="auto")
    processor = processor_of(plan, folder)
    assert processor is not None
    now, runs = [0.0], []

    def encode(arrays: Any) -> Tensor:
        runs.append(len(arrays["patches"]))
        now[0] += seconds(runs[-1])
        return torch.zeros(1, 1, 1)

    def layers() -> int:
        return num_layers * len(runs)

    images = RowImages(encode, 1, torch.device("cpu"), has_sections=False)
    assert tower.timed_patches(images, processor, 32, 5000, layers, lambda: now[0]) == most
    assert len(runs) == num_runs
    assert tower.timed_patches(images, processor, 32, 5, layers, lambda: now[0]) == 0  # no image is as small
