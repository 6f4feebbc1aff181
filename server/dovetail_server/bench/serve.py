"""`dovetail bench serve`: from checked options to the printed table."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import aiohttp
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import dovetail
from dovetail.contracts.compiler import AheadCompiler
from dovetail.contracts.errors import ConfigError
from dovetail.plugins.plan import AUTO
from dovetail.plugins.registry import Registry
from dovetail.runtime.device.devices import HOST, best, installed
from dovetail.sdk.config import ITEM_BYTES
from dovetail_server.bench import bandwidth, prompts, report
from dovetail_server.bench.drive import Run, drive
from dovetail_server.bench.results import WorkloadResult, results_of
from dovetail_server.bench.roofline import Bandwidth, ModelFacts, Roofline, facts_of, quantised_by
from dovetail_server.bench.target import BenchTarget, clean_url, discover, probe
from dovetail_server.bench.wire import BenchSampling, Prompt
from dovetail_server.bench.worker import open_session
from dovetail_server.bench.workloads import ServeOptions, Workload, sampling_text
from dovetail_server.terminal.own_server import serving

# Compiled kernels that are kept for later starts: what a start found.


@dataclass(frozen=True, slots=True)
class CacheLook:
    """A cache as it was before a server was started.

    Attributes:
        compiler: Whose cache; None: the device keeps no kernels.
        before: The kernels in it.
    """

    compiler: type[AheadCompiler] | None
    before: frozenset[str]

    @classmethod
    def now(cls) -> CacheLook:
        """Look at the cache that a server will use which takes the best device, without importing torch."""
        compiler = best(each for _, each in installed(Registry.scan(), AUTO)).compiler()
        return cls(compiler, frozenset(compiler.kept() if compiler is not None else ()))

    @property
    def num_new(self) -> int:
        """Kernels that were compiled since."""
        return len(self.compiler.kept().keys() - self.before) if self.compiler is not None else 0

    def state(self) -> str:
        """Say what a server met that was started then: `empty`, `full`, or how much was missing so far."""
        new = self.num_new
        if not self.before:
            return "empty"
        return f"{len(self.before):,} kernels there, {new:,} missing" if new else "full"


MANAGED = ("--host", "--port", "--model-path", "--model")
"""Flags of the server that is started here."""
FIRST_PROMPT = list(range(1, 9))
"""What a server that was just started is asked first: ids that every vocabulary has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeStart:
    """How our own server started: how long it took, in seconds, and what its kernel cache held before.

    Attributes:
        ready_at: When it was ready, by the clock of `time.monotonic`.
    """

    ready_s: float
    first_answer_s: float = 0.0
    ready_at: float
    cache: CacheLook

    def kernel_cache(self, target: BenchTarget) -> str | None:
        """Say what the server found of its kernels; None on a device that needs none."""
        return None if target.device == HOST or self.cache.compiler is None else self.cache.state()


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What prompts are made from."""

    vocabulary: prompts.PromptVocabulary | None
    lines: Sequence[tuple[Prompt, int | None]]
    wants_text: bool

    def source(self, seed: str, *, skip: int = 0) -> prompts.PromptSource:
        """Return prompts; other seeds, or another `skip` of a file, give others."""
        if self.vocabulary is None:
            return prompts.FilePrompts(self.lines, skip)
        ids = prompts.RandomIds(self.vocabulary, seed)
        return prompts.RandomText(ids) if self.wants_text else ids


async def run(
    options: ServeOptions, base_url: str, lines: Sequence[tuple[Prompt, int | None]], start: ServeStart | None
) -> int:
    """Measure and print.

    Args:
        options: The command's.
        base_url: Of the server.
        lines: Of the data set, if one is given.
        start: Of our own server.

    Returns:
        0, or 1 if requests failed.

    Raises:
        ConfigError: The server, the model or the options do not fit; nothing was measured.
        DovetailError: The server or a client process failed on the way.
    """
    async with open_session(options.headers, options.timeout_s) as session:
        target = await discover(session, base_url, options.model)
        if start is not None:
            await probe(session, target, "completions", FIRST_PROMPT, BenchSampling(model=target.model, stream=False))
            start = replace(start, first_answer_s=time.monotonic() - start.ready_at + start.ready_s)
        facts = model_facts(options, target)
        material = material_of(options, lines, target, facts)
        supports = await probe_all(session, target, options, material)
        roofline = await find_roofline(options, target, facts)
        found = await measure_all(options, target, supports, material, roofline, start)
    about = describe(target, roofline, start, options, found) + report.compared(found)
    report.show(report.console(), f"{target.model} at {target.base_url}", found, about)
    return 1 if any(result.num_failed for result in found) else 0


async def measure_all(
    options: ServeOptions,
    target: BenchTarget,
    supports: bool,
    material: Material,
    roofline: Roofline,
    start: ServeStart | None,
) -> list[WorkloadResult]:
    """Run every workload; the JSON file is written after each."""
    setup = Run(
        base_url=target.base_url,
        endpoint=options.endpoint,
        sampling=sampling_of(options, target),
        headers=options.headers,
        supports_counts=supports,
        seed=options.seed,
        workers=options.workers,
        timeout_s=options.timeout_s,
    )
    found: list[WorkloadResult] = []
    for workload in options.workloads:
        since_ready_s = time.monotonic() - start.ready_at if start is not None else None
        result = await measure(workload, setup, material, roofline)
        sampling = sampling_text(workload, options.temperature, target.defaults)
        found.append(replace(result, sampling=sampling, since_ready_s=since_ready_s))
        report.save(options.json, as_report(target, roofline, start, options, found))
        if len(options.workloads) > 1:
            print(report.brief(found[-1]), file=sys.stderr, flush=True)
    return found


def sampling_of(options: ServeOptions, target: BenchTarget) -> BenchSampling:
    """Return what all requests have in common."""
    return BenchSampling(model=target.model, temperature=options.temperature, ignore_eos=options.ignore_eos)


async def probe_all(
    session: aiohttp.ClientSession, target: BenchTarget, options: ServeOptions, material: Material
) -> bool:
    """Send a test request streamed, and one not, as will be measured; returns whether streams can tell their tokens."""
    supports, common = False, sampling_of(options, target)
    tiny = Workload(name="probe", num_prompts=1, concurrency=1, input_len=(8, 8), output_len=(4, 4))
    prompt = next(iter(material.source(f"{options.seed}/probe").draw(tiny, 1)))[0]
    # One of each is enough, and of the first workload's kind: what others ask for may be what is measured cold.
    for workload in {w.stream: w for w in reversed(options.workloads)}.values():
        one = replace(common, stream=workload.stream, extra=workload.extra)
        supports |= await probe(session, target, options.endpoint, prompt, one)
    return supports


def model_facts(options: ServeOptions, target: BenchTarget) -> ModelFacts | str:
    """Find what a step reads, or why it is not known."""
    folder = options.model_path or target.model_folder
    if folder is None:
        return "the model's config.json is not known; give --model-path DIR"
    quantised = quantised_by(target.engine.get("plugins") or ())
    dtype = target.dtype if target.dtype in ITEM_BYTES else None
    return facts_of(folder, dtype, quantised, target.state_dtype)


def material_of(
    options: ServeOptions,
    lines: Sequence[tuple[Prompt, int | None]],
    target: BenchTarget,
    facts: ModelFacts | str,
) -> Material:
    """Choose what prompts are made from: the lines of a file if there are any.

    Raises:
        ConfigError: Neither a vocabulary's size nor a tokenizer is known.
    """
    wants_text = options.sends_text
    if lines:
        return Material(vocabulary=None, lines=lines, wants_text=wants_text)
    folder = options.tokenizer
    if folder is None and wants_text:
        folder = next(
            (f for f in (options.model_path, target.model_folder) if f and (f / "tokenizer.json").is_file()), None
        )
        if folder is None:
            instead = "" if options.endpoint == "chat" else ", or --prompts ids"
            raise ConfigError(
                f"prompts of text are made by a tokenizer; give --tokenizer DIR, the model's folder{instead}"
            )
    if folder is not None:
        vocabulary = prompts.PromptVocabulary.of_folder(folder, readable=wants_text)
    elif target.vocab_size is not None:
        vocabulary = prompts.PromptVocabulary.of_size(target.vocab_size, "size told by the server")
    elif isinstance(facts, ModelFacts):
        vocabulary = prompts.PromptVocabulary.of_size(facts.vocab_size, "size from config.json")
    else:
        raise ConfigError("the size of the model's vocabulary is not known; give --tokenizer DIR or --model-path DIR")
    return Material(vocabulary=vocabulary, lines=(), wants_text=wants_text)


async def find_roofline(options: ServeOptions, target: BenchTarget, facts: ModelFacts | str) -> Roofline:
    """Put the floor together from what was given, what the server tells and what can be measured here."""
    rate: Bandwidth | str
    if options.bandwidth is not None:
        rate = Bandwidth(bytes_per_s=options.bandwidth, origin="given by --bandwidth")
    elif isinstance(facts, str):
        rate = "not measured"
    elif not target.is_local:
        rate = "the server is on another machine, whose bandwidth is not known; give --bandwidth"
    else:
        rate = await bandwidth.measure(target.device or "auto")
    reason = facts if isinstance(facts, str) else rate if isinstance(rate, str) else None
    return Roofline(
        facts=None if isinstance(facts, str) else facts,
        bandwidth=None if isinstance(rate, str) else rate,
        unknown=reason,
    )


async def measure(workload: Workload, run: Run, material: Material, roofline: Roofline) -> WorkloadResult:
    """Run one workload behind a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=not report.console().is_terminal) as progress:
        task = progress.add_task(workload.name, total=workload.num_prompts)
        source = material.source(f"{run.seed}")
        warm = material.source(f"{run.seed}/warm-up", skip=workload.num_prompts)
        seen = await drive(workload, run, source, warm, lambda done: progress.update(task, completed=done))
    wanted = [length for _, length in source.draw(workload, workload.num_prompts)] if run.sampling.ignore_eos else []
    wanted = wanted or [0] * workload.num_prompts
    return results_of(workload, seen, roofline, wanted)


