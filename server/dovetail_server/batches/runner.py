"""Runs the lines of batches: a few at a time, in the background; beside others the engine holds them back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappush, heapreplace
from typing import TYPE_CHECKING, Any

from sqlalchemy.engine import RowMapping

from dovetail.contracts.errors import EngineDeadError
from dovetail_server.batches.backoff import Backoff, UnreadableFileError
from dovetail_server.batches.execute import run_to_end
from dovetail_server.batches.lines import Leased, LineStore, at_once
from dovetail_server.batches.processes import LeaseLostError
from dovetail_server.batches.result import Result, lost_line, refusal
from dovetail_server.batches.store import BatchStore
from dovetail_server.batches.writer import ResultWriter
from dovetail_server.errors.catalogue import ServiceError
from dovetail_server.http.auth import CALLER
from dovetail_server.http.origin import ORIGIN, Origin
from dovetail_server.storage.disk import PASSING, free_bytes, read_at
from dovetail_server.storage.paths import StoragePaths

if TYPE_CHECKING:
    from dovetail_server.reading.context import ReadingContext

# Who is next: owner by owner, and batch by batch within an owner, however large each is.


class OwnerQueue:
    """Lines that this process may run, taken in turn."""

    def __init__(self) -> None:
        """Begin empty."""
        self._owners: OrderedDict[str, OrderedDict[str, deque[Leased]]] = OrderedDict()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def extend(self, lines: Iterable[Leased]) -> None:
        """Add lines behind those of their batches."""
        for line in lines:
            self._owners.setdefault(line.owner, OrderedDict()).setdefault(line.batch_id, deque()).append(line)
            self._num += 1

    def popleft(self) -> Leased:
        """Take the next line: its owner and its batch go behind the others.

        Raises:
            KeyError: There is none.
        """
        owner, batches = self._owners.popitem(last=False)
        batch_id, lines = batches.popitem(last=False)
        line = lines.popleft()
        self._num -= 1
        if lines:
            batches[batch_id] = lines
        if batches:
            self._owners[owner] = batches
        return line

    def drop(self, batch_id: str) -> None:
        """Forget the lines of a batch."""
        for owner, batches in list(self._owners.items()):
            self._num -= len(batches.pop(batch_id, ()))
            if not batches:
                del self._owners[owner]

    def clear(self) -> list[Leased]:
        """Take everything."""
        found = [line for batches in self._owners.values() for lines in batches.values() for line in lines]
        self._owners.clear()
        self._num = 0
        return found

    def keys(self) -> set[tuple[str, int]]:
        """Return which lines are here."""
        return {line.key for batches in self._owners.values() for lines in batches.values() for line in lines}


def quotas(rows: Sequence[Mapping[str, Any]], held: Mapping[str, int], room: int, first: int) -> dict[str, int]:
    """Divide the lines that are to be leased among batches.

    Args:
        rows: Batches with lines that wait: `id` and `owner`.
        held: By batch, how many lines this process has already.
        room: How many more it wants.
        first: How many batches of which it has none get a line although there is no room: a small batch does not wait
            until those that are leased of a large one are through.

    Returns:
        By batch, how many to lease.
    """
    found: dict[str, int] = {}
    for row in rows:
        if first > 0 and not held.get(row["id"], 0):
            found[row["id"]] = 1
            first, room = first - 1, room - 1
    # One line each in turn, beginning with whose owner, and then which batch, has the fewest.
    order = {batch_id: turn for turn, batch_id in enumerate(row["id"] for row in rows)}
    by_owner: dict[str, list[tuple[int, int, str]]] = {}
    for row in rows:
        num = held.get(row["id"], 0) + found.get(row["id"], 0)
        heappush(by_owner.setdefault(row["owner"], []), (num, order[row["id"]], row["id"]))
    owners = [(sum(num for num, _, _ in own), own[0][1], owner) for owner, own in by_owner.items()]
    heapify(owners)
    for _ in range(room if owners else 0):
        load, turn, owner = owners[0]
        num, batch_turn, batch_id = by_owner[owner][0]
        found[batch_id] = found.get(batch_id, 0) + 1
        heapreplace(by_owner[owner], (num + 1, batch_turn, batch_id))
        heapreplace(owners, (load + 1, turn, owner))
    return found


Advance = Callable[[Sequence[RowMapping]], Awaitable[None]]
logger = logging.getLogger("dovetail.server")
POLL_S = 1.0
SHORT_POLL_S = 0.05
LINE_TIMEOUT_S = 3600.0
MAX_LEASES = 20
"""A line that started this often without a result is abandoned: it may be what ends the process."""
MAX_READS = 10
"""An unreadable request is tried this often, unless the reason is temporary."""
LOST_S = 10.0
"""So often what is leased is compared with what is known here."""


class Runner:
    """One per process. The database says what is to do; `wake` says that there is something new."""

    def __init__(
        self, state: ReadingContext, store: BatchStore, lines: LineStore, writer: ResultWriter, layout: StoragePaths
    ) -> None:
        """Prepare; `run` does the work."""
        self.state = state
        self.store = store
        self.lines = lines
        self.writer = writer
        self.layout = layout
        self.advance: Advance | None = None
        """Advances open batches; set by their owner."""
        self.is_closing = False
        self._problem: str | None = None
        self._pause = Backoff()
        self._wake = asyncio.Event()
        self._ready = OwnerQueue()
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._num_leases: dict[tuple[str, int], int] = {}
        """How often the lines that are leased have been."""
        self._waits: str | None = None
        """The batch whose next line waits until fewer are leased."""
        self._unreadable: Counter[tuple[str, int]] = Counter()
        self._checked = time.monotonic()

    @property
    def problem(self) -> str | None:
        """Why batches make no progress now, or None."""
        return self._problem or self._pause.reason

    def wake(self) -> None:
        """Look at the database again."""
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        while not self.is_closing:
            try:
                with contextlib.suppress(LeaseLostError):  # the next beat takes a new name
                    await self._tick()
                self._note(None)
            except (ServiceError, OSError) as error:
                self._note(str(error))
            except Exception as error:
                self._note(f"unexpected error: {error}")
                raise
            await self._wait()

    def _note(self, problem: str | None) -> None:
        if problem is not None and self._problem is None:
            logger.warning("Batches pause: %s", problem)
        elif problem is None and self._problem is not None:
            logger.warning("Batches resumed.")
        self._problem = problem

    async def _wait(self) -> None:
        pause = SHORT_POLL_S if self._ready else POLL_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), pause)
        self._wake.clear()

    async def _tick(self) -> None:
        if time.monotonic() - self._checked >= LOST_S:
            self._checked = time.monotonic()
            await self.lines.free_lost({*self._running, *self._ready.keys()})
        rows = await self.store.open()
        await self._stop_ended()
        if self.advance is not None:
            await self.advance(rows)
        if not self._may_run():
            return
        free = await asyncio.to_thread(free_bytes, self.layout.folder)
        min_free = self.state.settings.min_free_disk_bytes
        if free < min_free:
            raise ServiceError(f"{free} bytes are left on the disk, below --min-free-disk-bytes", code="disk_full")
        await self._fill(rows)

    async def _stop_ended(self) -> None:
        """Stop lines of batches that were cancelled, have expired, or that another server ended."""
        held = {key[0] for key in {*self._running, *self._ready.keys()}}
        for batch_id in held - (await self.store.running(held) if held else set()):
            await self.stop_lines(batch_id)

    async def stop_lines(self, batch_id: str) -> None:
        """Abandon the lines of a batch."""
        self._ready.drop(batch_id)
        await self.state.tasks.stop([task for key, task in self._running.items() if key[0] == batch_id])

    def drop_all(self) -> None:
        """Abandon all lines: another server holds their leases by now."""
        self._ready.clear()
        for task in self._running.values():
            task.cancel()

    def _may_run(self) -> bool:
        state = self.state
        can = state.has_started and not state.is_stopping and state.engine.dead is None
        return can and not self.is_closing and self.writer.problem is None and not self._pause.is_on

    @property
    def limit(self) -> int:
        """How many lines may run at once; beside others, the engine decides when they take part."""
        settings = self.state.settings
        return settings.max_batch_requests or max(1, settings.max_running_requests // 4)

    async def _fill(self, rows: list[RowMapping]) -> None:
        """Start what may run, and lease what comes next."""
        self._start_ready()
        keys = {*self._running, *self._ready.keys()}
        self._num_leases = {key: num for key, num in self._num_leases.items() if key in keys}
        waiting: list[Any] = [row for row in rows if row["status"] == "in_progress" and row["has_pending"]]
        by_id = {row["id"]: row for row in waiting}
        for batch_id, num in self._wanted(waiting, Counter(key[0] for key in keys)).items():
            num_held, most = len(self._num_leases), self._most_leased
            if num_held >= most:
                break
            limit = min(num, most - num_held)
            leased, has_to_wait = await self.lines.claim(by_id[batch_id], limit, num_held, 2 * self.limit)
            self._waits = batch_id if has_to_wait else None
            self._num_leases |= {line.key: line.attempt for line in leased}
            self._ready.extend(leased)
            self._start_ready()
            if has_to_wait:
                break
        if not self._running and not self._ready:
            self._pause.end()  # what could not be read is no longer wanted

    @property
    def _most_leased(self) -> int:
        """How many lines may be leased, with a stock of those that run next."""
        most = 2 * self.limit
        return min((at_once(num, most) for num in self._num_leases.values()), default=most)

    def _wanted(self, waiting: list[Any], held: Counter[str]) -> dict[str, int]:
        """Say of which batches how many lines come next."""
        most, num_held = self._most_leased, held.total()
        limit = min(self.limit, most)
        if self._waits is not None and any(row["id"] == self._waits for row in waiting):
            return {self._waits: most}
        self._waits = None
        room = min(2 * limit, most) - num_held
        return quotas(waiting, held, room if room >= max(1, limit // 2) else 0, most - num_held)

    def _start_ready(self) -> None:
        while self._ready and len(self._running) < self.limit and self._may_run():
            line = self._ready.popleft()
            self._running[line.key] = self.state.tasks.start("batch line", self._run(line))

    async def _run(self, line: Leased) -> None:
        """Run one line to its durable result, or give it back."""
        CALLER.set(self.state.keys.caller(line.owner))
        ORIGIN.set(Origin(batch_id=line.batch_id))
        try:
            result = await self._result(line)
            await self.writer.save(line, result)
            self._unreadable.pop(line.key, None)
        except OSError as error:
            self._pause.begin(f"requests cannot be read: {error}")
            await self._give_back(line, has_counted=False)
        except (ServiceError, EngineDeadError) as error:
            await self._give_back(line, has_counted=isinstance(error, EngineDeadError))
        except Exception as error:
            self._pause.begin(f"unexpected error: {type(error).__name__}")
            await self._give_back(line, has_counted=True)
            raise
        finally:
            self._running.pop(line.key, None)
            self._start_ready()
            if len(self._ready) < self.limit:
                self.wake()

    async def _give_back(self, line: Leased, *, has_counted: bool) -> None:
        try:
            await self.lines.return_leases([line], has_counted=has_counted)
        except Exception as error:
            logger.warning("Batches: a request could not be given back and is freed later: %s", error)

    async def _result(self, line: Leased) -> Result:
        if line.attempt > MAX_LEASES:
            text = f"the request was begun {MAX_LEASES} times and the server ended each time"
            return refusal(line.custom_id, ServiceError(text, code="request_failed", status=500))
        try:
            raw = await self._read(line)
        except UnreadableFileError as error:
            return refusal(line.custom_id, ServiceError(str(error), code="request_unreadable", status=500))
        try:
            async with asyncio.timeout(LINE_TIMEOUT_S):
                return await run_to_end(self.state, line.endpoint, line.custom_id, raw)
        except TimeoutError:
            text = f"no reply within {LINE_TIMEOUT_S:g} s"
            return Result(lost_line(line.custom_id, "request_timeout", text), True)

    async def _read(self, line: Leased) -> bytes:
        """Read a request.

        Raises:
            OSError: Not now: all requests wait a while, each time longer.
            UnreadableFileError: It failed too often for a reason that does not pass.
        """
        path = self.layout.batch(line.batch_id) / "input.jsonl"
        try:
            raw = await asyncio.to_thread(read_at, path, line.offset, line.length)
        except OSError as error:
            if error.errno not in PASSING:
                self._unreadable[line.key] += 1
            if self._unreadable[line.key] < MAX_READS:
                raise
            logger.error("Batch %s: request %s cannot be read: %s", line.batch_id, line.custom_id, error)
            del self._unreadable[line.key]
            raise UnreadableFileError(f"the request could not be read from the input file: {error.strerror}") from error
        self._pause.end()
        return raw

    async def close(self) -> None:
        """Stop; what has no durable result is given back."""
        self.is_closing = True
        held = self._ready.clear()
        tasks = dict(self._running)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        if held or tasks:
            logger.info("Batches: %d requests left for the next start.", len(held) + len(tasks))
