"""Engine against `transformers.generate`, side by side in one run: `python tests/benchmarks/engine.py [--json FILE]`.

Each figure is the median of several rounds in which the two take turns, so that a noisy machine slows both. Requests
are greedy and never stop early; prompts are random token ids of mixed lengths. The engine runs in a process of its own,
as it serves, and its tokens are read here one by one; transformers runs here. Both get the number of threads that the
engine would choose (one for the demo model, where more make both slower).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the engine process does; for both sides of the comparison

import torch
import transformers
from rich.console import Console
from rich.table import Table

from dovetail.base.settings import EngineSettings
from dovetail.demo import MODEL_DIR
from dovetail.messages import SamplerParams
from dovetail.plugins import Registry, make_plan
from dovetail_server.bench.latency import BareEngine
from dovetail_server.bench.prompts import PromptVocabulary, RandomIds
from dovetail_server.bench.workloads import Workload

CONFIG_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""A 0.5B decoder with the shapes of Qwen2.5-0.5B."""


@dataclass(frozen=True)
class Case:
    """One model: where it is, how many tokens each request generates, how many rounds."""

    name: str
    folder: Path
    dummy: bool
    num_new: int
    rounds: int
    threads: int
    streams: tuple[int, ...]


class Engine:
    """Drives the engine."""

    def __init__(self, case: Case, model_impl: str = "auto") -> None:
        hf = json.loads((case.folder / "config.json").read_text())
        plan = make_plan(
            Registry.scan(),
            model=hf["architectures"][0],
            attention_backend="auto",
            model_impl=model_impl,
            checkpoint="dummy" if case.dummy else None,
        )
        settings = EngineSettings(
            model_path=str(case.folder),
            load_format="dummy" if case.dummy else "auto",
            disable_radix_cache=True,
            num_threads=case.threads,
            model_impl=model_impl,
        )
        self._engine = BareEngine(settings, plan)
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._engine.client.start())

    def run(self, prompts: list[list[int]], num_new: int) -> tuple[float, float]:
        """Generate for all prompts at once; returns seconds to the first token (median) and in all."""
        params = SamplerParams(max_tokens=num_new, temperature=0, ignore_eos=True)
        done = self._loop.run_until_complete(self._engine.run(prompts, params))
        return statistics.median(done.firsts), done.total_s

    def close(self) -> None:
        """Stop the engine."""
        self._loop.run_until_complete(self._engine.client.close())
        self._loop.close()


class Reference:
    """Drives transformers: one stream, or one padded batch."""

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(case.threads)
        if case.dummy:
            config = transformers.AutoConfig.from_pretrained(case.folder)
            torch.manual_seed(0)
            self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        else:
            self._model = transformers.AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.bfloat16).eval()
        self._model.generation_config = transformers.GenerationConfig(pad_token_id=0)

    def run(self, prompts: list[list[int]], num_new: int) -> float:
        """Generate for all prompts, left-padded to the longest; returns seconds."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        started = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=mask, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False
            )
        return time.perf_counter() - started


def measure(case: Case) -> list[dict[str, Any]]:
    """Run every figure of one model; returns rows of the table."""
    vocab = json.loads((case.folder / "config.json").read_text())["vocab_size"]
    engine, reference = Engine(case), Reference(case)
    rows = []
    for streams in case.streams:
        lengths = (16, 16 if streams == 1 else 192)
        load = Workload(name="engine", num_prompts=streams, input_len=lengths, output_len=(1, 1))
        source = RandomIds(PromptVocabulary.of_size(vocab, "config.json"), str(streams))
        prompts = [prompt for prompt, _ in source.draw(load, streams)]
        compare = reference if streams <= 16 else None
        rows.append(compare_one(case, engine, compare, prompts))
    engine.close()
    return rows


def compare_one(case: Case, engine: Engine, reference: Reference | None, prompts: list[list[int]]) -> dict[str, Any]:
    """Take turns for `case.rounds` rounds after one warm-up each."""
    num_new, total = case.num_new, case.num_new * len(prompts)
    ours: list[float] = []
    firsts: list[float] = []
    theirs: list[float] = []
    engine.run(prompts, 4)
    if reference is not None:
        reference.run(prompts, 4)
    for _ in range(case.rounds):
        first, seconds = engine.run(prompts, num_new)
        firsts.append(first)
        ours.append(total / seconds)
        if reference is not None:
            theirs.append(total / reference.run(prompts, num_new))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)] if theirs else []
    return {
        "model": case.name,
        "streams": len(prompts),
        "ttft_ms": 1000 * statistics.median(firsts),
        "tok_s": statistics.median(ours),
        "transformers_tok_s": statistics.median(theirs) if theirs else None,
        "ratio": statistics.median(ratios) if ratios else None,
        "ratio_range": [min(ratios), max(ratios)] if ratios else None,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title=f"Dovetail against transformers {transformers.__version__}, CPU")
    for name in ("model", "streams", "first token ms", "tok/s", "transformers tok/s", "ratio (min to max)"):
        table.add_column(name, justify="left" if name == "model" else "right")
    number: Callable[[float | None], str] = lambda x: "-" if x is None else f"{x:.1f}"  # noqa: E731
    for row in rows:
        ratio = "-" if row["ratio"] is None else "{:.2f} ({:.2f} to {:.2f})".format(row["ratio"], *row["ratio_range"])
        table.add_row(
            row["model"],
            str(row["streams"]),
            number(row["ttft_ms"]),
            number(row["tok_s"]),
            number(row["transformers_tok_s"]),
            ratio,
        )
    Console(width=110).print(table)


def main() -> int:
    """Parse flags, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--model", choices=["demo", "0.5b", "all"], default="all")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.disable(logging.INFO)
    transformers.logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(CONFIG_05B))
        cases = {
            "demo": Case("demo", MODEL_DIR, False, 64, args.rounds, 1, (1, 16, 64)),
            "0.5b": Case("random 0.5B", Path(scratch), True, 24, max(3, args.rounds - 2), cores, (1, 16, 64)),
        }
        for name, case in cases.items():
            if args.model in (name, "all"):
                rows += measure(case)
    show(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
