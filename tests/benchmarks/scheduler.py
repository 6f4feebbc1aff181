"""What planning a step costs the host, by how many requests wait: `python tests/benchmarks/scheduler.py`.

No model: a step appends a token to whatever samples. 256 requests decode, and all rows are taken. With `--free` half of
the rows are free but hardly a page is, so that the queue's head is looked at. Microseconds, medians of 200 steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time

from rich.console import Console
from rich.table import Table

from dovetail.engine.device_rows import DeviceRows
from dovetail.engine.kv_cache_manager import KVCacheManager
from dovetail.engine.request import EngineRequest
from dovetail.engine.scheduler import Scheduler, StepLimits
from dovetail.messages import SamplerParams, Submit
from dovetail_testing.engine import make_policy

NUM_RUNNING, PAGE_SIZE, NUM_STEPS = 256, 16, 200


class Bench:
    """A scheduler under load."""

    def __init__(self, policy: str, *, rows: int, num_pages: int) -> None:
        pages = KVCacheManager(DeviceRows(rows), page_size=PAGE_SIZE, num_pages=[num_pages])
        self.scheduler = Scheduler(
            pages, make_policy(policy), StepLimits(max_running_requests=rows, max_prefill_tokens=8192)
        )
        self.rng = random.Random(0)
        self.shared = [[self.rng.randrange(1000) for _ in range(256)] for _ in range(8)]
        self.num = 0

    def add(self, max_tokens: int, own: int = 64) -> None:
        """Queue a request behind one of eight prefixes."""
        self.num += 1
        prompt = self.rng.choice(self.shared) + [self.rng.randrange(1000) for _ in range(own)]
        submit = Submit(rid="", handle=self.num, prompt_ids=prompt, params=SamplerParams(max_tokens=max_tokens))
        request = EngineRequest.from_submit(submit, arrival=self.num, eos_ids=())
        self.scheduler.add(request)

    def step(self) -> float:
        """Make a step; returns the seconds of planning it."""
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        took = time.perf_counter() - started
        self.scheduler.launching(plan)
        self.scheduler.launched(plan)
        self.scheduler.step_finished(plan)
        self.scheduler.counted(plan)
        for request in plan.decode + [chunk.request for chunk in plan.chunks if chunk.samples]:
            request.append_token(1)
        return took


def measure(policy: str, num_waiting: int, *, free: bool) -> float:
    """Microseconds of a step's planning."""
    pages = 9000 if free else 12000
    bench = Bench(policy, rows=2 * NUM_RUNNING if free else NUM_RUNNING, num_pages=pages)
    for _ in range(NUM_RUNNING):
        bench.add(600)
    bench.scheduler.ratio.value = 0.1
    for _ in range(20):
        bench.step()
    if sum(request.on_device for request in bench.scheduler.running) != NUM_RUNNING:
        raise RuntimeError("the pool is too small for this load")
    for _ in range(num_waiting):
        bench.add(600 if not free else 3000)
    bench.scheduler.ratio.value = 0.7 if free else 0.1
    for _ in range(20):
        bench.step()
    return 1e6 * statistics.median(bench.step() for _ in range(NUM_STEPS))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--free", action="store_true", help="rows are free, pages are not")
    args = parser.parse_args()
    table = Table(title="microseconds to plan a step, 256 running")
    counts = (0, 100, 1000, 4000)
    for name in ("policy", *(f"{num:,} waiting" for num in counts)):
        table.add_column(name, justify="right")
    for policy in ("fcfs", "lof", "lpm", "priority"):
        table.add_row(policy, *(f"{measure(policy, num, free=args.free):,.0f}" for num in counts))
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
