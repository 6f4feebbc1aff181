"""`dovetail quantize`: what it writes is served as quantised on load, and nothing is left of what fails."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.contracts.layers import BuildContext
from dovetail.messages import SamplerParams, Submit
from dovetail.plugins import Registry
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.quantization import converted, factory_of
from dovetail.runtime.checkpoint.weights import load_weights
from dovetail.runtime.hf_config import read_config
from dovetail_server.cli import main as dovetail
from dovetail_server.quantize import checkpoint as quantising
from dovetail_server.quantize import partial
from dovetail_server.quantize.checkpoint import FORMATS
from dovetail_testing.conformance.model_runtime import TinyEngine
from dovetail_testing.engine import collect, make_client
from dovetail_testing.models import make_model
from dovetail_testing.targets import target_for


def tokens(folder: Path, **settings: str) -> list[int]:
    """Generate greedily."""

    async def run() -> list[int]:
        client = make_client(folder, **settings)
        await client.start()
        try:
            params = SamplerParams(max_tokens=16, temperature=0, ignore_eos=True)
            deltas = await collect(client, Submit(rid="", prompt_ids=[5, 7, 11, 13], params=params))
            return [token for delta in deltas for token in delta.ids]
        finally:
            await client.close()

    return asyncio.run(run())


@pytest.mark.first(1)
@pytest.mark.sampled
@pytest.mark.parametrize("method", FORMATS)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_what_is_written_is_served(
    method: str, architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `auto`, from several shards, with the tokens of the same method on load, and in fewer bytes."""
    extra = {"moe_intermediate_size": 64} if "Moe" in architecture else {"intermediate_size": 128}
    folder = make_model(tmp_path / "plain", architecture, shard_size="60KB", **extra)
    (folder / "tokenizer_config.json").write_text("{}")
    for beside in ("1_Pooling", "onnx"):
        (folder / beside).mkdir()
        (folder / beside / "config.json").write_text("{}")
    out = tmp_path / "new/out"
    assert dovetail(["quantize", str(folder), str(out), "--method", method]) == 0
    assert f"matrices in {method}" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", FORMATS[method])
    assert "lm_head" in config["ignore"]
    assert (out / "tokenizer_config.json").exists()
    assert (out / "1_Pooling/config.json").read_text() == "{}", "how vectors are made of it"
    assert not (out / "onnx").exists()
    assert (out / "model.safetensors.index.json").exists()
    sizes = [sum(path.stat().st_size for path in where.glob("*.safetensors")) for where in (folder, out)]
    assert sizes[1] < 0.62 * sizes[0]
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]
    # In float32 scales are as on load; int4 makes them in the checkpoint's dtype and not in bfloat16.
    if method != "int4":
        assert tokens(out) == tokens(folder, quantization=method)
    assert len(tokens(out)) == 16


