"""An engine of several ranks, without HTTP: its start, its rates, a step's kernels, a rank's death, what it says."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from dovetail.base.settings import EngineSettings
from dovetail.messages import ProfileSpec, SamplerParams, Submit, TokenDelta
from dovetail.plugins import Registry, make_plan
from dovetail.runtime.hf_config import architecture, quant_method, read_config
from dovetail_server.supervision.engine_process import ProcessClient, Restarts

Run = list[tuple[float, TokenDelta]]
"""What came of a stream, and when."""
SUMS = ("push_kernel", "_peer_sum_kernel", "AllReduce")
"""Parts of the names of kernels that add up ranks' shares."""
LISTED = 16
WARM_NEW = 64
WRITTEN_S = 60.0
"""In which a trace has to be there, once its load has ended."""
LOST_S = 120.0
"""In which the loss of a rank has to be noticed."""


class RankedEngine:
    """An engine in processes of its own, as `dovetail serve` starts it; random weights unless it is told otherwise."""

    def __init__(self, folder: Path, num: int, *, max_restarts: int = 0, **changes: Any) -> None:
        """Prepare.

        Args:
            folder: With a `config.json`.
            num: Ranks.
            max_restarts: How often it is started again when it ends.
            changes: Further settings.
        """
        usual = {"device": "cuda", "load_format": "dummy", "dtype": "bfloat16", "context_length": 2048}
        settings = EngineSettings.model_validate(
            {"model_path": str(folder), "tensor_parallel_size": num, **usual} | changes
        )
        hf = read_config(folder)
        plan = make_plan(
            Registry.scan(), model=architecture(hf, folder), attention_backend="auto", device=settings.device,
            quantization=settings.quantization, quant_method=quant_method(hf),
            checkpoint="dummy" if settings.load_format == "dummy" else None,
            kernels=settings.kernels,
        )  # fmt: skip
        restarts = Restarts(max_restarts=max_restarts, hang_s=120)
        self.client = ProcessClient(settings, plan, log_level="info", restarts=restarts)
        self.name = f"{folder.name}-{num}"
        self._num_ids = int(hf["vocab_size"])

    async def start(self) -> tuple[float, float]:
        """Start it; returns the seconds until it is ready, and until it has answered a short request."""
        began = time.perf_counter()
        self.info = await self.client.start()
        ready = time.perf_counter()
        await self.ask(1, 8, 1)
        return ready - began, time.perf_counter() - began

    async def close(self) -> None:
        """End it."""
        await self.client.close()

    async def streams(
        self, prompts: Sequence[list[int]], params: SamplerParams, begun: Callable[[], Awaitable[None]] | None = None
    ) -> list[Run]:
        """Send prompts at once; returns what came of each. `begun` is called when all have their first token."""
        runs: list[Run] = [[] for _ in prompts]

        async def one(ids: list[int], run: Run) -> None:
            async for delta in self.client.submit(Submit(rid="", prompt_ids=ids, params=params)):
                run.append((time.perf_counter(), delta))

        asked = asyncio.gather(*map(one, prompts, runs))
        while begun is not None and not all(runs) and not asked.done():
            await asyncio.sleep(0.001)
        if begun is not None and all(runs):
            await begun()
        await asked
        return runs

    async def ask(
        self, num: int, num_prompt: int, num_new: int, seed: int = 0, begun: Callable[[], Awaitable[None]] | None = None
    ) -> list[Run]:
        """Send so many prompts of random ids, each of one length, for replies of another; see `streams`."""
        rng = random.Random(seed)
        prompts = [[rng.randrange(self._num_ids) for _ in range(num_prompt)] for _ in range(num)]
        return await self.streams(prompts, greedy(num_new), begun)

    async def rate(self, num: int, num_prompt: int, num_new: int) -> float:
        """Tokens a second of so many streams while all decode; as many of other ids run before, for a shorter time."""
        await self.ask(num, num_prompt, min(num_new, WARM_NEW), seed=1)
        runs = await self.ask(num, num_prompt, num_new, seed=2)
        begin, end = max(run[0][0] for run in runs), min(run[-1][0] for run in runs)
        return sum(len(delta.ids) for run in runs for at, delta in run if begin < at <= end) / (end - begin)

    async def profile(self, num: int, num_prompt: int, num_new: int, steps: int, folder: Path) -> Path:
        """Record so many decode steps of a load into a folder, a file for each rank; returns that of the first."""
        name = f"{self.name}-{num}"
        activities = ("GPU",) if self.info.device.startswith("cuda") else ("CPU",)
        spec = ProfileSpec(folder=str(folder), name=name, num_steps=steps, activities=activities)

        async def record() -> None:
            await self.client.control("start_profile", spec)

        await self.ask(num, num_prompt, num_new, seed=3, begun=record)
        trace = folder / f"{name}-TP-0.trace.json"
        async with asyncio.timeout(WRITTEN_S):
            while not trace.exists():
                await asyncio.sleep(0.05)
        return trace

    async def kill_rank(self) -> str:
        """End the last rank by SIGKILL; returns why the engine is started again."""
        ranks = subprocess.run(["pgrep", "-P", str(self.client.pid), "-f", "rank_main"], capture_output=True)
        os.kill(int(ranks.stdout.split()[-1]), signal.SIGKILL)
        async with asyncio.timeout(LOST_S):
            while (why := self.client.restarting) is None:
                await asyncio.sleep(0.001)
        return why

    async def lose_rank(self, num: int, num_prompt: int, num_new: int) -> dict[str, Any]:
        """End a rank when so many streams have begun; returns what becomes of them."""
        killed_at, said = 0.0, ""

        async def kill() -> None:
            nonlocal killed_at, said
            killed_at = time.perf_counter()
            said = await self.kill_rank()

        runs = await self.ask(num, num_prompt, num_new, seed=4, begun=kill)
        whole = sum(sum(len(delta.ids) for _, delta in run) == num_new for run in runs)
        pauses = [after - at for run in runs for (at, _), (after, _) in itertools.pairwise(run)]
        return {
            "streams": num, "whole": whole, "restarts": self.client.num_restarts, "said": said,
            "longest_pause_s": max(pauses, default=0.0), "whole_after_s": time.perf_counter() - killed_at,
        }  # fmt: skip


