"""`dovetail bench latency`: how long the engine takes for batches of a size, without HTTP."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

import dovetail
from dovetail.base.settings import EngineSettings
from dovetail.contracts.errors import ConfigError, EngineError
from dovetail.messages import EngineInfo, SamplerParams, Submit
from dovetail.plugins import PluginPlan
from dovetail_server.bench import bandwidth, report
from dovetail_server.bench.prompts import PromptVocabulary, RandomIds
from dovetail_server.bench.roofline import Bandwidth, Roofline, facts_of, quantised_by
from dovetail_server.bench.workloads import Workload, new_seed
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start.run import engine_settings
from dovetail_server.supervision.engine_process import ProcessClient

# The engine without HTTP: a process of its own, as it serves, whose tokens are read here as they come.


Arrival = tuple[float, int]
"""When tokens came, in seconds since the start, and how many."""


@dataclass(frozen=True, slots=True)
class Round:
    """One batch of requests that began together: the arrivals of each."""

    arrivals: Sequence[Sequence[Arrival]]

    @property
    def firsts(self) -> list[float]:
        """When each request's first token came."""
        return [each[0][0] for each in self.arrivals]

    @property
    def total_s(self) -> float:
        """When the last token came."""
        return max(each[-1][0] for each in self.arrivals)

    @property
    def decode_step_s(self) -> float | None:
        """Seconds of a step in which all requests decode: from the last one's first token to the first one's end."""
        start, end = max(self.firsts), min(each[-1][0] for each in self.arrivals)
        steps = sum(num for each in self.arrivals for at, num in each if start < at <= end) / len(self.arrivals)
        return (end - start) / steps if steps >= 1 else None


