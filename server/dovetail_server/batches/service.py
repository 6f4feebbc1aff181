"""Files, batches and stored responses of one server: put together, started, kept in order and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING

from dovetail.errors import RequestError
from dovetail_server import errors
from dovetail_server.batches.lines import LineStore
from dovetail_server.batches.model import ENDPOINTS, NOT_HERE, to_batch
from dovetail_server.batches.owners import Owner
from dovetail_server.batches.runner import Runner
from dovetail_server.batches.settle import Settler
from dovetail_server.batches.store import BatchStore
from dovetail_server.batches.writer import Writer
from dovetail_server.errors import ServiceError
from dovetail_server.openai.batches import Batch, BatchRequest
from dovetail_server.responses.background import Background
from dovetail_server.responses.store import ResponseStore
from dovetail_server.storage.database import Database, connect, database_url, migrate
from dovetail_server.storage.files import FileStore
from dovetail_server.storage.paths import Layout, storage_folder

if TYPE_CHECKING:
    from dovetail.supervisor import Service
    from dovetail_server.state import ServerState

logger = logging.getLogger("dovetail.server")
TEND_S = 5.0
SWEEP_S = 60.0


class BatchService:
    """One per server process. Used from its event loop, but for `prepare`."""

    def __init__(self, state: ServerState, layout: Layout, database: Database) -> None:
        """Put the parts together; `start` sets them going."""
        settings = state.settings
        self.layout = layout
        self.database = database
        self.owner = Owner(layout)
        self.files = FileStore(settings, layout, database)
        self.batches = BatchStore(database, self.owner.name, state.served_names)
        self.lines = LineStore(database, self.owner.name)
        self.writer = Writer(self.lines, layout, settings.min_free_disk_bytes, self._on_saved)
        self.settler = Settler(
            self.batches, self.lines, self.files, layout, settings.max_batch_lines, settings.max_body_bytes
        )
        self.runner = Runner(state, self.batches, self.lines, self.settler, self.writer, layout)
        self.responses = ResponseStore(settings, database, self.owner.name, state.tasks)
        self.background = Background(state.tasks)
        self._tasks = state.tasks
        self._services: list[Service] = []
        self._tend_problem: str | None = None

    @classmethod
    def prepare(cls, state: ServerState) -> BatchService:
        """Create the folder, bring the database up to date and connect; in a worker thread.

        Raises:
            ServiceError: The folder or the database cannot be used.
            ConfigError: `--database-url` names something else.
        """
        settings = state.settings
        layout = Layout(storage_folder(settings))
        try:
            layout.create()
        except OSError as error:
            text = f"the folder of files and batches (--file-storage-path) cannot be used: {error.strerror}"
            raise ServiceError(text, code="storage_unavailable", retry_after_s=5) from error
        given = settings.database_url
        url = database_url(None if given is None else given.get_secret_value(), layout.folder)
        migrate(url, layout.folder)
        return cls(state, layout, Database(connect(url)))

    async def start(self) -> None:
        """Take over what processes that are gone have left, and begin."""
        await self._recover()
        await self.settler.remove_left()
        work = {"batch writer": self.writer.run, "batch runner": self.runner.run, "batch keeper": self._tend}
        self._services = [self._tasks.keep(name, run) for name, run in work.items()]

    @property
    def problem(self) -> str | None:
        """Why files and batches do not work now, or None."""
        return self.writer.problem or self.runner.problem or self._tend_problem

    def _on_saved(self) -> None:
        self.runner.wake()

    async def create(self, owner: str, request: BatchRequest) -> Batch:
        """Accept a batch.

        Raises:
            RequestError: The endpoint is none that batches have.
        """
        check_endpoint(request.endpoint)
        row = await self.batches.create(owner, request)
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

    async def _tend(self) -> None:
        """Keep leases, take over from the dead, sweep out what has expired."""
        swept = 0.0
        while True:
            try:
                await self.lines.renew()
                await self.responses.renew()
                await self._recover()
                if time.monotonic() - swept >= SWEEP_S:
                    swept = time.monotonic()
                    await self.files.sweep()
                    await self.responses.trim()
                self._tend_problem = None
            except (ServiceError, OSError) as error:
                self._tend_problem = str(error)
            await asyncio.sleep(TEND_S)

    async def _recover(self) -> None:
        """Free what processes of this machine held that are gone, and cut their segments to what counts."""
        for other in await self.lines.owners() | await self.responses.processes():
            lock = await asyncio.to_thread(self.owner.bury, other)
            if lock is None:
                continue
            with contextlib.closing(lock):
                lengths = await self.lines.segment_lengths(other)
                await asyncio.to_thread(self._truncate, other, lengths)
                num = await self.lines.free_owner(other)
                await self.responses.end_of(other)
                await asyncio.to_thread(self.owner.forget, other)
                logger.info("Batches: %d requests of a server that is gone are run again.", num)
                self.runner.wake()

    def _truncate(self, other: str, lengths: dict[str, int]) -> None:
        for batch_id, length in lengths.items():
            path = self.layout.batch(batch_id) / f"{other}.seg"
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size > length:
                    os.truncate(path, length)

    async def close(self) -> None:
        """Stop everything, in the order in which it depends."""
        await self.background.close()
        for service in self._services[1:]:
            await service.stop()
        with contextlib.suppress(ServiceError):
            await self.writer.flush()
            await self.runner.close()
        for writer in self._services[:1]:
            await writer.stop()
        await self.database.close()
        self.owner.close()


def check_endpoint(endpoint: str) -> None:
    """Refuse endpoints that batches do not have.

    Raises:
        RequestError: Naming those that they have.
    """
    if endpoint in ENDPOINTS:
        return
    if endpoint in NOT_HERE:
        raise errors.unsupported("endpoint", f"batches run {', '.join(ENDPOINTS)}, not {endpoint!r}")
    text = f"endpoint must be one of {', '.join(ENDPOINTS)} (given: {endpoint!r})"
    raise RequestError(text, param="endpoint", code="invalid_value")
