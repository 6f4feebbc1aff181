"""Files, batches and stored responses of one server: put together, started, kept in order and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.responses.background import BackgroundResponses
from dovetail_server.apis.responses.conversations import ConversationStore
from dovetail_server.apis.responses.store import ResponseStore
from dovetail_server.batches import processes
from dovetail_server.batches.finalize import BatchFinalizer
from dovetail_server.batches.lifecycle import BatchLifecycle
from dovetail_server.batches.lines import LineStore
from dovetail_server.batches.model import ENDPOINTS, NOT_HERE, to_batch
from dovetail_server.batches.processes import Processes
from dovetail_server.batches.runner import Runner
from dovetail_server.batches.store import BatchStore
from dovetail_server.batches.writer import ResultWriter
from dovetail_server.errors import catalogue as errors
from dovetail_server.errors.catalogue import ServiceError
from dovetail_server.schema.batches import Batch, BatchRequest
from dovetail_server.storage.completions import CompletionStore
from dovetail_server.storage.database import Database, connect, database_url, migrate
from dovetail_server.storage.files import FileStore
from dovetail_server.storage.paths import StoragePaths, storage_folder
from dovetail_server.storage.process_lease import ProcessLease

if TYPE_CHECKING:
    from dovetail_server.reading.context import ReadingContext
    from dovetail_server.supervision.supervisor import SupervisedService

logger = logging.getLogger("dovetail.server")
SWEEP_S = 60.0
AGAIN_S = 1.0
"""After so long what failed is tried again, and then after twice as long each time."""


class StorageService:
    """One per server process. Used from its event loop, but for `prepare`."""

    def __init__(self, state: ReadingContext, layout: StoragePaths, database: Database) -> None:
        """Put the parts together; `start` sets them going."""
        settings = state.settings
        self.routes = [path for path, route in state.routes.items() if not route.only_streams]
        self.layout = layout
        self.database = database
        self.lease = ProcessLease(layout)
        self.files = FileStore(settings, layout, database, state.keys)
        self.processes = Processes(database, self.lease)
        self.batches = BatchStore(database, self.processes, state.served)
        self.lines = LineStore(database, self.lease, self.processes)
        self.writer = ResultWriter(self.lines, layout, settings.min_free_disk_bytes, lambda: self.runner.wake())
        self.finalizer = BatchFinalizer(
            self.batches,
            self.lines,
            self.files,
            layout,
            max_lines=settings.max_batch_lines,
            max_line=settings.max_body_bytes,
            keys=state.keys,
            others=state.routes,
        )
        self.runner = Runner(state, self.batches, self.lines, self.writer, layout)
        self.batch_lifecycle = BatchLifecycle(state, self.batches, self.finalizer, self.runner)
        self.runner.advance = self.batch_lifecycle.advance
        self.responses = ResponseStore(settings, database, self.lease, state.tasks, state.keys)
        self.completions = CompletionStore(settings, database)
        self.conversations = ConversationStore(settings, database, state.keys)
        self.background = BackgroundResponses(state.tasks)
        self._tasks = state.tasks
        self._services: list[SupervisedService] = []
        self._problems: dict[str, str] = {}

    @classmethod
    def prepare(cls, state: ReadingContext) -> StorageService:
        """Create the folder, bring the database up to date and connect; in a worker thread.

        Raises:
            ServiceError: The folder or the database cannot be used.
            ConfigError: `--database-url` names something else.
        """
        settings = state.settings
        layout = StoragePaths(storage_folder(settings))
        try:
            layout.create()
        except OSError as error:
            text = "the folder of files and batches (--file-storage-path) cannot be used"
            detail = error.strerror or str(error)
            raise ServiceError(text, code="storage_unavailable", retry_after_s=5, detail=detail) from error
        given = settings.database_url
        url = database_url(None if given is None else given.get_secret_value(), layout.folder)
        migrate(url, layout)
        return cls(state, layout, connect(url))

    async def start(self) -> None:
        """Take over what processes that are gone have left, and begin."""
        await self.processes.join()
        await self._recover()
        work = {
            "batch writer": self.writer.run,
            "batch runner": self.runner.run,
            "heartbeat": lambda: self._repeat("heartbeat", self._beat, processes.BEAT_S),
            "storage sweep": lambda: self._repeat("storage sweep", self._sweep, SWEEP_S),
        }
        self._services = [self._tasks.keep(name, run) for name, run in work.items()]

    @property
    def problem(self) -> str | None:
        """Why files and batches do not work now, or None."""
        found = (self.writer.problem, self.runner.problem, self.batch_lifecycle.problem, *self._problems.values())
        return next((problem for problem in found if problem is not None), None)

    async def create(self, owner: str, request: BatchRequest, num_total: int = 0) -> Batch:
        """Accept a batch; `num_total` are its lines, where they are known.

        Raises:
            RequestError: The endpoint is none that batches have.
        """
        check_endpoint(request.endpoint, self.routes)
        row = await self.batches.create(owner, request, num_total)
        self.runner.wake()
        return to_batch(row)

    async def get(self, owner: str, batch_id: str) -> Batch:
        """Return a batch."""
        return to_batch(await self.batches.get(batch_id, owner))

    async def page(self, owner: str, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """Return a page of batches, newest first, and whether there are more."""
        rows, has_more = await self.batches.page(owner, after, limit)
        return [to_batch(row) for row in rows], has_more

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Ask for a batch to end."""
        row = await self.batches.cancel(batch_id, owner)
        self.runner.wake()
        return to_batch(row)

    async def _repeat(self, name: str, work: Callable[[], Awaitable[None]], pause_s: float) -> None:
        """Do something again and again; what the disk or the database refuses is a problem until it works."""
        again_s = min(AGAIN_S, pause_s)
        while True:
            wait_s = pause_s
            try:
                await work()
                self._problems.pop(name, None)
                again_s = min(AGAIN_S, pause_s)
            except (ServiceError, OSError) as error:
                self._problems[name] = str(error)
                wait_s, again_s = again_s, min(2 * again_s, pause_s)
            except Exception as error:
                self._problems[name] = f"unexpected error: {error}"
                raise
            await asyncio.sleep(wait_s)

    async def _beat(self) -> None:
        """Tell that this process lives, and take over from those that do not."""
        if not await self.processes.beat():
            logger.warning("Other servers presumed this one dead (pause or database outage); registering again.")
            await asyncio.to_thread(self.lease.rename)
            self.runner.drop_all()
            self.writer.forget()
            await self.background.drop_all()
            await self.processes.join()
        await self._recover()

    async def _sweep(self) -> None:
        """Remove what has expired, what is too much, and what others left."""
        await self.files.sweep()
        await self.responses.trim()
        await self.completions.trim()
        await self.conversations.trim()
        await self.finalizer.remove_left()
        await self.responses.end_lost(self.background.ids())

    async def _recover(self) -> None:
        """Free what processes held that are gone: those of this machine at once, others when they are silent."""
        found = await self.processes.others()
        silent = set(self.processes.silent(found))
        for other, beat in found.items():
            lock = await asyncio.to_thread(self.lease.acquire_dead_lock, other)
            with contextlib.closing(lock) if lock is not None else contextlib.nullcontext():
                if lock is None and other not in silent:
                    continue
                num = await self.processes.evict(other, beat)
                if num is None:
                    continue
                await self.responses.fail_orphans(other)
                if lock is not None:
                    await asyncio.to_thread(self.lease.forget, other)
            logger.info("Batches: rerunning %d requests of a server that exited.", num)
            self.runner.wake()

    async def close(self) -> None:
        """Stop everything, in the order in which it depends."""
        await self.background.close()
        for service in self._services[1:]:
            await service.stop()
        await self.writer.flush()
        await self.batch_lifecycle.close()
        await self.runner.close()
        for writer in self._services[:1]:
            await writer.stop()
        await self._leave()
        await self.abandon()

    async def abandon(self) -> None:
        """Close what is open, and give the name up."""
        await self.database.close()
        self.lease.close()

    async def _leave(self) -> None:
        """Give everything back at once, so that nobody waits until this process is found to be gone."""
        try:
            await self.processes.evict(self.lease.name, await self.processes.own_beat())
            await self.responses.fail_orphans(self.lease.name)
        except Exception as error:
            logger.warning(
                "The requests of this server are released when other servers notice that it exited: %s", error
            )


def check_endpoint(endpoint: str, others: Collection[str]) -> None:
    """Refuse endpoints that batches do not have; `others` are paths of packages' APIs.

    Raises:
        RequestError: Naming those that they have.
    """
    possible = (*ENDPOINTS, *others)
    if endpoint in possible:
        return
    if endpoint in NOT_HERE:
        raise errors.unsupported("endpoint", f"batches run {', '.join(possible)}, not {endpoint!r}")
    text = f"endpoint must be one of {', '.join(possible)} (given: {endpoint!r})"
    raise RequestError(text, param="endpoint", code="invalid_value")
