"""Rows that an owner keeps for a while: the newest of them, within a number and a size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from dovetail.contracts.errors import RequestError
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.storage.completion_rows import written
from dovetail_server.storage.database import Database
from dovetail_server.storage.images import Kind, StoredImages

NONE = sa.false()


def too_much(
    table: sa.Table, now: Any, max_num: int, max_bytes: int, is_kept: sa.ColumnElement[bool] = NONE
) -> sa.ColumnElement[bool]:
    """Select what has expired, and of each owner the oldest rows beyond a number and a size.

    Args:
        table: With `id`, `owner`, `created_at`, `expires_at` and `bytes`.
        now: The database's time.
        max_num: Of rows.
        max_bytes: Of all of them.
        is_kept: Rows that stay in any case.
    """
    newest: dict[str, Any] = {
        "partition_by": table.c.owner,
        "order_by": (table.c.created_at.desc(), table.c.id.desc()),
    }
    rank = sa.func.row_number().over(**newest).label("rank")
    total = sa.func.sum(table.c.bytes).over(**newest).label("total")
    ranked = sa.select(table.c.id, rank, total).subquery()
    beyond = sa.select(ranked.c.id).where(sa.or_(ranked.c.rank > max_num, ranked.c.total > max_bytes))
    return sa.and_(sa.or_(table.c.expires_at <= now, table.c.id.in_(beyond)), sa.not_(is_kept))


class OwnedRows:
    """A table with `id`, `owner`, `created_at`, `expires_at` and `bytes`. `owner` is whose rows a caller may see."""

    def __init__(
        self,
        settings: ServeSettings,
        database: Database,
        table: sa.Table,
        kind: Kind,
        missing: Callable[..., RequestError],
    ) -> None:
        """Wrap an open database; `missing` makes the error of an id that is not there, and what else it is given."""
        self.database = database
        self.max_num = settings.max_stored_responses
        self.max_bytes = settings.max_stored_response_bytes
        self.ttl_s = settings.stored_response_ttl
        self._table = table
        self._error = missing
        self._images = StoredImages(database, kind, table)

    async def get(self, owner: str, row_id: str) -> RowMapping:
        """Return a row; its texts have digests in place of images.

        Raises:
            RequestError: 404.
        """
        async with self.database.read() as db:
            return await self._row(db, owner, row_id)

    async def update(self, owner: str, row_id: str, metadata: Mapping[str, str]) -> RowMapping:
        """Put other metadata in the place of a row's, and return it.

        Raises:
            RequestError: 404.
        """
        query = sa.update(self._table).where(self._table.c.id == row_id, *self._visible(owner))
        async with self.database.write() as db:
            await db.execute(query.values(metadata=written(metadata)))
            return await self._row(db, owner, row_id)

    async def delete(self, owner: str, row_id: str) -> None:
        """Delete a row with what belongs to it.

        Raises:
            RequestError: 404.
        """
        query = sa.delete(self._table).where(self._table.c.id == row_id, *self._visible(owner))
        async with self.database.write() as db:
            if (await db.execute(query)).rowcount != 1:
                raise self._error(row_id)
            await self._forget(db, row_id)

    async def trim(self) -> int:
        """Delete what has expired, and of each owner the oldest beyond the limits; returns how many went."""
        async with self.database.write() as db:
            old = too_much(self._table, self.database.now(), self.max_num, self.max_bytes)
            num = int((await db.execute(sa.delete(self._table).where(old))).rowcount)
            if num:
                await self._forget(db)
            return num

    async def _forget(self, db: AsyncConnection, row_id: str | None = None) -> None:
        """Delete what belongs to a row that is gone; without an id, to all of those."""
        await self._images.drop(db, None if row_id is None else [row_id])

    async def _row(
        self, db: AsyncConnection, owner: str, row_id: str, *names: str, for_update: bool = False
    ) -> RowMapping:
        query: sa.Select[Any] = sa.select(self._table).where(self._table.c.id == row_id, *self._visible(owner))
        found = await db.execute(query.with_for_update() if for_update else query)
        row: RowMapping | None = found.mappings().one_or_none()
        if row is None:
            raise self._error(row_id, *names)
        return row

    def _visible(self, owner: str) -> tuple[sa.ColumnElement[bool], ...]:
        return self._table.c.owner == owner, self._table.c.expires_at > self.database.now()