@pytest.mark.first(1)
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.sampled
@pytest.mark.parametrize("is_dequantised", [True, False])
@pytest.mark.parametrize("method", FORMATS)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_what_is_written_is_read_by_transformers(
    architecture: str, method: str, is_dequantised: bool, tmp_path: Path
) -> None:
    """With compressed-tensors, dequantised and as anyone loads it, experts too: its logits are those of our engine."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.2}
    extra = {"moe_intermediate_size": 64} if "Moe" in architecture else {}
    plain, out, prompt = make_model(tmp_path / "plain", architecture, **sizes, **extra), tmp_path / "out", [5, 7, 11]
    assert dovetail(["quantize", str(plain), str(out), "--method", method]) == 0
    given = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if is_dequantised else {}
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, **given)
    names = {"model": architecture, "quantization": "compressed-tensors"}
    plugins = {kind: import_planned(as_planned(Registry.scan().resolve(kind, name))) for kind, name in names.items()}
    model, chosen, hf = plugins["model"], plugins["quantization"], read_config(out)
    engine = TinyEngine(model, plain)
    read = converted(chosen, ModelFolder(out), model, engine.config, target_for("float32"))
    factory = factory_of(chosen, hf, model.weight_map(engine.config), read.headers)
    with torch.inference_mode():
        ctx = BuildContext(device=torch.device("cpu"), dtype=torch.float32, factory=factory)
        engine.model = model.build(engine.config, ctx)
        load_weights(engine.model, model.weight_map(engine.config), read)
        want = theirs(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(engine.prefill_logits([prompt])[0], want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "MODEL, OUT, --method; `dovetail quantize --help` shows what can be given"),
        (["plain", "out"], "--method"),
        (["plain", "out", "--method", "int3"], "invalid choice: 'int3'"),
        (["plain", "plain", "--method", "int8"], "is there already, and not an empty folder"),
        (["quantised", "out", "--method", "int8"], "is quantised already (awq)"),
        (["nowhere", "out", "--method", "int8"], "no such folder"),
        (["poisoned", "out", "--method", "int8"], "weights that are not finite: model.norm.weight"),
        (["odd", "out", "--method", "int4"], "no matrix that can be quantised"),
    ],
)
def test_what_cannot_be_written_is_one_line(
    argv: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With exit code 2, and no folder is left."""
    monkeypatch.chdir(tmp_path)
    make_model(Path("plain"), "LlamaForCausalLM")
    make_model(Path("quantised"), "LlamaForCausalLM", quantization_config={"quant_method": "awq"})
    make_model(Path("odd"), "LlamaForCausalLM", hidden_size=40, intermediate_size=72, head_dim=10)
    poisoned = make_model(Path("poisoned"), "LlamaForCausalLM") / "model.safetensors"
    tensors = load_file(poisoned)
    save_file({**tensors, "model.norm.weight": torch.full_like(tensors["model.norm.weight"], torch.nan)}, poisoned)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert dovetail(["quantize", *argv]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("dovetail quantize: error: ")
    assert said in error
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_folder_inside_of_the_model_does_not_hold_itself(tmp_path: Path) -> None:
    """Its name is one of those that are copied."""
    plain = make_model(tmp_path / "plain", "LlamaForCausalLM")
    out = plain / "2_out"
    assert dovetail(["quantize", str(plain), str(out), "--method", "int8"]) == 0
    assert [path for path in out.iterdir() if path.is_dir()] == []


def test_a_full_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever writes the file tells of it in an exception of its own; no part is left."""
    plain = make_model(tmp_path / "plain", "LlamaForCausalLM")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        assert dovetail(["quantize", str(plain), str(tmp_path / "out"), "--method", "int8"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("dovetail quantize: error: ")
    assert "out: cannot be written: " in error
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_it_is_told_to_end(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C, or by whoever ends processes: the part is gone, and the exit code says so."""
    plain = make_model(tmp_path / "plain", "LlamaForCausalLM")
    monkeypatch.setattr(quantising, "save_file", lambda *args, **options: signal.raise_signal(number))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have what they run behind ignore it
    assert dovetail(["quantize", str(plain), str(tmp_path / "out"), "--method", "fp8"]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


KILLED = """
import os, signal, sys
from pathlib import Path
from dovetail_server.quantize.partial import whole_folder
with whole_folder(Path(sys.argv[1])) as part:
    (part / "half").write_text("of it")
    print(part, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever has its PID today; what another one writes, or what is none of ours, stays and is named."""
    plain, out = make_model(tmp_path / "plain", "LlamaForCausalLM"), tmp_path / "new" / "out"
    told = subprocess.run([sys.executable, "-c", KILLED, str(out)], capture_output=True, text=True, check=False)
    assert told.returncode == -signal.SIGKILL
    left = Path(told.stdout.strip())
    assert (left / "half").exists()
    ours = left.rename(left.with_name(f"out.partial-{os.getpid()}"))  # as if the number had come to us
    foreign = [out.with_name(name) for name in ("out.partial-1", "other.partial-1", "out.partial-2")]
    for path in foreign[:2]:
        path.mkdir()
    foreign[2].write_text("a file")
    with partial.whole_folder(out.with_name("out.partial-3")), partial.whole_folder(out) as busy:
        (busy / "half").write_text("of it")
        assert not ours.exists() or ours == busy
        assert busy.name.startswith("out.partial-")
        empty = out.with_name("out.partial-4")
        empty.mkdir()
        partial.remove_left(out)
        assert (busy / "half").exists()
        assert "another process writes there" in caplog.text
    assert (out / "half").exists()
    assert not (out / partial.MARK).exists()
    shutil.rmtree(out)
    assert dovetail(["quantize", str(plain), str(out), "--method", "fp8"]) == 0
    assert all(path.exists() for path in foreign)
    assert sorted(path.name for path in out.parent.iterdir()) == sorted(
        ["out", "out.partial-3", "out.partial-4", *(path.name for path in foreign)]
    )
    assert "removed; the process that wrote it ended" in caplog.text
    assert str(foreign[0]) in caplog.text


def test_a_folder_of_our_name_that_is_not_ours_stays(tmp_path: Path) -> None:
    """Its name is that of our PID: another one is taken, and what fails removes no folder but its own."""
    out = tmp_path / "out"
    (foreign := tmp_path / f"out.partial-{os.getpid()}").mkdir()
    (foreign / "note").write_text("mine")

    def fail() -> None:
        with partial.whole_folder(out) as part:
            assert part.name == f"{foreign.name}-1"
            raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == [foreign.name]
    assert (foreign / "note").read_text() == "mine"
