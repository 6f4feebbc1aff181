"""Responses that are generated while nobody waits, and whoever follows their events."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.responses import objects as ro
from dovetail_server.apis.responses.keeper import ResponseRecorder
from dovetail_server.apis.responses.reply import ResponsesWriter
from dovetail_server.errors import catalogue as errors
from dovetail_server.http.auth import CALLER
from dovetail_server.serving import run
from dovetail_server.serving.job import Job
from dovetail_server.supervision.supervisor import Supervisor

LOG_S = 300.0
"""Events of finished responses are kept for so long."""
MAX_LOG_BYTES = 128 << 20
"""Of all of them; beyond it the owner with most loses its oldest."""
encode = msgspec.json.Encoder().encode
END = b"\n\n"
"""Of an event."""
LOG_BYTES = 512 << 10
"""A response's events count as so many at least."""


@dataclass(slots=True)
class LiveResponse:
    """A response in the background. Its events stay until some time after its end."""

    owner: str
    job: Job | None
    """None once it has ended: only the events are still wanted."""
    response: ro.ResponseObject
    log: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    """Of its events."""
    is_ended: bool = False
    is_cancelled: bool = False
    ended_at: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def publish(self, events: bytes, response: ro.ResponseObject) -> None:
        """Add events and wake whoever follows; `response` is what there is of it now."""
        self.log += [event + END for event in events.split(END)[:-1]]
        self.num_bytes += len(events)
        self.response = response
        self.wake()

    def end(self) -> None:
        """Note that nothing more comes."""
        self.job, self.is_ended, self.ended_at = None, True, time.monotonic()
        self.wake()

    def wake(self) -> None:
        """Let whoever waits look again."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events behind `after`, and those that come, to the last."""
        at = after + 1
        while True:
            changed = self.changed
            if at < len(self.log):
                chunk, at = b"".join(self.log[at:]), len(self.log)
                yield chunk
            elif self.is_ended:
                return
            else:
                await changed.wait()


class BackgroundResponses:
    """All background responses of one server process."""

    def __init__(self, tasks: Supervisor) -> None:
        """Begin with none."""
        self._tasks = tasks
        self._live: dict[str, LiveResponse] = {}
        self._beginning: Counter[str] = Counter()
        """Responses of each owner that are being written down."""

    async def start(self, owner: str, job: Job) -> LiveResponse:
        """Write the response down and begin to generate.

        Raises:
            ServiceError: It cannot be stored, or as many of its owner as the key may store have not ended.
        """
        if not isinstance(job.keeper, ResponseRecorder):
            raise RuntimeError("a background response needs a store")
        num_open = sum(live.owner == owner and not live.is_ended for live in self._live.values())
        CALLER.get().tenant.check_open_responses(num_open + self._beginning[owner])
        response = writer_of(job).response
        self._beginning[owner] += 1
        try:
            await job.keeper.begin(encode(response))
        finally:
            self._beginning[owner] -= 1
        live = self._live[response.id] = LiveResponse(owner, job, response)
        live.task = self._tasks.start("background response", self._run(live, job))
        return live

    async def _run(self, live: LiveResponse, job: Job) -> None:
        writer = writer_of(job)
        try:
            async with aclosing(run.stream(job)) as chunks:
                async for chunk in chunks:
                    live.publish(chunk, writer.response)
        except asyncio.CancelledError:
            await self._cut_off(live, job)
        except Exception as error:  # before the first event: the writer tells of later ones
            opening = b"" if live.log else writer.open()
            writer.fail(errors.failure_of(error))
            await run.keep(job)
            live.publish(opening + writer.close(), writer.response)
        finally:
            live.end()
            self.forget()
            asyncio.get_running_loop().call_later(LOG_S, self.forget)

    @staticmethod
    async def _cut_off(live: LiveResponse, job: Job) -> None:
        writer = writer_of(job)
        why = ro.ResponseError(code="server_error", message="the server was stopped")
        writer.give_up(None if live.is_cancelled else why)
        await run.keep(job)
        live.publish(writer.close(), writer.response)

    def ids(self) -> set[str]:
        """Return the responses that run or ended a short while ago."""
        return set(self._live)

    def get(self, owner: str, response_id: str) -> LiveResponse | None:
        """Return a response that runs, or that ended a short while ago."""
        live = self._live.get(response_id)
        return live if live is not None and live.owner == owner else None

    async def cancel(self, live: LiveResponse) -> ro.ResponseObject:
        """End a response, and return it as it is now."""
        if not live.is_ended:
            live.is_cancelled = True
            await self._stop(live)
        return live.response

    async def _stop(self, live: LiveResponse) -> None:
        if live.task is not None:
            live.task.cancel()
            await asyncio.gather(live.task, return_exceptions=True)
        if live.job is not None:  # the task had not begun
            await self._cut_off(live, live.job)
            live.end()

    async def drop(self, owner: str, response_id: str) -> None:
        """Cancel and forget a response that is about to be deleted."""
        live = self.get(owner, response_id)
        if live is not None:
            await self.cancel(live)
            self._live.pop(response_id, None)

    def forget(self) -> None:
        """Forget the events of responses that ended a while ago; of what is too much, the oldest of who has most."""
        ended: dict[str, deque[tuple[str, int]]] = defaultdict(deque)
        sizes: Counter[str] = Counter()
        oldest = time.monotonic() - LOG_S
        for key, live in sorted(self._live.items(), key=lambda item: item[1].ended_at):
            if live.is_ended and live.ended_at <= oldest:
                del self._live[key]
            elif live.is_ended:
                size = max(live.num_bytes, LOG_BYTES)
                ended[live.owner].append((key, size))
                sizes[live.owner] += size
        while sizes.total() > MAX_LOG_BYTES:
            owner = max(sizes, key=sizes.__getitem__)
            key, size = ended[owner].popleft()
            sizes[owner] -= size
            del self._live[key]

    async def drop_all(self) -> None:
        """End and forget everything: others have ended these responses meanwhile, and what they wrote down counts."""
        await self.close()
        self._live.clear()

    async def close(self) -> None:
        """End everything."""
        await asyncio.gather(*(self._stop(live) for live in self._live.values() if not live.is_ended))


def writer_of(job: Job) -> ResponsesWriter:
    """Return what writes a response."""
    if not isinstance(job.writer, ResponsesWriter):
        raise TypeError(f"{type(job.writer)} writes no response")
    return job.writer


def check_log(live: LiveResponse | None, response_id: str) -> LiveResponse:
    """Return the response whose events are wanted.

    Raises:
        RequestError: They are not there.
    """
    if live is None:
        text = (
            f"the events of {response_id!r} are not kept: only those of background responses are, until "
            f"{LOG_S:.0f} s after the end; leave stream out"
        )
        raise RequestError(text, param="stream", code="invalid_value")
    return live
