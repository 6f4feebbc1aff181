"""Decode steps of the engine at real shapes with random weights: `python tests/bench/decode.py [--json FILE]`.

For each model and number of streams: time of a decode step with CUDA graphs and without, tokens per second, the share
of the bandwidth floor (the step's weights read once at the device's measured copy bandwidth), and the time to the first
token of a 512-token prompt. The engine's own step is timed, scheduler and host work included, HTTP not.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dovetail.engine.core import EngineCore
from dovetail.engine.messages import SamplingParams, Submit
from dovetail.plugins import Registry, load, make_plan
from dovetail.settings import EngineSettings

COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "8B": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip
"""Shapes of Qwen2.5-0.5B, Qwen3-0.6B and Llama-3.1-8B."""


SAMPLING: dict[str, float] = {"temperature": 0.0}
"""Sampling parameters of all requests."""


def copy_bandwidth(device: torch.device) -> float:
    """Measured bytes per second of a large copy, counting reads and writes."""
    size = (2 << 30) if device.type == "cuda" else (256 << 20)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        started = now(device)
        target.copy_(source)
        times.append(now(device) - started)
    return 2 * size / statistics.median(times[2:])


def now(device: torch.device) -> float:
    """Host clock after the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def start(shape: dict[str, Any], folder: Path, *, graphs: bool) -> EngineCore:
    """An engine with random weights."""
    (folder / "config.json").write_text(json.dumps({**COMMON, **shape}))
    settings = EngineSettings(
        model_path=str(folder),
        load_format="dummy",
        disable_cuda_graph=not graphs,
        disable_radix_cache=True,
        max_total_tokens=131072,
    )
    plan = make_plan(Registry.scan(), model=shape["architectures"][0], attention_backend="auto", device=device_name())
    return EngineCore(settings, load(plan, "engine"))


def device_name() -> str:
    """`cuda` if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def decode_ms(core: EngineCore, streams: int, steps: int) -> tuple[float, float]:
    """Median milliseconds of a decode step of `streams` requests at about 512 tokens, and of the first token of one."""
    device = core.runner.device
    first = []
    for attempt in range(3):
        core.handle(submit(f"ttft-{attempt}", 512, 1))
        started = now(device)
        core.step()
        first.append(now(device) - started)
    for i in range(streams):
        core.handle(submit(str(i), 512, steps + 20))
    while core.scheduler.waiting or any(not r.on_device for r in core.scheduler.running):
        core.step()
    for _ in range(5):
        core.step()
    times = []
    for _ in range(steps):
        started = now(device)
        core.step()
        times.append(now(device) - started)
    while core.has_work:
        for request in list(core.scheduler.running):
            core.scheduler.remove(request.rid)
        core.step()
    return 1000 * statistics.median(times), 1000 * statistics.median(first)


def submit(rid: str, num_prompt: int, num_new: int) -> Submit:
    """A request that never stops early, sampled as `SAMPLING` says."""
    ids = [(hash(rid) + 31 * i) % 100_000 for i in range(num_prompt)]
    return Submit(rid=rid, prompt_ids=ids, params=SamplingParams(max_tokens=num_new, ignore_eos=True, **SAMPLING))


def measure(name: str, streams: list[int], steps: int, bandwidth: float) -> list[dict[str, Any]]:
    """All rows of one model."""
    rows: dict[int, dict[str, Any]] = {n: {"model": name, "streams": n} for n in streams}
    for graphs in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            core = start(SHAPES[name], Path(folder), graphs=graphs)
        tied = SHAPES[name].get("tie_word_embeddings", False)
        table = SHAPES[name]["vocab_size"] * SHAPES[name]["hidden_size"] * 2
        floor = 1000 * (core.runner.weight_bytes - (0 if tied else table)) / bandwidth
        for n in streams:
            step, first = decode_ms(core, n, steps)
            key = "graph" if graphs else "eager"
            rows[n] |= {f"{key}_ms": step, f"{key}_ttft_ms": first, "floor_ms": floor}
        del core
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return list(rows.values())


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.disable(logging.INFO)
    SAMPLING.update(temperature=args.temperature, top_p=args.top_p)
    bandwidth = copy_bandwidth(torch.device(device_name()))
    rows = [row for name in args.models for row in measure(name, args.streams, args.steps, bandwidth)]
    table = Table(title=f"Decode steps on {device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    for column in ("model", "streams", "floor ms", "graph ms", "eager ms", "tok/s", "of floor", "first token ms"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["model"], str(row["streams"]), f"{row['floor_ms']:.3f}", f"{row['graph_ms']:.3f}",
            f"{row['eager_ms']:.3f}",
            f"{1000 * row['streams'] / row['graph_ms']:.0f}", f"{row['floor_ms'] / row['graph_ms']:.0%}",
            f"{row['graph_ttft_ms']:.1f}",
        )  # fmt: skip
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
