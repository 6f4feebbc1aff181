"""Transformers' own Llama over our cache beside ours.

    python tests/benchmarks/model_impl.py [--rounds N] [--streams N …]

A 0.5B shape with random weights in bfloat16 on the CPU. Both engines run in processes of their own and take turns; each
figure is the median of the rounds, with random token ids, greedy, to the full length.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dovetail_server.bench.prompts import PromptVocabulary, RandomIds
from dovetail_server.bench.workloads import Workload
from engine import CONFIG_05B, Case, Engine

IMPLS = ("dovetail", "transformers")
LLAMA = CONFIG_05B | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 64}
NUM_NEW = 32


def main() -> int:
    """Take turns, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="*", default=[1])
    args = parser.parse_args()
    logging.disable(logging.INFO)
    table = Table(title=f"Llama of 0.5B, CPU, tok/s, {args.rounds} rounds in turns")
    for name in ("streams", *IMPLS, "ratio (min to max)"):
        table.add_column(name, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
        case = Case("0.5B", Path(folder), True, NUM_NEW, args.rounds, len(os.sched_getaffinity(0)), tuple(args.streams))
        engines = {impl: Engine(case, impl) for impl in IMPLS}
        for streams in args.streams:
            load = Workload(name="engine", num_prompts=streams, input_len=(16, 16), output_len=(1, 1))
            source = RandomIds(PromptVocabulary.of_size(LLAMA["vocab_size"], "config.json"), str(streams))
            prompts = [prompt for prompt, _ in source.draw(load, streams)]
            rates: dict[str, list[float]] = {impl: [] for impl in IMPLS}
            for number in range(args.rounds + 1):
                for impl, engine in engines.items():
                    first, seconds = engine.run(prompts, NUM_NEW)
                    if number:  # the first warms up
                        rates[impl].append(streams * (NUM_NEW - 1) / (seconds - first))
            ratios = [theirs / ours for ours, theirs in zip(*rates.values(), strict=True)]
            medians = (f"{statistics.median(each):.1f}" for each in rates.values())
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            table.add_row(str(streams), *medians, ratio)
        for engine in engines.values():
            engine.close()
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
