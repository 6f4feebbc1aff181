"""`dovetail plan`: the engine's memory plan on the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gateway_process import Served

from dovetail.contracts.errors import ModelError
from dovetail.plugins import Registry
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.hf_config import read_config
from dovetail_server.cli import main as dovetail
from dovetail_server.cli.plan import size_of
from dovetail_server.start.folder_facts import config_of
from dovetail_testing.engine import make_client
from dovetail_testing.models import make_model
from dovetail_testing.vocabularies import write_tokenizer

CONFIG_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
}


@pytest.fixture
def llama_8b(tmp_path: Path) -> str:
    """A folder with the config of an 8B model, without weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_8B))
    return str(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    code = dovetail(["plan", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err.strip()


def test_a_plan_for_a_device_of_a_given_size(llama_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Table and JSON show weights, KV cache, headroom, tokens and how many requests of the context fit."""
    argv = (llama_8b, "--load-format", "dummy", "--device-memory", "80GiB", "--context-length", "32k")
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    for part in ("weights", "14.96 GiB", "KV cache", "activations", "CUDA graphs", "free", "32,768 tokens", "of 4,096"):
        assert part in out
    code, out, _ = run(capsys, *argv, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["weight_bytes"] == 2 * 8_030_261_248
    assert found["num_tokens"] == found["num_pages"] * 16
    assert found["num_full_requests"] == found["num_tokens"] // 32768
    assert found["device"]["total"] == 80 << 30


def test_flags_of_serve_change_the_plan(llama_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The memory flags mean what they mean to `dovetail serve`."""

    def tokens(*flags: str) -> int:
        code, out, err = run(capsys, llama_8b, "--load-format=dummy", "--device-memory=80GiB", "--json", *flags)
        assert code == 0, err
        return int(json.loads(out)["num_tokens"])

    assert tokens("--max-total-tokens", "100k") == 102_400
    assert tokens("--mem-fraction-static", "0.5") < tokens("--mem-fraction-static", "0.8")
    assert tokens("--gpu-memory-utilization", "0.5") < tokens("--gpu-memory-utilization", "0.8")
    assert tokens("--disable-cuda-graph", "--gpu-memory-utilization=0.8") > tokens("--gpu-memory-utilization=0.8")
    assert tokens("--dtype", "float32") < tokens()


def test_the_plan_is_the_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a real checkpoint, plan and started engine agree on tokens and context."""
    import asyncio

    folder = make_model(write_tokenizer(tmp_path), "LlamaForCausalLM")
    flags = {"max_total_tokens": 1000, "page_size": 8}

    async def start() -> tuple[int, int, int]:
        client = make_client(folder, **flags)
        info = await client.start()
        await client.close()
        return info.max_total_tokens, info.context_len, info.kv_bytes

    argv = [arg for name, value in flags.items() for arg in (f"--{name}", str(value))]
    code, out, _ = run(capsys, str(folder), "--device", "cpu", "--dtype", "float32", "--json", *argv)
    found = json.loads(out)
    assert code == 0
    assert (found["num_tokens"], found["context_len"], found["kv_bytes"]) == asyncio.run(start())


def test_the_plan_of_quantised_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What stays packed is counted so, and the line of the weights says what is made of them."""
    folder = str(make_model(write_tokenizer(tmp_path), "LlamaForCausalLM"))
    sizes = {}
    for name in (None, "int8", "int4", "fp8"):
        argv = [] if name is None else ["--quantization", name]
        code, out, _ = run(capsys, folder, "--device", "cpu", "--dtype", "bfloat16", "--json", *argv)
        assert code == 0
        sizes[name] = json.loads(out)["weight_bytes"]
        assert bool(json.loads(out)["weight_notes"]) == (name is not None)
    assert sizes["int4"] < sizes["int8"] == sizes["fp8"] < sizes[None]
    _, out, _ = run(capsys, folder, "--device", "cpu", "--quantization", "int4")
    assert "matrices quantised while they are read" in out
    code, _, said = run(capsys, folder, "--device", "cpu", "--quantization", "awq")
    assert code == 2
    assert "it reads awq, and this checkpoint is plain" in said


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--device-memory", "8GiB"], ["does not fit", "14.96 GiB", "7.50 GiB of 8.00 GiB"]),
        (["--device-memory", "16GiB"], ["no room for the KV cache", "lower --chunked-prefill-size"]),
        (["--device-memory", "80GiB", "--max-total-tokens", "3"], ["--max-total-tokens 3", "one page of 16"]),
        (["--device-memory", "lots"], ["--device-memory 'lots'", "80GiB"]),
        (["--device-memory", "1MiB"], ["--device-memory '1MiB'", "0.50 GiB"]),
        (["--device-memory"], ["--device-memory", "expected one argument"]),
        (["--mem-fraction-static", "2"], ["--mem-fraction-static '2'", "give a number above 0 and below 1"]),
        (["--gpu-memory-utilization", "0.9", "--mem-fraction-static", "0.8"], ["give one of them"]),
        (["--gpu-memory-utilization", "0.9", "--device", "cpu"], ["--gpu-memory-utilization 0.9", "cpu"]),
        (["--devise-memory", "8GiB"], ["--devise-memory: unknown option"]),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    llama_8b: str, capsys: pytest.CaptureFixture[str], argv: list[str], parts: list[str]
) -> None:
    """Exit code 2 and one line with cause, numbers and the flag to change."""
    code, out, err = run(capsys, llama_8b, "--load-format", "dummy", *argv)
    assert (code, out, err.count("\n")) == (2, "", 0)
    assert all(part in err for part in parts), err


def test_serve_refuses_the_same_before_anything_starts(llama_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory flags that contradict each other end `dovetail serve` before an engine is started."""
    both = ["--gpu-memory-utilization", "0.9", "--mem-fraction-static", "0.8"]
    for flags, part in ((both, "give one of them"), (["--max-total-tokens", "3"], "one page of 16")):
        code = dovetail(["serve", llama_8b, "--load-format", "dummy", *flags])
        err = capsys.readouterr().err.strip()
        assert (code, err.count("\n")) == (2, 0)
        assert part in err


def test_sizes_are_read_as_people_write_them() -> None:
    """Binary and decimal units, and plain bytes."""
    assert [size_of(text) for text in ("80GiB", "80GB", "1024MiB", "4096")] == [80 << 30, 80 * 10**9, 1 << 30, 4096]


MOST_MODULES = 1700
"""Some 1,490 are imported for a plan: half a second to one and a half of processor time, by the processor."""


def test_a_plan_imports_little(llama_8b: str) -> None:
    """A plan for a given size imports neither torch nor a server, and no more modules than it did."""
    argv = ["plan", llama_8b, "--load-format", "dummy", "--device-memory", "80GiB"]
    code = f"import sys; from dovetail_server.cli import main; main({argv!r}); print('MODULES', *sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    modules = set(out.split("MODULES ")[1].split())
    assert not {"torch", "transformers", "fastapi"} & modules
    assert len(modules) < MOST_MODULES


def test_the_facts_of_builtins_are_those_of_their_plugins(tmp_path: Path) -> None:
    """What `plan` reads of a dense `config.json` without torch is what each built-in model reads with it."""
    compared = []
    for record in Registry.scan().of_kind("model"):
        folder = tmp_path / record.name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**CONFIG_8B, "architectures": [record.name]}))
        try:
            real = import_planned(as_planned(record)).config_from_hf(read_config(folder))
        except ModelError:
            continue  # it needs keys that a dense decoder does not have
        quick = config_of(ModelFolder.read(folder, weights=False))
        for name in ("num_layers", "layers", "hidden_size", "intermediate_size"):
            assert getattr(quick, name) == getattr(real, name)
        assert (quick.vocab_size, quick.dtype) == (real.vocab_size, real.dtype)
        compared.append(record.name)
    assert {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= set(compared)


def test_an_engine_stays_within_its_table(tmp_path: Path) -> None:
    """A small model's, whose process takes most of it: the peak is at most a tenth above the start's table."""
    flags = ("--device", "cpu", "--max-total-tokens", "2048", "--min-free-disk-bytes", "0", "--num-threads", "1")
    served = Served(tmp_path, "serve", *flags, "--file-storage-path", str(tmp_path / "files"), key=None)
    try:
        served.wait()
        assert served.post("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 16}).ok
        found = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 2) for line in found.splitlines()]
        (pid,) = [pid for pid, parent, args in rows if int(parent) == served.process.pid and "engine_main" in args]
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    finally:
        served.close()
    sizes = re.findall(r"^ (process|weights|KV cache|activations) +([\d.]+) ([MG])iB", served.text(), re.MULTILINE)
    told = {name: float(size) * {"M": 1, "G": 1024}[unit] for name, size, unit in sizes}
    assert told.keys() == {"process", "weights", "KV cache", "activations"}
    peak = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]
    assert peak <= 1.1 * sum(told.values())
