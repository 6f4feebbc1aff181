"""The two ends of a batch: looking through its input, and publishing its results."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from dovetail_server.batches.lines import LineStore
from dovetail_server.batches.processes import LeaseLostError
from dovetail_server.batches.result import lost_line
from dovetail_server.batches.store import BatchStore, Lease
from dovetail_server.batches.validate import ValidatedFile, Validator, too_many_for
from dovetail_server.http.auth import Keys
from dovetail_server.schema.batches import BatchError
from dovetail_server.storage import disk
from dovetail_server.storage.database import LINES_LOCK
from dovetail_server.storage.files import FileStore
from dovetail_server.storage.paths import StoragePaths, result_file_id
from dovetail_server.storage.tables import batch_lines, batches, files

CHUNK_LINES = 1000
KINDS = ("output", "error")
LOST = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request had a reply"),
    "expired": ("batch_expired", "the batch expired before this request had a reply"),
}


class BatchFinalizer:
    """Does what happens once per batch. The caller holds the batch's lease, which every transaction here compares."""

    def __init__(
        self,
        store: BatchStore,
        lines: LineStore,
        file_store: FileStore,
        layout: StoragePaths,
        *,
        max_lines: int,
        max_line: int,
        keys: Keys,
        others: Collection[str],
    ) -> None:
        """Wrap the stores; `keys` say how many lines each owner may have, `others` are paths of packages' APIs."""
        self.others = others
        self.keys = keys
        self.store = store
        self.lines = lines
        self.file_store = file_store
        self.layout = layout
        self.max_lines = max_lines
        self.max_line_bytes = max_line

    async def validate(self, row: RowMapping, lease: Lease) -> None:
        """Look through a batch's input: it begins, or fails with what is wrong.

        Raises:
            LeaseLostError: It was cancelled, or somebody else does so now.
            OSError: The input cannot be read now.
        """
        batch_id = str(row["id"])
        problem = await self._take_input(row)
        if problem is None:
            async with self.store.database.read() as db:
                left = await self._lines_left(db, str(row["owner"]))
            found = await asyncio.to_thread(self._read, batch_id, str(row["endpoint"]), left)
            if not found.errors:
                left = await self._begin(lease, found, str(row["owner"]))
                if left is None:
                    return
                found.errors.append(too_many_for(left))
            errors: Sequence[BatchError] = found.errors
        else:
            errors = [problem]
        await self.fail(lease, errors)

    async def fail(self, lease: Lease, errors: Sequence[BatchError]) -> None:
        """End a batch whose input is bad; see `validate`."""
        await self.store.fail(lease, errors)
        await asyncio.to_thread(self._remove, lease.batch_id)

    async def _take_input(self, row: RowMapping) -> BatchError | None:
        """Keep hold of the input file, or say why there is none."""
        file_id, batch_id = str(row["input_file_id"]), str(row["id"])
        folder = self.layout.batch(batch_id)
        if await asyncio.to_thread(disk.exists, folder / "input.jsonl"):
            return None
        source = await self.file_store.find(file_id, str(row["owner"]))
        if source is None:
            text = f"no file {file_id!r} here; upload it with POST /v1/files"
            return BatchError(code="file_not_found", message=text, param="input_file_id")
        if source["purpose"] != "batch":
            text = f"the file {file_id!r} was uploaded for {source['purpose']!r}; upload it with purpose batch"
            return BatchError(code="invalid_file_purpose", message=text, param="input_file_id")
        try:
            await asyncio.to_thread(self._link, file_id, folder)
        except FileNotFoundError:
            text = f"the file {file_id!r} was deleted"
            return BatchError(code="file_not_found", message=text, param="input_file_id")
        return None

    def _link(self, file_id: str, folder: Path) -> None:
        disk.make_folder(folder)
        disk.link_or_copy(self.layout.file(file_id), folder / "input.jsonl", self.layout.new_temp())
        disk.sync_folder(folder)
        disk.sync_folder(folder.parent)

    async def _lines_left(self, db: AsyncConnection, owner: str) -> int | None:
        """Return how many lines an owner may have beside those of its batches that run; None for any number."""
        most = self.keys.tenant(owner).grant.limits.batch_lines
        if most is None:
            return None
        is_open = batches.c.owner == owner, batches.c.status.in_(("in_progress", "finalizing", "cancelling"))
        used = (await db.execute(sa.select(sa.func.sum(batches.c.num_total)).where(*is_open))).scalar_one()
        return max(0, most - int(used or 0))

    def _read(self, batch_id: str, endpoint: str, left: int | None) -> ValidatedFile:
        validator = Validator(
            endpoint,
            None if endpoint in self.others else self.store.served,
            max_lines=self.max_lines,
            max_line_bytes=self.max_line_bytes,
            left=left,
        )
        return validator.read(self.layout.batch(batch_id) / "input.jsonl")

    async def _begin(self, lease: Lease, found: ValidatedFile, owner: str) -> int | None:
        """Begin; where other batches that began meanwhile leave the owner too few lines, return how many instead."""
        now = self.store.database.stamp()
        values = {"in_progress_at": now, "num_total": len(found.lines), "model": found.model}
        async with self.store.database.write() as db:
            await self.store.database.alone(db, LINES_LOCK)
            left = await self._lines_left(db, owner)
            if left is not None and len(found.lines) > left:
                return left
            await self.store.move(db, lease, "validating", "in_progress", values)
            await self.lines.insert(db, lease.batch_id, found.lines)
        return None

    async def finish(self, row: RowMapping, lease: Lease) -> str:
        """Publish a batch's results and end it.

        The files are named after the lease, so that two who finish one batch never touch each other's; those of earlier
        attempts, which can count no more, are removed.

        Args:
            row: The batch, `finalizing` or `cancelling`.
            lease: Its.

        Returns:
            How it ended: `completed`, `expired` or `cancelled`.

        Raises:
            LeaseLostError: It was cancelled, or somebody else does so now.
            OSError: Something cannot be read or written now.
        """
        status = await self._complete(row, lease)
        published: dict[str, tuple[str, int]] = {}
        try:
            published = await self._publish(lease, status)
            await self._end(row, lease, status, published)
        except LeaseLostError:
            await asyncio.to_thread(self._remove_files, [file_id for file_id, _ in published.values()])
            raise
        # After any other error the files stay: the transaction may have counted. The next attempt removes them if not.
        earlier = [result_file_id(lease.batch_id, kind, n) for n in range(1, lease.epoch) for kind in KINDS]
        await asyncio.to_thread(self._remove_files, earlier)
        await asyncio.to_thread(self._remove, lease.batch_id)
        return status

    async def _complete(self, row: RowMapping, lease: Lease) -> str:
        """Decide how a batch ends; from then on no line of it changes."""
        async with self.store.database.write() as db:
            await self.store.check(db, lease)
            if row["status"] == "cancelling":
                status = "cancelled"
            else:
                status = "expired" if await self.lines.has_unanswered(db, lease.batch_id) else "completed"
            await self.lines.drop_rest(db, lease.batch_id)
        return status

    async def _publish(self, lease: Lease, status: str) -> dict[str, tuple[str, int]]:
        """Put the files together; return id and size of each by kind."""
        batch_id = lease.batch_id
        results = Results(self.layout, lease, status)
        try:
            after = -1
            while chunk := await self.lines.chunk(batch_id, after, CHUNK_LINES):
                await asyncio.to_thread(results.add, chunk)
                after = int(chunk[-1]["line_no"])
            return await asyncio.to_thread(results.publish)
        finally:
            await asyncio.to_thread(results.close)

    async def _end(self, row: RowMapping, lease: Lease, status: str, published: dict[str, tuple[str, int]]) -> None:
        """Add the files and end the batch, in one transaction."""
        now, expiry = self.store.database.stamp(), row["output_expires_s"]
        values: dict[str, Any] = {f"{status}_at": now}
        async with self.store.database.write() as db:
            for kind, (file_id, size) in published.items():
                values[f"{kind}_file_id"] = file_id
                file_row = {
                    "id": file_id,
                    "owner": row["owner"],
                    "filename": f"{row['id']}_{kind}.jsonl",
                    "purpose": "batch_output",
                    "bytes": size,
                    "created_at": now,
                    "expires_at": None if expiry is None else now + expiry,
                }
                await db.execute(sa.insert(files).values(file_row))
            await self.store.move(db, lease, str(row["status"]), status, values)
            await db.execute(sa.delete(batch_lines).where(batch_lines.c.batch_id == row["id"]))

    def _remove(self, batch_id: str) -> None:
        disk.remove_folder(self.layout.batch(batch_id))

    def _remove_files(self, file_ids: Sequence[str]) -> None:
        for file_id in file_ids:
            disk.remove(self.layout.file(file_id))

    async def remove_left(self) -> None:
        """Remove the folders of batches that ended while a process was killed or paused."""
        names = await asyncio.to_thread(disk.names_in, self.layout.batches)
        for name in names:
            async with self.store.database.read() as db:
                query = sa.select(batches.c.status).where(batches.c.id == name)
                status = (await db.execute(query)).scalar_one_or_none()
            if status in ("completed", "failed", "expired", "cancelled"):
                await asyncio.to_thread(self._remove, name)


