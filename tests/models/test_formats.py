"""Formats of the plugin kind `checkpoint`: who is asked, and what the core believes of a format's headers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.checkpoint.formats import Format, Formats
from dovetail.contracts.checkpoint import CheckpointFormat, Listing, TensorHeader
from dovetail.contracts.errors import ModelError, PluginError
from dovetail.demo import MODEL_DIR
from dovetail.plugins import Registry
from dovetail.processing.plugin_settings import PluginSettings
from dovetail.processing.prepare import prepare
from dovetail.runtime.checkpoint.files import Checkpoint
from dovetail.runtime.checkpoint.folder import ModelFolder

NAME, MOST = "model.raw", 100


class Raw(CheckpointFormat):
    """Says what a test has it say."""

    named: Sequence[str] = (NAME,)
    said: Any = ()

    @classmethod
    def claims(cls, listing: Listing) -> Sequence[str]:
        return cls.named if NAME in listing.names else ()

    def headers(self) -> Iterable[TensorHeader]:
        yield from self.said(self.files[0]) if callable(self.said) else self.said

    def tensor(self, header: TensorHeader, data: torch.Tensor) -> torch.Tensor:
        return data.view(torch.float32).view(header.shape)


def header(file: Path, name: str = "a", shape: tuple[int, ...] = (4, 4), start: int = 0, **more: Any) -> TensorHeader:
    return TensorHeader(name, file, shape, "F32", start=start, **more)


def model_of(folder: Path, num_bytes: int = 256, **says: Any) -> ModelFolder:
    """A folder of a format that says something, with a configuration of one layer."""
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 4, "vocab_size": 4}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / NAME).write_bytes(bytes(num_bytes))
    cls = type("Raw", (Raw,), says)
    return ModelFolder(folder, formats=Formats(lambda name: [Format("acme:raw", cls)]))


def huge(file: Path) -> Iterable[TensorHeader]:
    yield from (header(file, f"t{index}", (0,)) for index in range(MOST + 1))
    pytest.fail("more is read than a model may have")


FAULTS: dict[str, tuple[Any, type[Exception], str]] = {
    "a size that lies": (lambda f: [header(f, shape=(1 << 30, 1 << 20))], ModelError, "ends at byte 4,503,.* of 256"),
    "outside of the file": (lambda f: [header(f, start=1 << 62)], ModelError, "ends at byte .* of 256"),
    "before the file": (lambda f: [header(f, start=-8)], ModelError, "get the file again"),
    "a negative axis": (lambda f: [header(f, shape=(-4, -4))], ModelError, "has the shape"),
    "an axis that is no number": (lambda f: [header(f, shape=(True, 2))], ModelError, "has the shape"),
    "a thousand axes": (lambda f: [header(f, shape=(1,) * 1000)], ModelError, "has the shape"),
    "fewer bytes than none": (lambda f: [header(f, num_stored=1 << 40)], ModelError, "ends at byte"),
    "twice": (lambda f: [header(f), header(f, start=64)], ModelError, "a is there twice"),
    "on one another": (lambda f: [header(f, f"t{i}", (8, 4)) for i in range(3)], ModelError, "lie on one another"),
    "too many empty ones": (huge, ModelError, "claim more than 100 tensors"),
    "in another file": (lambda f: [header(f.parent / ".." / "x")], PluginError, "no header of a tensor in its files"),
    "no header": (lambda f: ["a"], PluginError, "no header of a tensor in its files"),
    "a bug": (lambda f: [1 // 0], PluginError, "acme:raw raised ZeroDivisionError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_headers_claim_is_held_against_the_files(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a format says of its tensors is refused by name; no more are read than a model may have."""
    monkeypatch.setattr("dovetail.runtime.checkpoint.weight_size.MAX_TENSORS", MOST)
    said, error, match = FAULTS[fault]
    model = model_of(tmp_path, said=staticmethod(said))
    with pytest.raises(error, match=match):
        model.check()


def test_a_configuration_is_held_against_any_formats_headers(tmp_path: Path) -> None:
    """More layers, or wider ones, than its tensors have are refused, as of safetensors."""
    model = model_of(tmp_path, said=staticmethod(lambda f: [header(f, "model.layers.0.a")]))
    model.check()
    config = {**model.config, "num_hidden_layers": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="num_hidden_layers = 9, and the weights are of 1 layers"):
        ModelFolder(tmp_path, formats=model.formats).check()


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "/etc/passwd", "a\0b", 5, "absent"])
def test_only_files_of_the_folder_are_claimed(name: Any, tmp_path: Path) -> None:
    """A format names files by their bare names; one that is not there is named."""
    with pytest.raises((PluginError, ModelError), match=r"only files of the folder|cannot be read"):
        _ = model_of(tmp_path, named=(name,)).stored


