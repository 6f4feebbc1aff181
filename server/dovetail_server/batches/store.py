"""What the database knows of batches. Every change of a state is conditional on the state before it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from dovetail.errors import RequestError
from dovetail_server.batches.model import OPEN, WINDOW_S
from dovetail_server.openai.batches import BatchError, BatchRequest
from dovetail_server.storage.database import Database
from dovetail_server.storage.files import read_page
from dovetail_server.storage.paths import new_id
from dovetail_server.storage.tables import batches

BATCH_LEASE_S = 120.0


def no_such_batch(batch_id: str) -> RequestError:
    """Return the 404 of a batch."""
    text = f"no batch {batch_id!r} here; GET /v1/batches lists them"
    return RequestError(text, param="batch_id", code="batch_not_found", status=404)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a batch ends."""

    status: str
    output_file_id: str | None = None
    error_file_id: str | None = None


class BatchStore:
    """The table `batches`. `me` is the process that takes leases; `served` the names that it serves."""

    def __init__(self, database: Database, me: str, served: Sequence[str]) -> None:
        """Wrap an open database."""
        self.database = database
        self.me = me
        self.served = tuple(served)

    async def create(self, owner: str, request: BatchRequest) -> RowMapping:
        """Write down a new batch; whether its input is good is found out later."""
        now = int(time.time())
        expiry = request.output_expires_after
        batch_id = new_id("batch_")
        row = {
            "id": batch_id,
            "owner": owner,
            "served_model": self.served[0],
            "endpoint": request.endpoint,
            "input_file_id": request.input_file_id,
            "completion_window": request.completion_window,
            "output_expires_s": None if expiry is None else expiry.seconds,
            "metadata": request.metadata,
            "status": "validating",
            "created_at": now,
            "expires_at": now + WINDOW_S[request.completion_window],
        }
        async with self.database.write() as db:
            await db.execute(sa.insert(batches).values(row))
        return await self.get(batch_id, owner)

    async def get(self, batch_id: str, owner: str) -> RowMapping:
        """Return a batch.

        Raises:
            RequestError: 404.
        """
        async with self.database.read() as db:
            query = sa.select(batches).where(batches.c.id == batch_id, batches.c.owner == owner)
            row = (await db.execute(query)).mappings().one_or_none()
        if row is None:
            raise no_such_batch(batch_id)
        return row

    async def page(self, owner: str, after: str | None, limit: int) -> tuple[list[RowMapping], bool]:
        """Return a page of batches, newest first, and whether there are more."""
        async with self.database.read() as db:
            query = sa.select(batches).where(batches.c.owner == owner)
            return await read_page(db, batches, query, after, limit, False)

    async def cancel(self, batch_id: str, owner: str) -> RowMapping:
        """Ask for a batch to end; asking again changes nothing.

        Raises:
            RequestError: 404, or 409 where it has ended otherwise.
        """
        now = int(time.time())
        async with self.database.write() as db:
            query = (
                sa.update(batches)
                .where(batches.c.id == batch_id, batches.c.owner == owner)
                .where(batches.c.status.in_(["validating", "in_progress", "finalizing"]))
                .values(status="cancelling", cancelling_at=now)
            )
            await db.execute(query)
        row = await self.get(batch_id, owner)
        if row["status"] not in ("cancelling", "cancelled"):
            text = f"the batch has ended as {row['status']!r} and cannot be cancelled"
            raise RequestError(text, param="batch_id", code="batch_ended", status=409)
        return row

    async def open(self) -> list[RowMapping]:
        """Return the batches that this server has to do with, oldest first."""
        async with self.database.read() as db:
            query = (
                sa.select(batches)
                .where(batches.c.status.in_(OPEN), batches.c.served_model.in_(self.served))
                .order_by(batches.c.created_at, batches.c.id)
                .limit(100)
            )
            return list((await db.execute(query)).mappings())

    async def lease(self, batch_id: str) -> bool:
        """Take a batch for validating or finishing; False if another process has it."""
        now = time.time()
        is_free = sa.or_(batches.c.lease_owner.is_(None), batches.c.lease_owner == self.me, batches.c.lease_until < now)
        query = sa.update(batches).where(batches.c.id == batch_id, is_free)
        async with self.database.write() as db:
            done = await db.execute(query.values(lease_owner=self.me, lease_until=now + BATCH_LEASE_S))
        return bool(done.rowcount == 1)

    async def unlease(self, batch_id: str) -> None:
        """Give a batch back."""
        query = sa.update(batches).where(batches.c.id == batch_id, batches.c.lease_owner == self.me)
        async with self.database.write() as db:
            await db.execute(query.values(lease_owner=None, lease_until=None))

    async def fail(self, batch_id: str, errors: Sequence[BatchError]) -> bool:
        """End a batch whose input is bad; False if it is no longer validating."""
        values = {"errors": msgspec.to_builtins(list(errors)), "failed_at": int(time.time())}
        return await self.move(batch_id, "validating", "failed", values)

    async def move(self, batch_id: str, before: str, after: str, values: Mapping[str, Any]) -> bool:
        """Change a batch's state; False if it was not in the state `before`."""
        async with self.database.write() as db:
            return await self.move_in(db, batch_id, before, after, values)

    @staticmethod
    async def move_in(db: Any, batch_id: str, before: str, after: str, values: Mapping[str, Any]) -> bool:
        """As `move`, in a transaction of the caller's."""
        query = sa.update(batches).where(batches.c.id == batch_id, batches.c.status == before)
        done = await db.execute(query.values(status=after, lease_owner=None, lease_until=None, **values))
        return bool(done.rowcount == 1)
