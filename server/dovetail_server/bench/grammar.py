"""`dovetail bench grammar`: what structured outputs cost, on one CPU core unless more are allowed."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import dovetail
from dovetail.grammar.compile.vocabulary import make_vocabulary
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_server.bench import report
from dovetail_server.bench.grammar_folder import make_folder
from dovetail_server.bench.grammar_load import FirstTokenBench, HostileBench, StepBench, make_engine
from dovetail_server.bench.grammar_masks import MaskBench, specs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOptions:
    """What the command was asked for, checked."""

    tokenizer: Path | None
    model: Path | None
    num_schemas: int
    num_rows: int
    rounds: int
    num_cores: int
    parts: tuple[str, ...]
    seed: int
    json: Path | None = None


def main(options: GrammarOptions) -> int:
    """Measure what was asked for and print it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[: options.num_cores])
    torch.set_num_threads(min(options.num_cores, len(before)))
    try:
        results = measure(options)
    finally:
        os.sched_setaffinity(0, before)
    report.save(options.json, results)
    return 0


def measure(options: GrammarOptions) -> dict[str, Any]:
    """Return all figures by part."""
    out = report.console()
    results: dict[str, Any] = {"dovetail": dovetail.__version__, "cores": options.num_cores, "seed": options.seed}
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as scratch:
        folder = make_folder(Path(scratch), options.tokenizer)
        if {"compile", "masks", "batch"} & set(options.parts):
            tokenizer = Tokenizer.load(folder)
            vocabulary = make_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
            bench = MaskBench(vocabulary, options.num_schemas, options.seed)
            results["vocabulary"] = vocabulary.size
            title = f"{options.num_schemas} schemas, {vocabulary.size:,} tokens"
            results["compile"], made = bench.compile()
            out.print(table_of(title, results["compile"]))
            if "masks" in options.parts:
                results["masks"] = bench.walks(made, options.seed)
                out.print(table_of("masks of a row (CPU time)", results["masks"]))
            if "batch" in options.parts:
                results["batch"] = bench.batch(made, options.num_rows)
                out.print(table_of("masks of a step", results["batch"]))
            bench.close()
        if {"first", "step"} & set(options.parts):
            name = options.model.name if options.model else "a tiny model"
            core, plugins = make_engine(options.model or folder, options.num_rows)
            if "first" in options.parts:
                results["first"] = FirstTokenBench(core, plugins).run(specs_of(options.num_schemas, options.seed))
                out.print(table_of(f"first tokens, {options.num_schemas} schemas, {name}", results["first"]))
            if "step" in options.parts:
                results["step"] = StepBench(core, options.num_rows).run(options.rounds)
                out.print(table_of(f"decode steps of {options.num_rows} rows, {name}", results["step"]))
            core.close()
    if "hostile" in options.parts:
        hostile = HostileBench()
        results["hostile"] = asyncio.run(hostile.run())
        out.print(table_of("hostile grammars beside four streams of the demo model", results["hostile"]))
        for seconds, what, step in hostile.answers:
            line = f"  {seconds:6.2f} s  {what:28}  {step.backend} {step.kind} {step.source[:50]}"
            out.print(line, markup=False, highlight=False)
    return results


def table_of(title: str, results: Mapping[str, Any]) -> Table:
    """Lay figures out."""
    lines = []
    for name, value in results.items():
        if isinstance(value, Mapping):
            value = "  ".join(
                f"{key} {report.number(number, 2 if number < 100 else 0)}" for key, number in value.items()
            )
        lines.append((name, report.number(value, 2) if isinstance(value, float) else str(value)))
    return report.pairs(title, lines)