def greedy(num_new: int, **more: Any) -> SamplerParams:
    """Ask for so many of the likeliest tokens."""
    return SamplerParams(max_tokens=num_new, temperature=0.0, ignore_eos=True, **more)


Said = list[list[tuple[int, float]]]
"""Tokens and their log probabilities, of each prompt."""


def said(
    folder: Path, num: int, prompts: Sequence[list[int]], num_new: int = 32, *, kill: bool = False, **changes: Any
) -> tuple[Said, int]:
    """What an engine of so many ranks makes of a checkpoint, and how often it was started again.

    Args:
        folder: The checkpoint.
        num: Ranks.
        prompts: Are asked at once.
        num_new: Tokens of each reply.
        kill: End a rank when all have begun.
        changes: Further settings.
    """

    async def run() -> tuple[Said, int]:
        engine = RankedEngine(folder, num, max_restarts=int(kill), load_format="auto", **changes)
        await engine.client.start()
        try:

            async def begun() -> None:
                if kill:
                    await engine.kill_rank()

            runs = await engine.streams(prompts, greedy(num_new, logprobs=0), begun)
            rows = [[row for _, delta in one for row in delta.logprobs or ()] for one in runs]
            return [[(row.token_id, row.logprob) for row in one] for one in rows], engine.client.num_restarts
        finally:
            await engine.close()

    return asyncio.run(run())


def errors(found: Said, exact: Said) -> list[float]:
    """How far log probabilities are off, up to the first token of each text that is another one."""
    off = []
    for mine, right in zip(found, exact, strict=True):
        for (token, logprob), (other, wanted) in zip(mine, right, strict=True):
            if token != other:
                break
            off.append(abs(logprob - wanted))
    return off


def kernels_of(trace: Path, steps: int) -> list[dict[str, Any]]:
    """What the kernels of a rank take a step, by name, the longest first; and the device's time without any.

    Kernels of two streams may overlap, and one may wait inside for another rank.
    """
    events = json.loads(trace.read_text())["traceEvents"]
    found = sorted(
        (e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    took: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for _, lasted, name in found:
        took[name] += lasted
        count[name] += 1
    ends = itertools.accumulate((at + lasted for at, lasted, _ in found), max)
    idle = sum(max(0.0, at - end) for end, (at, _, _) in zip(ends, found[1:], strict=False))
    span = max(at + lasted for at, lasted, _ in found) - found[0][0] if found else 0
    rows = [
        {"kernel": name[:60], "launches": round(count[name] / steps, 1), "us": us / steps, "us each": us / count[name]}
        for name, us in took.most_common(LISTED)
    ]
    sums = [name for name in took if any(part in name for part in SUMS)]
    added: dict[str, Any] = {"kernel": "sums", "launches": round(sum(count[name] for name in sums) / steps, 1)}
    added["us"] = sum(took[name] for name in sums) / steps
    every = {"kernel": "all", "launches": round(len(found) / steps, 1), "us": sum(took.values()) / steps}
    return [*rows, added, every, {"kernel": "none runs", "us": idle / steps}, {"kernel": "a step", "us": span / steps}]
