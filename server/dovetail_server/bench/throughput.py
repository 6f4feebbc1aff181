"""`dovetail bench throughput`: how fast the offline `LLM` answers many requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import dovetail
from dovetail import LLM, SamplingParams
from dovetail_server.bench import report
from dovetail_server.bench.latency import roofline_for
from dovetail_server.bench.prompts import FilePrompts, PromptSource, PromptVocabulary, RandomIds, read_dataset
from dovetail_server.bench.roofline import Roofline
from dovetail_server.bench.workloads import Span, Workload, new_seed
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start.run import engine_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions:
    """What the command was asked for, checked."""

    settings: ServeSettings
    num_prompts: int
    input_len: Span
    output_len: Span
    shared_prefix_len: int
    dataset: Path | None = None
    seed: int = field(default_factory=new_seed)
    temperature: float
    ignore_eos: bool
    bandwidth: float | None = None
    json: Path | None = None


def main(options: ThroughputOptions) -> int:
    """Measure and print.

    Raises:
        ConfigError: The model or the settings are at fault.
        RequestError: A prompt does not fit the model.
        EngineError: The engine failed.
    """
    lines = read_dataset(options.dataset, "completions") if options.dataset is not None else []
    engine = engine_settings(options.settings)
    given = {name: getattr(engine, name) for name in engine.model_fields_set - {"model_path"}}
    began = time.perf_counter()
    with LLM(engine.model_path, reasoning_parser=None, tool_call_parser=None, grammar_backend=None, **given) as llm:
        load_s = time.perf_counter() - began
        source: PromptSource = FilePrompts(lines) if lines else RandomIds(
            PromptVocabulary.of_size(llm.info.vocab_size, "the engine's"), str(options.seed)
        )  # fmt: skip
        prompts, params = requests(source, options)
        llm.generate(prompts[:1], params[0], use_tqdm=False)
        llm.flush_cache()
        began = time.perf_counter()
        replies = llm.generate(prompts, params)
        duration = time.perf_counter() - began
        info = llm.info
    roofline = roofline_for(options.settings, info, options.bandwidth)
    prompt = sum(len(reply.prompt_token_ids) for reply in replies)
    completion = sum(len(reply.token_ids) for reply in replies)
    concurrency = min(len(replies), info.max_running_requests)
    context = prompt / len(replies) + completion / len(replies) / 2
    step = roofline.step_s(concurrency, context, options.shared_prefix_len)
    totals: dict[str, Any] = {
        "num_requests": len(replies),
        "load_s": load_s,
        "duration_s": duration,
        "prompt_tokens": prompt,
        "cached_tokens": sum(reply.cached_tokens for reply in replies),
        "completion_tokens": completion,
        "requests_s": len(replies) / duration,
        "output_tok_s": completion / duration,
        "total_tok_s": (prompt + completion) / duration,
        "concurrency": concurrency,
        "floor_tok_s": concurrency / step if step is not None else None,
        "of_floor": completion / duration * step / concurrency if step is not None else None,
    }
    show(totals, roofline)
    found = {"version": dovetail.__version__, "engine": msgspec.to_builtins(info), "floor": roofline.as_dict()}
    report.save(options.json, {**found, **totals})
    return 0


def requests(
    source: PromptSource, options: ThroughputOptions
) -> tuple[list[str | Sequence[int]], list[SamplingParams]]:
    """Return prompts and their parameters."""
    load = Workload(
        name="offline",
        num_prompts=options.num_prompts,
        input_len=options.input_len,
        output_len=options.output_len,
        shared_prefix_len=options.shared_prefix_len,
    )
    drawn = list(source.draw(load, options.num_prompts))
    params = [
        SamplingParams(max_tokens=num, temperature=options.temperature, ignore_eos=options.ignore_eos)
        for _, num in drawn
    ]
    return [prompt for prompt, _ in drawn], params  # type: ignore[misc]  # text or ids; messages are for chats


def show(totals: dict[str, Any], roofline: Roofline) -> None:
    """Print the table."""
    lines = (
        ("requests", f"{totals['num_requests']:,}, up to {totals['concurrency']:,} at once"),
        ("loading (s)", report.number(totals["load_s"], 1)),
        ("duration (s)", report.number(totals["duration_s"], 2)),
        ("prompt tokens", f"{totals['prompt_tokens']:,}, of them cached {totals['cached_tokens']:,}"),
        ("output tokens", f"{totals['completion_tokens']:,}"),
        ("requests/s", report.number(totals["requests_s"], 2)),
        ("output tok/s", report.with_roofline(totals["output_tok_s"], totals["of_floor"])),
        ("total tok/s", report.number(totals["total_tok_s"])),
    )
    out = report.console()
    out.print(report.pairs("LLM.generate", lines))
    out.print(roofline.describe(), highlight=False, markup=False, soft_wrap=True)
