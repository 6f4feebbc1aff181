"""Opens files and batches when they are first needed: a server that never needs them imports and writes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dovetail_server.errors import catalogue as errors
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.storage.paths import StoragePaths, storage_folder
from dovetail_server.supervision.supervisor import Supervisor

if TYPE_CHECKING:
    from dovetail_server.batches.service import StorageService

logger = logging.getLogger("dovetail.server")
RETRY_S = 5.0
CLOSE_S = 15.0


class LazyStorage:
    """One per server."""

    def __init__(self, settings: ServeSettings, tasks: Supervisor, prepare: Callable[[], StorageService]) -> None:
        """Open nothing yet; `prepare` imports, creates and migrates, and is called in a worker thread."""
        self._settings = settings
        self._tasks = tasks
        self._prepare = prepare
        self._service: StorageService | None = None
        self._opening: asyncio.Task[StorageService] | None = None
        self._lock = asyncio.Lock()
        self._is_closed = False
        self._open_problem: str | None = None
        self._tried = 0.0

    @property
    def problem(self) -> str | None:
        """Why files and batches cannot be used now, or None."""
        return self._open_problem if self._service is None else self._service.problem

    def is_in_use(self) -> bool:
        """Tell whether an earlier run may have left work."""
        settings = self._settings
        return settings.database_url is not None or StoragePaths(storage_folder(settings)).database.exists()

    async def get(self) -> StorageService:
        """Return the open service.

        Raises:
            ServiceError: The database or the folder cannot be used.
            ConfigError: `--database-url` names something else.
        """
        if self._service is not None:
            return self._service
        if self._opening is None or self._opening.done():
            self._opening = self._tasks.start("storage open", self._open_once(), is_awaited=True)
        # Who asks may leave: others wait for the same, and what is half open would be left so.
        return await asyncio.shield(self._opening)

    async def _open_once(self) -> StorageService:
        async with self._lock:
            self._tried = time.monotonic()
            try:
                self._service = await self._open()
            except Exception as error:
                self._open_problem = str(error)
                raise
            self._open_problem = None
            return self._service

    async def _open(self) -> StorageService:
        if self._is_closed:
            raise errors.draining()
        service = await asyncio.to_thread(self._prepare)
        try:
            await service.start()
        except BaseException:
            await service.abandon()
            raise
        return service

    async def resume(self) -> None:
        """Go on with what an earlier run left, once requests can be served; tries until it can."""
        while self.is_in_use() and self._service is None and not self._is_closed:
            try:
                await self.get()
            except Exception:
                logger.warning("Files and batches cannot be opened, they are tried again: %s", self.problem)
                await asyncio.sleep(RETRY_S)

    def retry(self) -> None:
        """Try again beside the caller what could not be opened, so that health tells what holds now."""
        is_due = time.monotonic() - self._tried >= RETRY_S
        if self._open_problem is not None and self._service is None and is_due and not self._is_closed:
            self._tried = time.monotonic()
            self._tasks.start("storage retry", self._try())

    async def _try(self) -> None:
        with contextlib.suppress(Exception):  # the new problem is kept, as `problem`
            await self.get()

    async def close(self) -> None:
        """Stop batches and close the database; what is running is given back, as far as that goes within a limit."""
        self._is_closed = True
        closing = self._tasks.start("storage end", self._close())
        _, late = await asyncio.wait({closing}, timeout=CLOSE_S)
        if late:
            logger.error("Files and batches could not be closed within %g s; the next server takes over.", CLOSE_S)
            await self._tasks.stop([closing])
            if self._service is not None:
                await asyncio.wait({self._tasks.start("storage end", self._service.abandon())}, timeout=CLOSE_S)

    async def _close(self) -> None:
        async with self._lock:
            if self._service is not None:
                await self._service.close()
                self._service = None
