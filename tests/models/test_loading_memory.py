"""Files while they are loaded: how much memory, in how many threads, and what of a file is read."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from packers import METHODS
from quantised_models import loaded, make_gpt_oss, pack_stacked, plugin_of
from safetensors.torch import load_file, save_file

from dovetail.contracts.checkpoint import TensorHeader
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.contracts.quantization import Conversion, FileTensor
from dovetail.runtime.checkpoint.files import Checkpoint, MappedFiles, open_checkpoint
from dovetail.runtime.checkpoint.weights import side_by_side
from dovetail_testing.conformance.model_runtime import TinyEngine
from dovetail_testing.models import make_model

CHILD = """
import sys
from pathlib import Path
import torch
from dovetail.contracts.layers import BuildContext
from dovetail_testing.targets import kernels_for, target_for
from dovetail.plugins import Registry
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.runtime.checkpoint.files import Checkpoint
from dovetail.runtime.checkpoint.quantization import converted, factory_of
from dovetail.runtime.checkpoint.weights import load_weights
from dovetail.runtime.hf_config import architecture, read_config
from dovetail.runtime.checkpoint.folder import ModelFolder

def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10

def plugin_of(kind, name):
    return import_planned(as_planned(Registry.scan().resolve(kind, name)))

def load(folder):
    hf = read_config(folder)
    plugin = plugin_of("model", architecture(hf, folder))
    config = plugin.config_from_hf(hf)
    rules = plugin.weight_map(config)
    read = converted(quantization, ModelFolder(folder), plugin, config, target_for("bfloat16"))
    with torch.inference_mode():
        factory = factory_of(quantization, hf, rules, read.headers)
        repacks = {"kernels": kernels_for()} if quantization is None else {}
        ctx = BuildContext(device=torch.device("cpu"), dtype=torch.bfloat16, factory=factory, **repacks)
        model = plugin.build(config, ctx)
        load_weights(model, rules, read)
    return model

small, large, method, fault = sys.argv[1:]
quantization = None if method == "plain" else plugin_of("quantization", method)
torch.set_num_threads(2)
if fault == "pages are kept":
    Checkpoint.release = lambda self, names, experts=None: None
if fault == "all at once":
    Checkpoint.parts = lambda self, header: [None]
kept = [load(Path(small))]
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
kept.append(load(Path(large)))
print(status("VmHWM") - before, status("VmRSS") - before)
"""
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model, and one of 100 MB; both in bfloat16."""
    root = tmp_path_factory.mktemp("models")
    small = make_model(root / "small", "LlamaForCausalLM", dtype="bfloat16")
    large = make_model(root / "large", "LlamaForCausalLM", num_hidden_layers=12, head_dim=64, dtype="bfloat16", **SIZES)
    file = large / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    return small, large


@pytest.mark.full
@pytest.mark.first(1)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is Linux's")
@pytest.mark.parametrize(
    ("method", "fault", "most"),
    [pytest.param("plain", "", 1.2, marks=pytest.mark.full), ("int8", "", 0.8), ("plain", "pages are kept", 0)],
)
def test_no_second_copy_of_a_model_is_held(method: str, fault: str, most: float, folders: tuple[Path, Path]) -> None:
    """The peak while a file loads is the model and a fifth of the file; the test sees pages that are not let go of."""
    size = (folders[1] / "model.safetensors").stat().st_size
    assert size > 90 << 20
    peak = told(folders, method, fault)[0] / size
    assert peak > 1.7 if fault else 0.4 < peak < most


def told(folders: tuple[Path, Path], method: str, fault: str) -> tuple[int, int]:
    """Return the bytes that the second folder's model takes at the peak of its loading, and in the end."""
    command = [sys.executable, "-c", CHILD, *map(str, folders), method, fault]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    peak, held = map(int, child.stdout.split())
    return peak, held


MANY = ("experts", "router", "input_linear", "output_linear")
"""Parts of the names of tensors with a number, or a matrix, of each expert."""


def stacked(root: Path, method: str) -> tuple[Path, Path]:
    """Write a model of 5 experts that stand in one tensor, and one of 65 of them, which are 204 MB in bfloat16."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}
    small, large = root / "packed", root / "large"
    if method == "mxfp4":
        make_gpt_oss(root, **sizes)
    else:
        make_checkpoint(root / "plain", "granitemoe", **sizes)
        pack_stacked(root / "plain", small, METHODS["fp8-blocks"])
        small = small if method == "fp8" else root / "plain"
    tensors = load_file(small / "model.safetensors")
    tensors = {name: each if "scale" in name or each.dtype != torch.float32 else each.bfloat16()
               for name, each in tensors.items()}  # fmt: skip
    save_file(tensors, small / "model.safetensors")
    for name, tensor in tensors.items():
        if any(each in name for each in MANY):
            tensors[name] = tensor.repeat(13, *[1] * (tensor.dim() - 1))
    large.mkdir()
    save_file(tensors, large / "model.safetensors")
    config = json.loads((small / "config.json").read_text())
    (large / "config.json").write_text(json.dumps({**config, "num_local_experts": 65}))
    return small, large


@pytest.mark.first(1)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is Linux's")
@pytest.mark.parametrize(
    ("method", "fault"),
    [
        *(("mxfp4", ""), ("mxfp4", "all at once")),
        *(pytest.param(*x, marks=pytest.mark.full) for x in (("fp8", ""), ("plain", ""), ("plain", "pages are kept"))),
    ],
)
def test_experts_in_one_tensor_are_not_held_twice(method: str, fault: str, tmp_path: Path) -> None:
    """While they are read, memory holds the model and a few experts for each thread, and the test sees it else."""
    peak, held = told(stacked(tmp_path, method), method, fault)
    assert held > 200e6
    assert peak - held > 120e6 if fault else peak - held < 100e6, (peak, held)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """What an engine with two cores has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_threads_fill_layers_as_one_does(tmp_path: Path) -> None:
    """In several threads, each of which computes alone, a model gets the same numbers; afterwards all is as before."""
    folder, seen = make_model(tmp_path, "Qwen3MoeForCausalLM", moe_intermediate_size=64), set()
    models = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        models.append(loaded(folder, "int4")[0])
        assert torch.get_num_threads() == threads
    mine, right = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(mine[name], right[name]) for name in right)
    engine = TinyEngine(plugin_of("model", "Qwen3MoeForCausalLM"), folder)
    logits = []
    for engine.model in models:
        logits.append(engine.prefill_logits([[5, 7, 11, 13]])[0])
    assert torch.equal(*logits)

    def work(item: str) -> int:
        name = threading.current_thread().name
        seen.add((name.partition("_")[0], torch.get_num_threads(), torch.is_inference_mode_enabled()))
        return int(item)

    torch.set_num_threads(2)
    with torch.inference_mode():
        assert list(side_by_side(work, map(str, range(20)), 8)) == list(range(20))
    assert seen == {("load", 1, True)}


