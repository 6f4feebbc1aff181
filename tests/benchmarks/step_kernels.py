"""Where the time of a step goes on a GPU.

`python tests/benchmarks/step_kernels.py MODEL_FOLDER [--decode 1x512 64x2112/2048 …]`

A load `BxL` is B requests that decode after L tokens each; `BxL/S` the same where the first S tokens are common. The
engine runs in this process with random weights. For each load: the time of a wave's prefill and of a decode step as
the engine makes them, and the kernels of a step with their share of the device's time.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from dovetail.engine.core import EngineCore
from dovetail.messages import SamplerParams, Submit
from dovetail_testing.engine import make_core

NUM_TIMED, NUM_PROFILED = 60, 5


def load(text: str) -> tuple[int, int, int]:
    """Requests, tokens of each, and how many of these are common."""
    found = re.fullmatch(r"(\d+)x(\d+)(?:/(\d+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted REQUESTSxTOKENS or REQUESTSxTOKENS/COMMON")
    batch, length, common = int(found[1]), int(found[2]), int(found[3] or 0)
    return batch, length, common


def submit(core: EngineCore, batch: int, length: int, common: int, round_: int) -> None:
    """Requests that stay for all steps of a measurement."""
    rng = random.Random(f"{batch}/{length}/{common}/{round_}")
    shared = [rng.randrange(1000) for _ in range(common)]
    params = SamplerParams(max_tokens=NUM_TIMED + 4 * NUM_PROFILED + 20, temperature=0, ignore_eos=True)
    for i in range(batch):
        own = [rng.randrange(1000) for _ in range(length - common)]
        core.handle(Submit(rid="", handle=i, prompt_ids=shared + own, params=params))


def prefill_ms(core: EngineCore) -> tuple[float, int]:
    """Steps until every request decodes: their time, and how many."""
    torch.cuda.synchronize()
    started, steps = time.perf_counter(), 0
    while core.scheduler.waiting or any(not request.on_device for request in core.scheduler.running):
        core.step()
        steps += 1
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started), steps


def decode_ms(core: EngineCore) -> float:
    """A step where all decode, in a row of many."""
    for _ in range(10):
        core.step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(NUM_TIMED):
        core.step()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started) / NUM_TIMED


Row = tuple[str, float, float, int]


def kernels(core: EngineCore, run: Any) -> list[Row]:
    """What the device did, by kernel: its time, what it added to the whole, and launches; what adds most first.

    Kernels overlap where one waits for another inside. What one adds is the time from the end of whatever ended last
    before it to its own end; idle time counts for the kernel after it.
    """
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        run()
        torch.cuda.synchronize()
    events = [e for e in found.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    times: Counter[str] = Counter()
    added: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    last = min((e.time_range.start for e in events), default=0)
    for event in sorted(events, key=lambda e: e.time_range.end):
        times[event.name] += event.device_time_total / 1000
        added[event.name] += max(0.0, event.time_range.end - last) / 1000
        counts[event.name] += 1
        last = max(last, event.time_range.end)
    return [(name, times[name], more, counts[name]) for name, more in added.most_common()]


def drain(core: EngineCore) -> None:
    """End what runs, and forget what is cached."""
    from dovetail.messages import Abort, Control

    for request in [*core.scheduler.running, *core.scheduler.waiting]:
        core.handle(Abort(request.handle))
    while core.has_work:
        core.step()
    core.handle(Control(id=0, op="flush_cache"))


def table(title: str, rows: list[Row], per: int, most: int) -> Table:
    """The kernels that add most."""
    shown = Table(title=title, title_justify="left")
    for name in ("kernel", "launches", "ms added", "us added", "us each"):
        shown.add_column(name, justify="left" if name == "kernel" else "right", no_wrap=True)
    for name, took, more, count in rows[:most]:
        each = (f"{more / per:.3f}", f"{1000 * more / count:.1f}", f"{1000 * took / count:.1f}")
        shown.add_row(name[:58], f"{count / per:.1f}", *each)
    shown.add_row("all", f"{sum(row[3] for row in rows) / per:.0f}", f"{sum(row[2] for row in rows) / per:.3f}", "", "")
    return shown


def main() -> int:
    """Measure each load in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--decode", nargs="+", type=load, default=[(1, 512, 0), (16, 512, 0), (64, 512, 0)])
    parser.add_argument("--most", type=int, default=12, help="kernels listed")
    parser.add_argument("--max-total-tokens", type=int, default=400_000)
    parser.add_argument("--prefill", action="store_true", help="list the kernels of the prefill too")
    args = parser.parse_args()
    core = make_core(
        args.folder, device="cuda", dtype="auto", load_format="dummy", max_total_tokens=args.max_total_tokens
    )
    started = time.perf_counter()
    while core.has_idle_tasks:
        core.run_idle_task()
    console = Console(width=120)
    console.print(f"{args.folder.name}: chores took {time.perf_counter() - started:.1f} s")
    for batch, length, common in args.decode:
        times = []
        for round_ in range(3):
            submit(core, batch, length, common, round_)
            times.append(prefill_ms(core))
            if round_ < 2:
                drain(core)
        step = statistics.median(decode_ms(core) for _ in range(1))
        rows = kernels(core, lambda: [core.step() for _ in range(NUM_PROFILED)])
        name = f"{batch}x{length}" + (f"/{common}" if common else "")
        took = ", ".join(f"{ms:.1f} ms in {steps}" for ms, steps in times)
        title = f"{name}: prefill {took} steps; decode step {step:.3f} ms"
        console.print(table(title, rows, NUM_PROFILED, args.most))
        drain(core)
        if args.prefill:
            submit(core, batch, length, common, 9)
            rows = kernels(core, lambda: prefill_ms(core))
            console.print(table(f"{name}: the prefill's kernels", rows, 1, args.most))
            drain(core)
    core.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
