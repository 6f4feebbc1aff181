"""Writes results: appended to a segment and synced first, written down in the database after."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from dovetail_server.batches.execute import Result
from dovetail_server.batches.lines import Leased, LineStore, Written
from dovetail_server.errors import ServiceError
from dovetail_server.storage.disk import append, free_bytes
from dovetail_server.storage.paths import Layout

logger = logging.getLogger("dovetail.server")
GATHER_S = 0.02
MAX_GROUP = 256
RETRY_S = 2.0
FLUSH_S = 5.0
Item = tuple[Leased, Result, "asyncio.Future[None]"]


class Writer:
    """Saves results in groups, so that many share one sync and one transaction."""

    def __init__(self, lines: LineStore, layout: Layout, min_free: int, on_saved: Callable[[], None]) -> None:
        """Prepare; `run` does the work. `on_saved` is called after each group."""
        self.lines = lines
        self.layout = layout
        self.min_free = min_free
        self.on_saved = on_saved
        self.problem: str | None = None
        """Why nothing can be written now, or None."""
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self._group: list[Item] = []
        """What is being saved; it stays here until it is, whatever ends the task meanwhile."""
        self._lengths: dict[str, int] = {}

    async def save(self, line: Leased, result: Result) -> None:
        """Return when the result is durable."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((line, result, done))
        await done

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            if not self._group:
                await self._gather()
            for batch_id in {item[0].batch_id for item in self._group}:
                items = [item for item in self._group if item[0].batch_id == batch_id]
                await self._until_saved(batch_id, items)
                self._group = [item for item in self._group if item[0].batch_id != batch_id]
            self.on_saved()

    async def _gather(self) -> None:
        self._group = [await self._queue.get()]
        await asyncio.sleep(GATHER_S)
        while not self._queue.empty() and len(self._group) < MAX_GROUP:
            self._group.append(self._queue.get_nowait())

    async def flush(self) -> None:
        """Wait until all results that are here are durable, or cannot be."""
        deadline = time.monotonic() + FLUSH_S
        while (self._group or not self._queue.empty()) and self.problem is None and time.monotonic() < deadline:
            await asyncio.sleep(GATHER_S)

    async def _until_saved(self, batch_id: str, items: Sequence[Item]) -> None:
        """Save one batch's results, however long the disk is full or the database away."""
        while True:
            try:
                await self._save(batch_id, items)
            except (OSError, ServiceError) as error:
                if self.problem is None:
                    logger.warning("Batches pause: results cannot be written: %s", error)
                self.problem = str(error)
                await asyncio.sleep(RETRY_S)
                continue
            if self.problem is not None:
                logger.warning("Batches go on: results can be written again.")
                self.problem = None
            for _, _, done in items:
                if not done.done():
                    done.set_result(None)
            return

    async def _save(self, batch_id: str, items: Sequence[Item]) -> None:
        at = self._lengths.get(batch_id, 0)
        folder = self.layout.batch(batch_id)
        end = await asyncio.to_thread(self._append, folder.is_dir(), batch_id, [i[1].text for i in items], at)
        if end is None:
            return  # the batch has ended meanwhile
        written, offset = [], at
        for line, result, _ in items:
            written.append(Written(line, result, offset))
            offset += len(result.text)
        await self.lines.commit(self.lines.me, written)
        self._lengths[batch_id] = end

    def _append(self, is_there: bool, batch_id: str, pieces: list[bytes], at: int) -> int | None:
        if not is_there:
            return None
        free = free_bytes(self.layout.folder)
        if free - sum(map(len, pieces)) < min(self.min_free, 1 << 20):
            raise OSError(f"{free} bytes are left on the disk")
        return append(self.layout.batch(batch_id) / f"{self.lines.me}.seg", pieces, at)

    def forget(self, batch_id: str) -> None:
        """Drop what is known of a batch that has ended."""
        self._lengths.pop(batch_id, None)