def test_a_file_that_holds_nothing_is_named_before_it_is_read(tmp_path: Path) -> None:
    """An empty file, and a pointer of Git LFS."""
    with pytest.raises(ModelError, match="is empty; download it again"):
        _ = model_of(tmp_path, num_bytes=0).stored
    (tmp_path / NAME).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match="Git LFS pointer"):
        _ = ModelFolder(tmp_path, formats=Formats(lambda name: [Format("acme:raw", Raw)])).stored


def test_a_tensor_is_what_its_header_says(tmp_path: Path) -> None:
    """Another shape or dtype is the plugin's fault, and is named."""
    model = model_of(tmp_path, said=staticmethod(lambda f: [header(f, "model.layers.0.a")]))
    with Checkpoint.of_folder(model) as checkpoint:
        assert checkpoint.read("model.layers.0.a").tolist() == torch.zeros(4, 4).tolist()
    wrong = lambda self, header, data: data  # noqa: E731 - a method of a class
    model = model_of(tmp_path, said=staticmethod(lambda f: [header(f, "model.layers.0.a")]), tensor=wrong)
    with (
        Checkpoint.of_folder(model) as checkpoint,
        pytest.raises(PluginError, match=r"makes model\.layers\.0\.a another"),
    ):
        checkpoint.read("model.layers.0.a")


def test_two_formats_on_one_path_are_an_error_with_the_way_out(tmp_path: Path) -> None:
    """Nobody wins by chance."""
    model_of(tmp_path)
    both = Formats(lambda name: [Format("acme:raw", Raw), Format("other:raw", Raw)])
    with pytest.raises(ModelError, match=r"acme:raw and other:raw read it; choose one with --load-format"):
        both.at(tmp_path)


def test_names_of_the_flag(tmp_path: Path) -> None:
    """A name that is not installed, one whose files are not there, and the core's own reader of whatever else is."""
    for name, match in (("gguff", "'gguff': not installed; .*did you mean gguf"), ("gguf", "finds no file of its own")):
        with pytest.raises((PluginError, ModelError), match=match):
            prepare(PluginSettings(model_path=str(MODEL_DIR), load_format=name, device="cpu"))
    asked: list[str | None] = []
    own = Formats(lambda name: asked.append(name) or [], "safetensors")  # type: ignore[func-returns-value]
    (tmp_path / NAME).write_bytes(b"x")
    assert own.at(tmp_path) is None
    assert own.used(tmp_path) == asked == []


def test_a_plan_holds_the_formats_that_a_start_needs(tmp_path: Path) -> None:
    """A folder of safetensors needs none; made-up weights need theirs; what a plan does not hold is not asked."""
    for name, used in (("auto", []), ("safetensors", []), ("dummy", ["dummy"])):
        plan = prepare(PluginSettings(model_path=str(MODEL_DIR), load_format=name, device="cpu")).plan
        assert [planned.name for planned in plan.of_kind("checkpoint")] == used
    denied = {"plugin_deny": ["dovetail-llm:dummy"], "load_format": "dummy", "device": "cpu"}
    with pytest.raises(PluginError, match="dummy"):
        prepare(PluginSettings(model_path=str(MODEL_DIR), **denied))


def test_formats_are_asked_without_torch(tmp_path: Path) -> None:
    """Reading the head of a file of any installed format, and refusing it, imports neither torch nor tokenizers."""
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(64))
    code = (
        "import sys; from pathlib import Path; from dovetail.checkpoint.formats import Formats\n"
        f"stored = Formats.installed().at(Path({str(tmp_path)!r}))\n"
        "try: stored.ask('config')\nexcept Exception as e: print(type(e).__name__)\n"
        "print(sorted({'torch', 'tokenizers', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "ModelError\n[]\n"
    assert {"gguf", "dummy"} <= set(Registry.scan().names("checkpoint"))


def test_a_name_chooses_among_several(tmp_path: Path) -> None:
    """`--load-format` decides for the model's path, also where the tokenizer is in it."""
    model_of(tmp_path)
    found = {"acme:raw": Format("acme:raw", Raw), "other:raw": Format("other:raw", Raw)}
    named = Formats(lambda name: [found[name]] if name else found.values(), "other:raw")
    assert named.used(tmp_path, tmp_path) == ["other:raw"]
    assert (stored := named.at(tmp_path)) is not None
    assert stored.name == "other:raw"
