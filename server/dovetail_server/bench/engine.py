"""The engine without HTTP: a process of its own, as it serves, whose tokens are read here as they come."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.base.settings import EngineSettings
from dovetail.contracts.errors import EngineError
from dovetail.engine.process import ProcessClient
from dovetail.messages import EngineInfo, SamplerParams, Submit
from dovetail.plugins import PluginPlan

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

    async def start(self) -> EngineInfo:
        """Start the process and wait until it is ready.

        Raises:
            ConfigError: The settings or the model are at fault.
            EngineError: Anything else.
        """
        return await self.client.start()

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

    async def close(self) -> None:
        """Stop the process."""
        await self.client.close()