def describe(
    target: BenchTarget,
    roofline: Roofline,
    start: ServeStart | None,
    options: ServeOptions,
    found: Sequence[WorkloadResult],
) -> list[str]:
    """Say in lines what was measured, under which conditions, and what the floor rests on."""
    version = f" {target.version}" if target.version else ""
    prompts_are = f"from {options.dataset}" if options.dataset else "text" if options.sends_text else "token ids"
    lines = [f"server: {target.kind}{version}; {options.endpoint}, prompts: {prompts_are}; seed {options.seed}"]
    by_words: dict[str, list[str]] = {}
    for result in found:
        by_words.setdefault(result.sampling, []).append(result.workload.name)
    lines += [f"sampling: {words} ({', '.join(names)})" for words, names in by_words.items()]
    if start is not None:
        kernels = start.kernel_cache(target)
        lines.append(
            f"start to ready {start.ready_s:.1f} s, to the first answer {start.first_answer_s:.1f} s; the first load "
            f"{found[0].since_ready_s or 0:.1f} s after ready; kernel cache: {kernels or 'none needed on this device'}"
        )
    lines.append(roofline.describe())
    return lines


def as_report(
    target: BenchTarget,
    roofline: Roofline,
    start: ServeStart | None,
    options: ServeOptions,
    found: Sequence[WorkloadResult],
) -> dict[str, Any]:
    """Return everything for JSON."""
    return {
        "version": dovetail.__version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "server": {
            "base_url": target.base_url,
            "model": target.model,
            "kind": target.kind,
            "version": target.version,
            "endpoint": options.endpoint,
            "device": target.device,
            "device_name": roofline.bandwidth.device if roofline.bandwidth is not None else None,
            "num_devices": target.num_devices,
            "engine": target.engine,
        },
        "options": {
            "suite": options.suite,
            "seed": options.seed,
            "temperature": options.temperature,
            "ignore_eos": options.ignore_eos,
            "prompts": "file" if options.dataset else "text" if options.sends_text else "ids",
            "dataset": str(options.dataset) if options.dataset else None,
            "serve_flags": list(options.serve_flags),
        },
        "start": None
        if start is None
        else {
            "ready_s": start.ready_s,
            "first_answer_s": start.first_answer_s,
            "kernel_cache": start.kernel_cache(target),
            "num_kernels_before": len(start.cache.before),
            "num_kernels_compiled": start.cache.num_new,
        },
        "floor": roofline.as_dict(),
        "workloads": [asdict(result) for result in found],
    }


def main(options: ServeOptions) -> int:
    """Run the command in an event loop; a signal ends it with its child processes.

    Raises:
        ConfigError: As `run`; or the flags of the server set what is set here.
        DovetailError: As `run`.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    lines = prompts.read_dataset(options.dataset, options.endpoint) if options.dataset is not None else []
    if options.base_url is not None:
        return asyncio.run(run(options, clean_url(options.base_url), lines, None))
    for name in (flag.split("=", 1)[0] for flag in options.serve_flags):
        if name.replace("_", "-") in MANAGED:
            raise ConfigError(f"{name} after `--`: set by the benchmark; leave it out")
    cache, began = CacheLook.now(), time.monotonic()
    with serving(str(options.model_path), options.serve_flags, options.api_key, options.start_timeout_s) as server:
        ready_at = time.monotonic()
        start = ServeStart(ready_s=ready_at - began, ready_at=ready_at, cache=cache)
        return asyncio.run(run(options, server.url, lines, start))