class BareEngine:
    """An engine to submit token ids to."""

    def __init__(self, settings: EngineSettings, plan: PluginPlan) -> None:
        self.client = ProcessClient(settings, plan, log_level="warning")
        self._ids = itertools.count(1)

    async def run(self, prompts: Sequence[Sequence[int]], params: SamplerParams) -> Round:
        """Generate for all prompts at once.

        Raises:
            EngineError: A request was given up, or the engine died.
        """
        started = time.perf_counter()

        async def one(prompt: Sequence[int]) -> list[Arrival]:
            arrivals: list[Arrival] = []
            request = Submit(rid=f"bench-{next(self._ids)}", prompt_ids=list(prompt), params=params)
            async for delta in self.client.submit(request):
                if delta.finish is not None and delta.finish.reason == "abort":
                    raise EngineError(f"the engine gave a request up: {delta.finish.message}")
                if delta.ids:
                    arrivals.append((time.perf_counter() - started, len(delta.ids)))
            return arrivals

        return Round(await asyncio.gather(*(one(prompt) for prompt in prompts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """What the command was asked for, checked."""

    settings: ServeSettings
    batch_sizes: Sequence[int]
    input_len: int
    output_len: int
    rounds: int
    seed: int = field(default_factory=new_seed)
    temperature: float
    top_p: float
    bandwidth: float | None = None
    json: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One batch size; medians of the rounds.

    Attributes:
        prefill_ms: From submitting all requests to the last one's first token.
        first_ms: To the first token of the request in the middle.
        decode_ms: Of a step in which all requests decode.
        decode_tok_s: All requests together, while all decode.
        output_tok_s: Over the whole round.
    """

    batch_size: int
    prefill_ms: float
    first_ms: float
    prompt_tok_s: float
    decode_ms: float | None
    decode_tok_s: float | None
    output_tok_s: float
    floor_ms: float | None
    of_floor: float | None


def roofline_for(settings: ServeSettings, info: EngineInfo, rate: float | None) -> Roofline:
    """Put the floor of an engine together; measures the bandwidth of its device unless it is given."""
    facts = facts_of(settings.folder, info.dtype, quantised_by(info.plugins), settings.state_dtype)
    if isinstance(facts, str):
        return Roofline(facts=None, bandwidth=None, unknown=facts)
    if rate is not None:
        return Roofline(facts=facts, bandwidth=Bandwidth(bytes_per_s=rate, origin="given by --bandwidth"))
    found = asyncio.run(bandwidth.measure(info.device.split(":")[0]))
    if isinstance(found, str):
        return Roofline(facts=facts, bandwidth=None, unknown=found)
    return Roofline(facts=facts, bandwidth=found)


def main(options: LatencyOptions) -> int:
    """Measure and print.

    Raises:
        ConfigError: The model, the settings or a batch that cannot run at once.
        EngineError: The engine failed.
    """
    from dovetail.processing.prepare import prepare
    from dovetail_server.start import preflight

    prepared = prepare(preflight.with_model(options.settings), text=False)
    settings, plan = prepared.settings, prepared.plan
    engine = BareEngine(engine_settings(settings), plan)
    info, rounds = asyncio.run(measure(engine, options))
    roofline = roofline_for(settings, info, options.bandwidth)
    rows = [row_of(size, found, options, roofline) for size, found in rounds.items()]
    show(options, info, roofline, rows)
    report.save(
        options.json,
        {
            "version": dovetail.__version__,
            "engine": msgspec.to_builtins(info),
            "floor": roofline.as_dict(),
            "input_len": options.input_len,
            "output_len": options.output_len,
            "rows": [asdict(row) for row in rows],
        },
    )
    return 0


async def measure(engine: BareEngine, options: LatencyOptions) -> tuple[EngineInfo, dict[int, list[Any]]]:
    """Run every batch size, after a round that does not count."""
    found: dict[int, list[Any]] = {}
    try:
        info = await engine.client.start()
        check_room(info, options)
        vocabulary = PromptVocabulary.of_size(info.vocab_size, "the engine's")
        for size in options.batch_sizes:
            params = SamplerParams(
                max_tokens=options.output_len,
                temperature=options.temperature,
                top_p=options.top_p,
                ignore_eos=True,
            )
            found[size] = []
            lengths = (options.input_len,) * 2, (options.output_len,) * 2
            load = Workload(name=f"{size}", num_prompts=1, concurrency=1, input_len=lengths[0], output_len=lengths[1])
            for number in range(options.rounds + 1):
                drawn = RandomIds(vocabulary, f"{options.seed}/{number}").draw(load, size)
                prompts = [prompt for prompt, _ in drawn if isinstance(prompt, list)]
                result = await engine.run(prompts, params)  # type: ignore[arg-type]  # ids, not messages
                if number:
                    found[size].append(result)
    finally:
        await engine.client.close()
    return info, found


def check_room(info: EngineInfo, options: LatencyOptions) -> None:
    """Refuse what would not run as one batch.

    Raises:
        ConfigError: Naming the flag to change.
    """
    most, length = max(options.batch_sizes), options.input_len + options.output_len
    if length > info.context_len:
        raise ConfigError(
            f"--input-len {options.input_len} and --output-len {options.output_len}: the model's context is "
            f"{info.context_len} tokens; give less"
        )
    if most > info.max_running_requests:
        raise ConfigError(f"--batch-size {most}: the engine runs {info.max_running_requests} at once; raise "
                          "--max-running-requests")  # fmt: skip
    pages = -(-length // info.page_size) * info.page_size
    if most * pages > info.max_total_tokens:
        raise ConfigError(
            f"--batch-size {most}: needs {most * pages:,} tokens of KV cache, there are {info.max_total_tokens:,}; "
            "give a smaller batch, or raise --max-total-tokens"
        )


def row_of(size: int, rounds: Sequence[Any], options: LatencyOptions, roofline: Roofline) -> Row:
    """Take the medians of the rounds."""
    prefill = statistics.median(max(each.firsts) for each in rounds)
    steps = [each.decode_step_s for each in rounds if each.decode_step_s is not None]
    step = statistics.median(steps) if steps else None
    least = roofline.step_s(size, options.input_len + options.output_len / 2)
    return Row(
        batch_size=size,
        prefill_ms=1000 * prefill,
        first_ms=1000 * statistics.median(statistics.median(each.firsts) for each in rounds),
        prompt_tok_s=size * options.input_len / prefill,
        decode_ms=1000 * step if step is not None else None,
        decode_tok_s=size / step if step is not None else None,
        output_tok_s=statistics.median(size * options.output_len / each.total_s for each in rounds),
        floor_ms=1000 * least if least is not None else None,
        of_floor=least / step if least is not None and step is not None else None,
    )


def show(options: LatencyOptions, info: EngineInfo, roofline: Roofline, rows: Sequence[Row]) -> None:
    """Print the table."""
    table = Table(title=f"{info.architecture} on {info.device}, {options.input_len} in, {options.output_len} out")
    for name in ("batch", "prefill ms", "first token ms", "prompt tok/s", "decode ms", "floor ms", "of floor",
                 "decode tok/s", "output tok/s"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.batch_size),
            report.number(row.prefill_ms, 1),
            report.number(row.first_ms, 1),
            report.number(row.prompt_tok_s),
            report.number(row.decode_ms, 3),
            report.number(row.floor_ms, 3),
            report.share(row.of_floor),
            report.number(row.decode_tok_s),
            report.number(row.output_tok_s),
        )
    out = report.console()
    out.print(table)
    out.print(roofline.describe(), highlight=False, markup=False, soft_wrap=True)
