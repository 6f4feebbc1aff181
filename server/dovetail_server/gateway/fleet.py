"""The workers as the relay sees them: where they are, whether they are ready, and how much each one has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from dovetail_server.errors.catalogue import ServiceError

STARTING = "starting"
"""Of a worker that nobody has asked yet."""


@dataclass(slots=True, eq=False)
class Worker:
    """One server.

    Attributes:
        number: Its place among the others, from 0; `DP0` in the log.
        url: Where it listens, without a slash at the end.
        is_ready: It takes new requests, by its own word or as far as is known.
        why_not: What it said last, or why nobody asked.
        num_running: Requests that are relayed to it now.
        refusal: Why it may not take part although it answers.
        has_served: It was ready once.
        when_stuck: Called when it has not answered for long: to end it, or to give up waiting for it.
    """

    number: int
    url: str
    is_ready: bool = False
    why_not: str = STARTING
    num_running: int = 0
    refusal: str | None = None
    has_served: bool = False
    when_stuck: set[Callable[[], object]] = field(default_factory=set)

    @property
    def tag(self) -> str:
        """Its name for people."""
        return f"DP{self.number}"

    def is_lost(self, why: str) -> None:
        """Give it nothing until it has said again that it is ready."""
        self.is_ready, self.why_not = False, why


@dataclass(slots=True)
class Fleet:
    """All workers. Used from one event loop."""

    workers: Sequence[Worker]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, whenever a worker becomes ready."""

    def ready(self, without: Collection[Worker] = ()) -> list[Worker]:
        """Return the workers that take requests, but for some."""
        return [worker for worker in self.workers if worker.is_ready and worker not in without]

    def is_now_ready(self, worker: Worker) -> None:
        """Note a worker's word."""
        worker.is_ready, worker.why_not, worker.has_served = True, "", True
        self.changed.set()
        self.changed = asyncio.Event()

    def first(self) -> Worker:
        """Return the ready worker with the lowest number: what is asked twice is asked of the same one.

        Raises:
            ServiceError: None is ready.
        """
        if not (ready := self.ready()):
            raise self.no_worker()
        return ready[0]

    def least_busy(self, without: Collection[Worker] = ()) -> Worker | None:
        """Return the ready worker with the fewest requests; None if there is none."""
        return min(self.ready(without), key=lambda worker: worker.num_running, default=None)

    async def wait_ready(self, limit_s: float, without: Collection[Worker] = ()) -> Worker | None:
        """Return the least busy worker, waiting for one to become ready; None if none did in time."""
        try:
            async with asyncio.timeout(limit_s):
                while (found := self.least_busy(without)) is None:
                    await self.changed.wait()
                return found
        except TimeoutError:
            return None

    def no_worker(self) -> ServiceError:
        """Return the error for a request that no worker can take."""
        why = "; ".join(f"{worker.tag} {worker.url}: {worker.refusal or worker.why_not}" for worker in self.workers)
        return ServiceError("no worker is ready; try again later", code="no_worker", retry_after_s=2, detail=why)

    def problem(self) -> str | None:
        """Say why no traffic should come, or None."""
        return None if self.ready() else "no worker is ready"