class Results:
    """Puts the output and error file of a batch together from its segments, in the order of the input."""

    def __init__(self, layout: StoragePaths, lease: Lease, status: str) -> None:
        """Write nothing yet."""
        self.layout = layout
        self.lease = lease
        self.batch_id = lease.batch_id
        self.status = status
        self._segments: dict[str, IO[bytes]] = {}
        self._open: dict[str, tuple[Path, IO[bytes]]] = {}

    def add(self, lines: Sequence[RowMapping]) -> None:
        """Copy the results of some lines."""
        for line in lines:
            if line["state"] == "done":
                self._file("error" if line["is_error"] else "output").write(self._result(line))
            else:
                code, message = LOST[self.status]
                self._file("error").write(lost_line(line["custom_id"], code, message))

    def _result(self, line: RowMapping) -> bytes:
        name = str(line["segment"])
        if name not in self._segments:
            self._segments[name] = disk.open_to_read(self.layout.batch(self.batch_id) / f"{name}.seg")
        segment = self._segments[name]
        segment.seek(line["result_offset"])
        found = segment.read(line["result_length"])
        if len(found) != line["result_length"]:
            raise OSError(errno.ENODATA, f"the segment {name} ends before the result of line {line['line_no']}")
        return found

    def _file(self, kind: str) -> IO[bytes]:
        if kind not in self._open:
            temp = self.layout.new_temp()
            self._open[kind] = (temp, disk.create(temp))
        return self._open[kind][1]

    def publish(self) -> dict[str, tuple[str, int]]:
        """Give the files their names; return id and size of each by kind."""
        published = {}
        for kind, (temp, file) in self._open.items():
            file.flush()
            size = file.tell()
            file.close()
            file_id = result_file_id(self.batch_id, kind, self.lease.epoch)
            disk.publish(temp, self.layout.file(file_id))
            published[kind] = (file_id, size)
        return published

    def close(self) -> None:
        """Close everything; what was not published is removed."""
        for temp, file in self._open.values():
            with contextlib.suppress(OSError):  # what it still held is not wanted
                file.close()
            disk.remove(temp)
        for segment in self._segments.values():
            segment.close()
