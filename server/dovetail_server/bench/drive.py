"""Runs one workload: starts client processes, lets them begin together, gathers what they saw."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from dovetail.contracts.errors import DovetailError
from dovetail_server.bench.jobs import LENGTH, ClientPlan, ClientResult, Progress, Record, Report, Shot, Warm, frame
from dovetail_server.bench.prompts import PromptSource
from dovetail_server.bench.wire import PATHS, BenchSampling, body_of
from dovetail_server.bench.workloads import Workload

ALL_COUNTED, ONE_OF = 4, 16
"""Up to so many streams at once, every one is asked to count its tokens in each event; beyond, one of so many is.

The counts more than double the size of a small event and cost the server work, so that a measurement of throughput must
not ask for them everywhere.
"""
HEAD_START_S = 0.1
decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How workloads are sent."""

    base_url: str
    endpoint: str
    sampling: BenchSampling
    headers: dict[str, str]
    supports_counts: bool
    """The server can say in every event how many tokens there are so far."""
    seed: int
    workers: int | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What the clients of a workload saw."""

    records: list[Record]
    workers: int
    busy: float
    """Share of a core that the busiest client process used."""


def num_workers(concurrency: int, wanted: int | None) -> int:
    """Client processes: as asked, else one per 32 requests at once, at most half of the cores and 8."""
    if wanted is not None:
        return min(wanted, concurrency)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min((concurrency + 31) // 32, cores // 2, 8))


def shots_of(workload: Workload, run: Run, prompts: PromptSource, num: int, *, timed: bool) -> list[Shot]:
    """Write the bodies of `num` requests; `timed` spreads them by the workload's request rate."""
    sampling = replace(run.sampling, stream=workload.stream, extra=workload.extra)
    shots, at, rng = [], 0.0, random.Random(run.seed)
    for index, (prompt, output_len) in enumerate(prompts.draw(workload, num)):
        counted = workload.stream and run.supports_counts
        counted = counted and (workload.slots <= ALL_COUNTED or index % ONE_OF == 0)
        body = body_of(run.endpoint, prompt, output_len, sampling, counts_events=counted)
        when = None
        if timed and workload.request_rate is not None:
            when, at = at, at + rng.expovariate(workload.request_rate)
        counted = counted or (workload.stream and run.endpoint == "generate")
        shots.append(Shot(index, json.dumps(body, separators=(",", ":")).encode(), counted, when))
    return shots


def split(run: Run, workload: Workload, warmup: Sequence[Shot], shots: Sequence[Shot]) -> list[ClientPlan]:
    """Deal the requests out to client processes, and the places in flight."""
    slots = min(workload.slots, max(len(shots), len(warmup)))
    num = num_workers(slots, run.workers)
    return [
        ClientPlan(
            url=run.base_url + PATHS[run.endpoint],
            headers={"content-type": "application/json", **run.headers},
            stream=workload.stream,
            slots=slots // num + (i < slots % num),
            timeout_s=run.timeout_s,
            warmup=list(warmup[i::num]),
            shots=list(shots[i::num]),
        )
        for i in range(num)
    ]


class ClientProcess:
    """A client process, seen from here."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.num_done = 0

    @classmethod
    async def start(cls) -> ClientProcess:
        """Start a process that waits for its job."""
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "dovetail_server.bench.worker", stdin=pipe, stdout=pipe
            )
        )

    async def send(self, message: object) -> None:
        """Send a message."""
        stdin = self.process.stdin
        if stdin is not None:
            stdin.write(frame(message))
            await stdin.drain()

    async def receive(self) -> Warm | ClientResult:
        """Wait for the end of the warm-up, or of the run.

        Raises:
            DovetailError: The process ended first.
        """
        stdout = self.process.stdout
        while stdout is not None:
            try:
                head = await stdout.readexactly(LENGTH.size)
                report = decoder.decode(await stdout.readexactly(LENGTH.unpack(head)[0]))
            except asyncio.IncompleteReadError:
                break
            if not isinstance(report, Progress):
                return report
            self.num_done = report.done
        raise DovetailError(f"a client process ended with code {await self.process.wait()} before its work was done")

    async def stop(self) -> None:
        """End the process if it has not ended."""
        if self.process.returncode is None:
            if self.process.stdin is not None:
                self.process.stdin.close()
            self.process.kill()
        await self.process.wait()


async def drive(
    workload: Workload, run: Run, prompts: PromptSource, warm_prompts: PromptSource, report_done: Callable[[int], None]
) -> Seen:
    """Run a workload after its warm-up, whose prompts are others, so that nothing measured is cached already.

    `report_done` is called now and then with the number of requests that have ended.

    Where every request of the warm-up failed, those are the records, and the run is left out.

    Raises:
        DovetailError: A client process died.
    """
    warmup = shots_of(workload, run, warm_prompts, workload.num_warmup, timed=False)
    shots = shots_of(workload, run, prompts, workload.num_prompts, timed=True)
    jobs = split(run, workload, warmup, shots)
    workers = [await ClientProcess.start() for _ in jobs]
    ticker: asyncio.Task[None] | None = None
    try:
        await asyncio.gather(*(worker.send(job) for worker, job in zip(workers, jobs, strict=True)))
        warm = await asyncio.gather(*(worker.receive() for worker in workers))
        errors = [error for each in warm if isinstance(each, Warm) for error in each.errors]
        if warmup and len(errors) == len(warmup):
            return Seen([Record(index=i, start=0.0, error=error) for i, error in enumerate(errors)], len(workers), 0.0)
        ticker = asyncio.create_task(_tick(workers, report_done))
        start = time.monotonic() + HEAD_START_S
        await asyncio.gather(*(worker.send(start) for worker in workers))
        ends = [end for end in await asyncio.gather(*(w.receive() for w in workers)) if isinstance(end, ClientResult)]
    finally:
        if ticker is not None:
            ticker.cancel()
        await asyncio.gather(*(worker.stop() for worker in workers))
    records = sorted((record for end in ends for record in end.records), key=lambda record: record.index)
    return Seen(records, len(workers), max(end.busy for end in ends))


async def _tick(workers: Sequence[ClientProcess], report_done: Callable[[int], None]) -> None:
    while True:
        await asyncio.sleep(0.25)
        report_done(sum(worker.num_done for worker in workers))
