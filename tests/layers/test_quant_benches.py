"""The benches of quantised models run from their first line to their last, here at tiny sizes and without a GPU.

On one, time is short: what fails there fails here. CUDA is played by the CPU, kernels run in Triton's interpreter, and
a graph is one run; what is printed says nothing about time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(torch.cuda.is_available(), reason="plays a GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's: bfloat16 products are not those of numbers there
]
BENCH = Path(__file__).parents[1] / "benchmarks"


class OnCPU(TorchFunctionMode):
    """Tensors for CUDA are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Clock:
    """An event of CUDA: the host's clock."""

    def __init__(self, *_: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        """Read it."""
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing runs later."""

    def elapsed_time(self, end: Clock) -> float:
        """Milliseconds."""
        return 1e3 * (end.at - self.at)


class Graph:
    """A graph of CUDA that computes nothing when it is replayed."""

    def replay(self) -> None:
        """Nothing."""


def once_us(run: Callable[[], Any]) -> float:
    """As `graph_us`: one run."""
    begin = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - begin)


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Play CUDA, with the folder of benches on the path."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name, value in {
        "synchronize": lambda *_: None, "Event": Clock, "CUDAGraph": Graph, "Stream": lambda: None,
        "stream": lambda _: nullcontext(), "graph": lambda *_, **__: nullcontext(), "memory_allocated": lambda: 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    with OnCPU(), torch.inference_mode():
        yield


def started(monkeypatch: pytest.MonkeyPatch, module: Any, *arguments: str) -> None:
    """Run a bench's `main` in place of its processes."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *arguments])
    module.main()


class NoProcess:
    """A process that has ended well: compilation of a share, which the interpreter does not need."""

    def __init__(self, command: list[str]) -> None:
        assert Path(command[1]).exists()

    def wait(self) -> int:
        """At once."""
        return 0


def test_products(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every kind and way: a line for each product, and one for the layer."""
    import quant_products as bench

    sites = (
        bench.Site("qkv", 16, 128, norm=True), bench.Site("out", 16, 128, residual=True),
        bench.Site("gate", 32, 128, norm=True, gate=True),
    )  # fmt: skip
    for name, value in {"SITES": sites, "CACHE_BYTES": 1, "CHECKED": ((20, 128),), "graph_us": once_us}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench.subprocess, "Popen", NoProcess)
    options = ("--kinds", "fp8-blocks", "int4", "mxfp4", "--rows", "1", "3", "--many", "70", "--most", "1")
    started(monkeypatch, bench, *options, "--seconds", "20")
    started(monkeypatch, bench, "--kinds", "int8", "--rows", "1", "--many", "70", "--most", "1", "--compile", "0", "2")
    started(monkeypatch, bench, "--check", "fp8-blocks")
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("layer ") for line in lines) == 9
    assert sum(line.startswith(("fp8-blocks ", "int4 ", "mxfp4 ")) for line in lines) == 27
    assert sum(line.startswith("check ") for line in lines) == 1


def test_experts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each model and number of tokens; the usual tiles and writing out are tried however short the time."""
    import quant_experts as bench

    models = {
        "words": ("mxfp4", 2, 1, 32, 32, "clamped_silu_and_mul"),
        "bytes": ("fp8-blocks", 2, 1, 128, 128, "silu_and_mul"),
    }
    for name, value in {"MODELS": models, "CACHE_BYTES": 1, "DRAWS": 1, "graph_us": once_us}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench.subprocess, "Popen", NoProcess)
    started(monkeypatch, bench, "--tokens", "1", "3", "--seconds", "0.1")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == [
        "words mxfp4 1 tokens", "words mxfp4 3 tokens", "bytes fp8-blocks 1 tokens", "bytes fp8-blocks 3 tokens",
    ]  # fmt: skip
    assert all("written nan" not in line for line in lines)
    started(monkeypatch, bench, "--models", "bytes", "--tokens", "1", "--compile", "0", "20")


def test_expert_layer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every way, of which none is far from the first, with one other tile; and the router alone."""
    import expert_layer as bench

    small = {"words": ("mxfp4", 3, 2, 32, 32, "clamped_silu_and_mul")}
    tiles = {"ROUTER_TILES": ((1, 64, 1),), "GATE_TILES": (), "DOWN_TILES": ()}
    for name, value in {"MODELS": small, "LAYERS": 1, "HIDDEN": 32, "EXPERTS": (8,), "COPIES": 1, **tiles}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "graph_us", once_us)
    started(monkeypatch, bench, "--models", "words", "--tokens", "1", "--rounds", "1", "--tiles")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split(", ")[0] for line in lines] == [*["router of 8"] * 3, *["words 1 tokens"] * 4]
    assert max(float(line.rpartition(" ")[2]) for line in lines if "launches" in line) < 0.02


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_decode_tiles(dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The tile in use is timed without any time left, others with some."""
    import decode_tiles as bench

    monkeypatch.setattr(bench, "choose_shape", lambda *_: bench.SplitShape(2, 16, 1))
    started(monkeypatch, bench, "--loads", "2x40x1x2x32", "--cache-dtype", dtype, "--seconds", "0")
    monkeypatch.setattr(bench, "took_us", lambda *_: 1.0)
    started(monkeypatch, bench, "--loads", "2x40x1x2x32", "--cache-dtype", dtype, "--seconds", "600")
    first, second = capsys.readouterr().out.splitlines()
    assert "best of 1 " in first
    assert "best of 1 " not in second


def test_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each way starts an engine with its precision; one that has no time left says so."""
    import quant_steps as bench

    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 320}  # fmt: skip
    monkeypatch.setattr(bench, "LLAMA_8B", bench.LLAMA_8B | small)
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "step_us", lambda core, rows: 1.0 + rows)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    started(monkeypatch, bench, "--ways", "none", "fp8", "int4", "--rows", "1", "2")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["none", "fp8", "int4"]
    assert all("2 rows 3 us" in line for line in lines)
    started(monkeypatch, bench, "--ways", "none", "--seconds", "-1")
    assert capsys.readouterr().out == "none: no time left\n"
