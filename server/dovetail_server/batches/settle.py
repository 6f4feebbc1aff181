"""The two ends of a batch: looking through its input, and publishing its results."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from dovetail_server.batches.execute import lost_line
from dovetail_server.batches.lines import LineStore
from dovetail_server.batches.store import BatchStore
from dovetail_server.batches.validate import Found, Validator
from dovetail_server.openai.batches import BatchError
from dovetail_server.storage.disk import link_or_copy, publish, sync_folder
from dovetail_server.storage.files import FileStore
from dovetail_server.storage.paths import Layout, result_file_id
from dovetail_server.storage.tables import batch_lines, batches, files

CHUNK_LINES = 1000
LOST = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request had a reply"),
    "expired": ("batch_expired", "the batch expired before this request had a reply"),
}


class Settler:
    """Does what happens once per batch. The caller holds the batch's lease."""

    def __init__(
        self, store: BatchStore, lines: LineStore, file_store: FileStore, layout: Layout, max_lines: int, max_line: int
    ) -> None:
        """Wrap the stores."""
        self.store = store
        self.lines = lines
        self.file_store = file_store
        self.layout = layout
        self.max_lines = max_lines
        self.max_line_bytes = max_line

    async def validate(self, row: RowMapping) -> None:
        """Look through a batch's input: it begins, or fails with what is wrong."""
        batch_id = str(row["id"])
        problem = await self._take_input(row)
        if problem is None:
            found = await asyncio.to_thread(self._read, batch_id, str(row["endpoint"]))
            if not found.errors:
                await self._begin(batch_id, found)
                return
            errors: Sequence[BatchError] = found.errors
        else:
            errors = [problem]
        if await self.store.fail(batch_id, errors):
            await asyncio.to_thread(self._remove, batch_id)

    async def _take_input(self, row: RowMapping) -> BatchError | None:
        """Keep hold of the input file, or say why there is none."""
        file_id, batch_id = str(row["input_file_id"]), str(row["id"])
        folder = self.layout.batch(batch_id)
        if await asyncio.to_thread((folder / "input.jsonl").exists):
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
        folder.mkdir(exist_ok=True, mode=0o700)
        link_or_copy(self.layout.file(file_id), folder / "input.jsonl", self.layout.new_temp())
        sync_folder(folder)
        sync_folder(folder.parent)

    def _read(self, batch_id: str, endpoint: str) -> Found:
        validator = Validator(endpoint, self.store.served, max_lines=self.max_lines, max_line_bytes=self.max_line_bytes)
        return validator.read(self.layout.batch(batch_id) / "input.jsonl")

    async def _begin(self, batch_id: str, found: Found) -> None:
        values = {"in_progress_at": int(time.time()), "num_total": len(found.lines), "model": found.model}
        async with self.store.database.write() as db:
            if await self.store.move_in(db, batch_id, "validating", "in_progress", values):
                await self.lines.insert(db, batch_id, found.lines)

    async def finish(self, row: RowMapping, status: str) -> bool:
        """Publish a batch's results and end it.

        Args:
            row: The batch, `finalizing` or `cancelling`.
            status: `completed`, `expired` or `cancelled`.

        Returns:
            Whether it ended so; False where it was cancelled meanwhile.
        """
        batch_id = str(row["id"])
        if status != "completed":
            await self.lines.drop_rest(batch_id)
        results = Results(self.layout, batch_id, status)
        try:
            after = -1
            while chunk := await self.lines.chunk(batch_id, after, CHUNK_LINES):
                await asyncio.to_thread(results.add, chunk)
                after = int(chunk[-1]["line_no"])
            published = await asyncio.to_thread(results.publish)
        finally:
            await asyncio.to_thread(results.close)
        if not await self._end(row, status, published):
            return False
        await asyncio.to_thread(self._remove, batch_id)
        return True

    async def _end(self, row: RowMapping, status: str, published: dict[str, tuple[str, int]]) -> bool:
        now = int(time.time())
        expiry = row["output_expires_s"]
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
                await db.execute(sa.delete(files).where(files.c.id == file_id))
                await db.execute(sa.insert(files).values(file_row))
            if not await self.store.move_in(db, str(row["id"]), str(row["status"]), status, values):
                await db.execute(sa.delete(files).where(files.c.id.in_([f for f, _ in published.values()])))
                return False
            await db.execute(sa.delete(batch_lines).where(batch_lines.c.batch_id == row["id"]))
        return True

    def _remove(self, batch_id: str) -> None:
        shutil.rmtree(self.layout.batch(batch_id), ignore_errors=True)

    async def remove_left(self) -> None:
        """Remove the folders of batches that ended while a process was killed."""
        names = await asyncio.to_thread(lambda: [p.name for p in self.layout.batches.iterdir()])
        async with self.store.database.read() as db:
            for name in names:
                query = sa.select(batches.c.status).where(batches.c.id == name)
                if (await db.execute(query)).scalar_one_or_none() in ("completed", "failed", "expired", "cancelled"):
                    await asyncio.to_thread(self._remove, name)


class Results:
    """Puts the output and error file of a batch together from its segments, in the order of the input."""

    def __init__(self, layout: Layout, batch_id: str, status: str) -> None:
        """Write nothing yet."""
        self.layout = layout
        self.batch_id = batch_id
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
            self._segments[name] = (self.layout.batch(self.batch_id) / f"{name}.seg").open("rb")
        segment = self._segments[name]
        segment.seek(line["result_offset"])
        return segment.read(line["result_length"])

    def _file(self, kind: str) -> IO[bytes]:
        if kind not in self._open:
            temp = self.layout.new_temp()
            self._open[kind] = (temp, temp.open("wb"))
        return self._open[kind][1]

    def publish(self) -> dict[str, tuple[str, int]]:
        """Give the files their names; return id and size of each by kind."""
        published = {}
        for kind, (temp, file) in self._open.items():
            file.flush()
            size = file.tell()
            file.close()
            file_id = result_file_id(self.batch_id, kind)
            publish(temp, self.layout.file(file_id))
            published[kind] = (file_id, size)
        return published

    def close(self) -> None:
        """Close everything; what was not published is removed."""
        for temp, file in self._open.values():
            file.close()
            temp.unlink(missing_ok=True)
        for segment in self._segments.values():
            segment.close()
