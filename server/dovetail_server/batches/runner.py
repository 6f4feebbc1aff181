"""Runs the lines of batches: a few at a time, and fewer while interactive requests are here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.engine import RowMapping

from dovetail.errors import EngineDeadError
from dovetail_server.auth import work_for
from dovetail_server.batches.execute import Result, lost_line, refusal, run_line
from dovetail_server.batches.lines import Leased, LineStore
from dovetail_server.batches.settle import Settler
from dovetail_server.batches.store import BatchStore
from dovetail_server.batches.writer import Writer
from dovetail_server.errors import ServiceError
from dovetail_server.storage.disk import free_bytes
from dovetail_server.storage.paths import Layout

if TYPE_CHECKING:
    from dovetail_server.state import ServerState

logger = logging.getLogger("dovetail.server")
POLL_S = 1.0
SHORT_POLL_S = 0.05
YIELD_S = 1.0
"""For so long after an interactive request was here, batches hold back."""
YIELD_SHARE = 64
LINE_TIMEOUT_S = 3600.0
MAX_FAULTS = 3
"""A line that fails for a reason of ours is tried so often."""
MAX_LEASES = 20
"""A line that was begun so often without a result is given up: it may be what ends the process."""
BUSY_WAIT_S = 0.25


class Runner:
    """One per process. The database says what is to do; `wake` says that there is something new."""

    def __init__(
        self, state: ServerState, store: BatchStore, lines: LineStore, settler: Settler, writer: Writer, layout: Layout
    ) -> None:
        """Prepare; `run` does the work."""
        self.state = state
        self.store = store
        self.lines = lines
        self.settler = settler
        self.writer = writer
        self.layout = layout
        self.problem: str | None = None
        self.is_closing = False
        self.num_engine = 0
        """Engine requests of batches that run now."""
        self._wake = asyncio.Event()
        self._ready: deque[Leased] = deque()
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._last_interactive = 0.0

    def wake(self) -> None:
        """Look at the database again."""
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        while not self.is_closing:
            try:
                await self._tick()
                self._note(None)
            except ServiceError as error:
                self._note(str(error))
            except Exception as error:
                logger.exception("Batches: an unexpected error; they are tried again.")
                self._note(f"unexpected error: {error}")
            await self._wait()

    def _note(self, problem: str | None) -> None:
        if problem is not None and self.problem is None:
            logger.warning("Batches pause: %s", problem)
        elif problem is None and self.problem is not None:
            logger.warning("Batches go on.")
        self.problem = problem

    async def _wait(self) -> None:
        pause = SHORT_POLL_S if self._ready else POLL_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), pause)
        self._wake.clear()

    async def _tick(self) -> None:
        rows = await self.store.open()
        running = {str(row["id"]) for row in rows if row["status"] == "in_progress"}
        for batch_id in {key[0] for key in self._running} - running:
            await self._stop_lines(batch_id)  # another server ended it
        for row in rows:
            await self._look_after(row)
        if not self._may_run():
            return
        free = await asyncio.to_thread(free_bytes, self.layout.folder)
        floor = self.state.settings.min_free_disk_bytes
        if free < floor:
            raise ServiceError(f"{free} bytes are left on the disk, below --min-free-disk-bytes", code="disk_full")
        await self._fill(rows)

    async def _look_after(self, row: RowMapping) -> None:
        """Move a batch on if it is its time."""
        batch_id, status = str(row["id"]), str(row["status"])
        if status == "validating":
            if self.state.has_started and await self.store.lease(batch_id):
                await self.settler.validate(row)
                self.wake()
            return
        is_over = time.time() >= row["expires_at"]
        if status == "in_progress":
            if is_over or not await self.lines.has_open(batch_id):
                await self.store.move(batch_id, status, "finalizing", {"finalizing_at": int(time.time())})
                self.wake()
            return
        if await self.store.lease(batch_id):
            await self._finish(row, is_over)

    async def _finish(self, row: RowMapping, is_over: bool) -> None:
        """End a batch; its lease is taken, and ends with it or here."""
        batch_id = str(row["id"])
        ending = "cancelled" if row["status"] == "cancelling" else "completed"
        if ending == "completed" and is_over and await self.lines.has_open(batch_id):
            ending = "expired"
        await self._stop_lines(batch_id)
        try:
            if await self.settler.finish(row, ending):
                self.writer.forget(batch_id)
                logger.info("Batch %s: %s.", batch_id, ending)
        except OSError as error:
            raise ServiceError(f"results cannot be published: {error}", code="disk_full") from error
        finally:
            await self.store.unlease(batch_id)
        self.wake()

    async def _stop_lines(self, batch_id: str) -> None:
        self._ready = deque(line for line in self._ready if line.batch_id != batch_id)
        tasks = [task for key, task in self._running.items() if key[0] == batch_id]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _may_run(self) -> bool:
        state = self.state
        can = state.has_started and not state.is_draining and state.engine.dead is None
        return can and not self.is_closing and self.writer.problem is None

    @property
    def limit(self) -> int:
        """How many lines may run now."""
        settings = self.state.settings
        limit = settings.max_batch_requests or max(1, settings.max_running_requests // 4)
        now = time.monotonic()
        if self.state.num_live - self.num_engine > 0:
            self._last_interactive = now
        is_held_back = now - self._last_interactive < YIELD_S and self._last_interactive > 0
        return max(1, limit // YIELD_SHARE) if is_held_back else limit

    async def _fill(self, rows: list[RowMapping]) -> None:
        """Start what may run, and lease what comes next."""
        self._start_ready()
        limit = self.limit
        for row in rows:
            want = 2 * limit - len(self._ready) - len(self._running)
            if row["status"] != "in_progress" or want < max(1, limit // 2):
                continue
            self._ready.extend(await self.lines.claim(row, want))
            self._start_ready()

    def _start_ready(self) -> None:
        while self._ready and len(self._running) < self.limit and self._may_run():
            line = self._ready.popleft()
            self._running[line.key] = self.state.tasks.start("batch line", self._run(line))

    async def _run(self, line: Leased) -> None:
        """Run one line to its durable result, or give it back."""
        work_for(line.owner)
        try:
            result = await self._result(line)
            await self.writer.save(line, result)
        except (ServiceError, EngineDeadError) as error:
            has_counted = isinstance(error, EngineDeadError)
            with contextlib.suppress(ServiceError):  # the lease runs out by itself
                await self.lines.give_back([line], has_counted=has_counted)
        finally:
            self._running.pop(line.key, None)
            self._start_ready()
            if len(self._ready) < self.limit:
                self.wake()

    async def _result(self, line: Leased) -> Result:
        if line.attempt > MAX_LEASES:
            text = f"the request was begun {MAX_LEASES} times and the server ended each time"
            return refusal(line.custom_id, ServiceError(text, code="request_failed", status=500))
        path = self.layout.batch(line.batch_id) / "input.jsonl"
        raw = await asyncio.to_thread(read_at, path, line.offset, line.length)
        try:
            async with asyncio.timeout(LINE_TIMEOUT_S):
                return await self._attempts(line, raw)
        except TimeoutError:
            text = f"no reply within {LINE_TIMEOUT_S:g} s"
            return Result(lost_line(line.custom_id, "request_timeout", text), True)

    async def _attempts(self, line: Leased, raw: bytes) -> Result:
        """Run a line until it has a result; faults of ours are tried again, a few times.

        Raises:
            ServiceError: The server ends.
            EngineDeadError: The engine is gone.
        """
        faults = 0
        while True:
            try:
                return await run_line(self.state, line.endpoint, line.custom_id, raw, self._count)
            except EngineDeadError:
                raise
            except ServiceError as error:
                if error.status == 503:
                    raise
                if error.status != 429:
                    faults += 1
                if faults >= MAX_FAULTS:
                    return refusal(line.custom_id, error)
            except Exception as error:
                faults += 1
                if faults >= MAX_FAULTS:
                    return refusal(line.custom_id, error)
            await asyncio.sleep(BUSY_WAIT_S)

    def _count(self, change: int) -> None:
        self.num_engine += change

    async def close(self) -> None:
        """Stop; what has no durable result is given back."""
        self.is_closing = True
        held = list(self._ready)
        self._ready.clear()
        tasks = dict(self._running)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await self.lines.free_owner(self.lines.me)
        if held or tasks:
            logger.info("Batches: %d requests wait for the next start.", len(held) + len(tasks))


def read_at(path: Path, offset: int, length: int) -> bytes:
    """Read a piece of a file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.pread(handle, length, offset)
    finally:
        os.close(handle)