@pytest.mark.usefixtures("two_threads")
def test_what_fails_in_a_thread_is_told(tmp_path: Path) -> None:
    """A tensor that is not finite is named as ever, and the error of one layer ends the loading."""
    folder = make_model(tmp_path, "LlamaForCausalLM")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: torch.full_like(tensors[name], torch.nan)}, file)
    with pytest.raises(ConfigError, match=r"not finite: model\.layers\.1\.mlp\.up_proj\.weight \(model\.safetensors\)"):
        TinyEngine(plugin_of("model", "LlamaForCausalLM"), folder)

    def work(item: str) -> int:
        if item == "3":
            raise ModelError("the fourth")
        return 0

    with pytest.raises(ModelError, match="the fourth"):
        list(side_by_side(work, map(str, range(100)), 8))
    assert torch.get_num_threads() == 2


def test_a_conversion_for_two_threads_is_made_once(tmp_path: Path) -> None:
    """Results of one conversion go to the layers that ask for them, whichever comes first."""
    save_file({"x": torch.arange(4.0)}, tmp_path / "model.safetensors")
    made, both = [], threading.Barrier(2)

    def convert(sources: Any) -> dict[str, torch.Tensor]:
        made.append(1)
        return {"low": sources["x"][:2], "high": sources["x"][2:]}

    results = tuple(FileTensor(name, "F32", (2,)) for name in ("low", "high"))
    got = {}
    with Checkpoint(tmp_path, open_checkpoint(tmp_path).headers, [Conversion(("x",), results, convert)]) as checkpoint:

        def read(name: str) -> None:
            both.wait()
            got[name] = checkpoint.read(name).tolist()

        threads = [threading.Thread(target=read, args=(name,)) for name in ("low", "high")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (len(made), got) == (1, {"low": [0.0, 1.0], "high": [2.0, 3.0]})


def written(path: Path, entries: dict[str, Any], data: bytes) -> Path:
    """Write a safetensors file by hand."""
    head = json.dumps(entries).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)
    return path


def test_numbers_that_begin_anywhere_are_read(tmp_path: Path) -> None:
    """A tensor that begins at an odd byte, one without numbers and a scalar; a type that is not read is named."""
    numbers = torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16)
    data = b"\x07\x08\x09" + numbers.view(torch.uint8).numpy().tobytes()
    entries = {
        "__metadata__": {"format": "pt"},
        "bytes": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "odd": {"dtype": "BF16", "shape": [3], "data_offsets": [3, 9]},
        "none": {"dtype": "F32", "shape": [0, 4], "data_offsets": [9, 9]},
    }
    written(tmp_path / "model.safetensors", entries, data)
    with open_checkpoint(tmp_path) as checkpoint:
        assert {header.name for header in checkpoint.headers} == {"bytes", "odd", "none"}
        assert checkpoint.read("bytes").tolist() == [7, 8, 9]
        assert torch.equal(checkpoint.read("odd"), numbers)
        assert checkpoint.read("none").shape == (0, 4)
    entry = {"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    path = written(tmp_path / "model.safetensors", entry, b"\x12\x34")
    with pytest.raises(ModelError, match=r"model\.safetensors: x is F4; possible: BF16, BOOL"):
        Checkpoint(tmp_path, [TensorHeader("x", path, (4,), "F4", start=path.stat().st_size - 2)]).read("x")


def test_a_file_that_becomes_shorter_is_named(tmp_path: Path) -> None:
    """Beyond its end, gone, or empty; what was read stays right when its pages are let go of."""
    path, files = tmp_path / "numbers", MappedFiles()
    path.write_bytes(bytes(range(256)) * 64)
    view = files.numbers(path, 256, 15 * 1024, torch.uint8)
    files.release(path, 0, 16 * 1024)
    assert torch.equal(view, torch.arange(256, dtype=torch.uint8).repeat(60))
    with pytest.raises(ModelError, match="numbers: became shorter while it was read"):
        files.numbers(path, 16 * 1024 - 3, 1, torch.float32)
    files.close()
    assert int(view[3]) == 3
    for make in (path.unlink, path.touch):
        make()
        with pytest.raises(ModelError, match="numbers: cannot be read"):
            files.numbers(path, 0, 1, torch.uint8)
