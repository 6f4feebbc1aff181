"""Writes results: appended to a segment and synced first, written down in the database after."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dovetail_server.batches.lines import Leased, LineStore, WrittenLines
from dovetail_server.batches.result import Result
from dovetail_server.errors.catalogue import ServiceError
from dovetail_server.storage.disk import append, exists, free_bytes, make_folder
from dovetail_server.storage.paths import StoragePaths

logger = logging.getLogger("dovetail.server")
GATHER_S = 0.02
MAX_GROUP = 256
RETRY_S = 2.0
FLUSH_S = 5.0
Item = tuple[Leased, Result, "asyncio.Future[None]"]


class ResultWriter:
    """Saves results in groups, so that many share one sync and one transaction."""

    def __init__(self, lines: LineStore, layout: StoragePaths, min_free: int, on_saved: Callable[[], None]) -> None:
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
        self._lengths: dict[tuple[str, str], int] = {}
        """By batch and segment, the bytes that count; absent where only the database knows."""

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
            except Exception as error:
                if self.problem is None:
                    logger.warning("Batches pause: results cannot be written: %s", error)
                self.problem = str(error)
                if not isinstance(error, OSError | ServiceError):
                    raise  # a death, which is logged and counted; the group is still there for the next life
                await asyncio.sleep(RETRY_S)
                continue
            if self.problem is not None:
                logger.warning("Batches resumed: results can be written again.")
                self.problem = None
            for _, _, done in items:
                if not done.done():
                    done.set_result(None)
            return

    async def _save(self, batch_id: str, items: Sequence[Item]) -> None:
        me = self.lines.lease.name
        items = [item for item in items if item[0].process == me]  # others are lost: this process was taken for gone
        if not items or not await self._folder_of(batch_id):
            return
        # Forgotten until all has gone well: after an error nobody knows whether the transaction counted, and what
        # counts is never written again. Somebody may be reading it.
        at = self._lengths.pop((batch_id, me), None)
        if at is None:
            at = await self.lines.segment_end(batch_id, me)
        path = self.layout.batch(batch_id) / f"{me}.seg"
        end = await asyncio.to_thread(self._append, path, [result.text for _, result, _ in items], at)
        written, offset = [], at
        for line, result, _ in items:
            written.append(WrittenLines(line, result, offset))
            offset += len(result.text)
        await self.lines.commit(me, written)
        self._lengths[batch_id, me] = end

    async def _folder_of(self, batch_id: str) -> bool:
        """Make sure that there is a folder to write to; False where the batch has ended meanwhile."""
        folder = self.layout.batch(batch_id)
        if await asyncio.to_thread(exists, folder):
            return True
        if not await self.lines.is_open(batch_id):
            return False
        await asyncio.to_thread(make_folder, folder)
        return True

    def _append(self, path: Path, pieces: list[bytes], at: int) -> int:
        free = free_bytes(self.layout.folder)
        if free - sum(map(len, pieces)) < min(self.min_free, 1 << 20):
            raise OSError(errno.ENOSPC, f"{free} bytes are left on the disk")
        return append(path, pieces, at)

    def forget(self, batch_id: str | None = None) -> None:
        """Drop what is known of a batch that has ended, or of all."""
        self._lengths = {key: n for key, n in self._lengths.items() if batch_id not in (None, key[0])}
