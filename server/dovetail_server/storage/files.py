"""Files: rows in the database, bytes under `files/`, published before their row exists."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from dovetail.contracts.errors import RequestError
from dovetail_server.errors.catalogue import ServiceError
from dovetail_server.http.auth import Keys
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.storage.database import FILES_LOCK, Database
from dovetail_server.storage.disk import age_of, disk_full, free_bytes, names_in, publish, remove, write_failed
from dovetail_server.storage.paths import StoragePaths, new_id
from dovetail_server.storage.tables import files

LEFT_AGE_S = 24 * 3600.0
"""What is older than this and unfinished, or has no row, was left by a process that is gone."""
LOOK_EVERY = 60
"""Sweeps between two looks for such files."""
CHUNK = 500


class FileStore:
    """All files of one storage folder. `owner` is whose files a caller may see."""

    def __init__(self, settings: ServeSettings, layout: StoragePaths, database: Database, keys: Keys) -> None:
        """Wrap an open database; `keys` say how much each owner may keep."""
        self.keys = keys
        self.settings = settings
        self.layout = layout
        self.database = database
        self._num_sweeps = 0
        self._left: set[Path] = set()

    async def check_room(self, owner: str, num_bytes: int, *, is_written: bool = False) -> None:
        """Refuse a file of `num_bytes` where too little would stay free, or a quota does not allow it.

        What it says of the quotas is the owner's own use, never others'.

        Args:
            owner: Whose it is.
            num_bytes: Its length, as far as it is known.
            is_written: It is on the disk already.

        Raises:
            ServiceError: 507.
        """
        min_free = self.settings.min_free_disk_bytes
        free = await asyncio.to_thread(free_bytes, self.layout.folder)
        if free - (0 if is_written else num_bytes) < min_free:
            raise disk_full(free, min_free)
        async with self.database.read() as db:
            await self._check_quotas(db, owner, num_bytes)

    async def _check_quotas(self, db: AsyncConnection, owner: str, num_bytes: int) -> None:
        """As `check_room`, but for the disk."""
        quota, most = self.settings.max_storage_bytes, self.keys.tenant(owner).grant.limits.file_bytes
        if quota is None and most is None:
            return
        of_owner = sa.func.sum(sa.case((files.c.owner == owner, files.c.bytes), else_=0))
        row = (await db.execute(sa.select(sa.func.sum(files.c.bytes), of_owner))).one()
        used, own = (int(each or 0) for each in row)
        if most is not None and own + num_bytes > most:
            text = f"your files hold {own} of the {most} bytes that your key may keep; delete some"
        elif quota is not None and used + num_bytes > quota:
            text = f"the server has no room for another {num_bytes} bytes; your files hold {own} bytes; delete some"
        else:
            return
        raise ServiceError(text, code="insufficient_storage", status=507, retry_after_s=60)

    async def add(
        self, temp: Path, *, owner: str, filename: str, purpose: str, size: int, expires_s: int | None
    ) -> RowMapping:
        """Take over a finished temporary file.

        Raises:
            ServiceError: 507 or 503; nothing was added.
        """
        await self.check_room(owner, size, is_written=True)
        file_id = new_id("file-")
        row = {
            "id": file_id,
            "owner": owner,
            "filename": filename,
            "purpose": purpose,
            "bytes": size,
            "created_at": self.database.stamp(),
            "expires_at": None if expires_s is None else self.database.stamp(expires_s),
        }
        try:
            await asyncio.to_thread(publish, temp, self.layout.file(file_id))
        except OSError as error:
            raise write_failed(error, self.settings.min_free_disk_bytes) from error
        # Where this fails the file stays: the row may be there all the same. If it is not, a sweep removes the file.
        async with self.database.write() as db:
            await self.database.alone(db, FILES_LOCK)
            try:
                await self._check_quotas(db, owner, size)  # others may have come meanwhile
            except ServiceError:
                await asyncio.to_thread(remove, self.layout.file(file_id))
                raise
            await db.execute(sa.insert(files).values(row))
        return await self.get(file_id, owner)

    async def find(self, file_id: str, owner: str) -> RowMapping | None:
        """Return a file's row, or None where it is missing, expired or somebody else's."""
        async with self.database.read() as db:
            query = sa.select(files).where(files.c.id == file_id, files.c.owner == owner, self._is_alive())
            return (await db.execute(query)).mappings().one_or_none()

    async def get(self, file_id: str, owner: str) -> RowMapping:
        """Return a file's row.

        Raises:
            RequestError: 404.
        """
        row = await self.find(file_id, owner)
        if row is None:
            raise self.missing(file_id)
        return row

    async def page(
        self, owner: str, *, after: str | None, limit: int, is_ascending: bool, purpose: str | None
    ) -> tuple[list[RowMapping], bool]:
        """Return a page of files, and whether there are more.

        Raises:
            RequestError: `after` names no file.
        """
        query = sa.select(files).where(files.c.owner == owner, self._is_alive())
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        async with self.database.read() as db:
            return await read_page(db, files, query, after, limit, is_ascending)

    async def delete(self, file_id: str, owner: str) -> None:
        """Delete a file. A batch that has begun keeps its own hold on the input.

        Raises:
            RequestError: 404.
        """
        async with self.database.write() as db:
            query = sa.delete(files).where(files.c.id == file_id, files.c.owner == owner, self._is_alive())
            if (await db.execute(query)).rowcount != 1:
                raise self.missing(file_id)
        await asyncio.to_thread(self._remove, [file_id])

    async def sweep(self) -> int:
        """Delete what has expired, uploads that nobody finished, and what was left without a row.

        Returns:
            How many files expired.
        """
        async with self.database.write() as db:
            query = sa.delete(files).where(~self._is_alive()).returning(files.c.id)
            gone = [str(row[0]) for row in await db.execute(query)]
        await asyncio.to_thread(self._remove, gone)
        if self._num_sweeps % LOOK_EVERY == 0:
            await self._remove_left()
        self._num_sweeps += 1
        return len(gone)

    def _remove(self, gone: Sequence[str]) -> None:
        for file_id in gone:
            remove(self.layout.file(file_id))

    async def _remove_left(self) -> None:
        """Remove what was seen to be left at two looks: a clock that jumps makes a file old, but not seen twice."""
        left = await asyncio.to_thread(self._old, self.layout.temp)
        old = await asyncio.to_thread(self._old, self.layout.files)
        for start in range(0, len(old), CHUNK):
            chunk = {path.name: path for path in old[start : start + CHUNK]}
            async with self.database.read() as db:
                rows = await db.execute(sa.select(files.c.id).where(files.c.id.in_(chunk)))
                kept = set(rows.scalars())
            left += [path for name, path in chunk.items() if name not in kept]
        for path in self._left.intersection(left):
            await asyncio.to_thread(remove, path)
        self._left = set(left)

    @staticmethod
    def _old(folder: Path) -> list[Path]:
        now = time.time()
        return [folder / name for name in names_in(folder) if age_of(folder / name, now) > LEFT_AGE_S]

    @staticmethod
    def missing(file_id: str) -> RequestError:
        """Return the 404 of a file."""
        text = f"no file {file_id!r} here; GET /v1/files lists them"
        return RequestError(text, param="file_id", code="file_not_found", status=404)

    def _is_alive(self) -> sa.ColumnElement[bool]:
        return sa.or_(files.c.expires_at.is_(None), files.c.expires_at > self.database.now())


async def read_page(
    db: Any, table: sa.Table, query: sa.Select[Any], after: str | None, limit: int, is_ascending: bool
) -> tuple[list[RowMapping], bool]:
    """Run a query for one page, ordered by age; `after` is the last id of the page before.

    Raises:
        RequestError: `after` is not among the results.
    """
    key = sa.tuple_(table.c.created_at, table.c.id)
    if after is not None:
        found = (await db.execute(query.where(table.c.id == after))).mappings().one_or_none()
        if found is None:
            text = f"after: no {after!r} in this list; give the last id of the page before"
            raise RequestError(text, param="after", code="invalid_value")
        bound = sa.tuple_(sa.literal(found["created_at"]), sa.literal(found["id"]))
        query = query.where(key > bound if is_ascending else key < bound)
    order = (table.c.created_at, table.c.id)
    query = query.order_by(*(c.asc() if is_ascending else c.desc() for c in order)).limit(limit + 1)
    rows = list((await db.execute(query)).mappings())
    return rows[:limit], len(rows) > limit
