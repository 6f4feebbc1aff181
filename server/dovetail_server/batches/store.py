"""What the database knows of batches.

Every change of a state is conditional on the state before it; what validates or finishes a batch compares its lease
too, in the same transaction: the process's name and the batch's epoch, which grows with every lease.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from dovetail.contracts.errors import RequestError
from dovetail_server.batches.model import OPEN, WINDOW_S
from dovetail_server.batches.processes import LeaseLostError, Processes
from dovetail_server.schema.batches import BatchError, BatchRequest
from dovetail_server.serving.served import Served
from dovetail_server.storage.database import Database
from dovetail_server.storage.files import read_page
from dovetail_server.storage.paths import new_id
from dovetail_server.storage.tables import batch_lines, batches

MAX_SEEN = 500
"""Batches that are looked at together: of each owner the oldest first."""


def no_such_batch(batch_id: str) -> RequestError:
    """Return the 404 of a batch."""
    text = f"no batch {batch_id!r} here; GET /v1/batches lists them"
    return RequestError(text, param="batch_id", code="batch_not_found", status=404)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to validate or finish a batch."""

    batch_id: str
    process: str
    epoch: int

    @property
    def is_current(self) -> sa.ColumnElement[bool]:
        """The condition that nobody else got it meanwhile."""
        mine = (batches.c.id == self.batch_id, batches.c.lease_owner == self.process)
        return sa.and_(*mine, batches.c.lease_epoch == self.epoch)


class BatchStore:
    """The table `batches`, as one process uses it. `served` are the names of its model."""

    def __init__(self, database: Database, processes: Processes, served: Served) -> None:
        """Wrap an open database."""
        self.database = database
        self.processes = processes
        self.served = served

    async def create(self, owner: str, request: BatchRequest, num_total: int = 0) -> RowMapping:
        """Write down a new batch; whether its input is good, and how many lines it has, is found out later."""
        expiry = request.output_expires_after
        batch_id = new_id("batch_")
        row = {
            "id": batch_id,
            "owner": owner,
            "served_model": self.served.names[0],
            "endpoint": request.endpoint,
            "input_file_id": request.input_file_id,
            "completion_window": request.completion_window,
            "output_expires_s": None if expiry is None else expiry.seconds,
            "metadata": request.metadata,
            "status": "validating",
            "num_total": num_total,
            "created_at": self.database.stamp(),
            "expires_at": self.database.stamp(WINDOW_S[request.completion_window]),
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

    async def page(
        self, owner: str, after: str | None, limit: int, *, endpoint: str | None = None, is_ascending: bool = False
    ) -> tuple[list[RowMapping], bool]:
        """Return a page of batches, newest first unless `is_ascending`, and whether there are more."""
        async with self.database.read() as db:
            query = sa.select(batches).where(batches.c.owner == owner)
            if endpoint is not None:
                query = query.where(batches.c.endpoint == endpoint)
            return await read_page(db, batches, query, after, limit, is_ascending)

    async def delete(self, batch_id: str, owner: str) -> None:
        """Delete a batch that has ended."""
        async with self.database.write() as db:
            query = sa.delete(batches).where(batches.c.id == batch_id, batches.c.owner == owner)
            await db.execute(query.where(batches.c.status.in_(["completed", "failed", "expired", "cancelled"])))

    async def cancel(self, batch_id: str, owner: str) -> RowMapping:
        """Ask for a batch to end; asking again changes nothing.

        Raises:
            RequestError: 404, or 409 where it has ended otherwise.
        """
        async with self.database.write() as db:
            query = (
                sa.update(batches)
                .where(batches.c.id == batch_id, batches.c.owner == owner)
                .where(batches.c.status.in_(["validating", "in_progress", "finalizing"]))
                .values(status="cancelling", cancelling_at=self.database.stamp())
            )
            await db.execute(query)
        row = await self.get(batch_id, owner)
        if row["status"] not in ("cancelling", "cancelled"):
            text = f"the batch has ended as {row['status']!r} and cannot be cancelled"
            raise RequestError(text, param="batch_id", code="batch_ended", status=409)
        return row

    async def open(self) -> list[RowMapping]:
        """Return batches that this server has to do with.

        Of each owner those come first that are to be validated or finished, then the oldest: however many batches one
        owner has, others are seen. Beside the columns there are `has_pending` (lines that wait), `has_open` (lines that
        wait or run) and `is_over` (its time is up, by the database's clock).
        """
        works = sa.case((batches.c.status == "in_progress", 1), else_=0)
        rank = sa.func.row_number().over(
            partition_by=batches.c.owner, order_by=(works, batches.c.created_at, batches.c.id)
        )
        query = (
            sa.select(
                batches,
                has_lines("pending").label("has_pending"),
                has_lines("pending", "leased").label("has_open"),
                (self.database.now() >= batches.c.expires_at).label("is_over"),
            )
            .where(batches.c.status.in_(OPEN), batches.c.served_model.in_(self.served.names))
            .order_by(rank, sa.func.random())
            .limit(MAX_SEEN)
        )
        async with self.database.read() as db:
            return list((await db.execute(query)).mappings())

    async def running(self, batch_ids: Collection[str]) -> set[str]:
        """Return which of these are in progress."""
        query = sa.select(batches.c.id).where(batches.c.id.in_(batch_ids), batches.c.status == "in_progress")
        async with self.database.read() as db:
            return set((await db.execute(query)).scalars())

    async def lease(self, batch_id: str) -> Lease | None:
        """Take a batch for validating or finishing; None if another process has it."""
        async with self.database.write() as db:
            await self.processes.check(db)
            me = self.processes.lease.name
            is_free = sa.or_(batches.c.lease_owner.is_(None), batches.c.lease_owner == me)
            query = sa.update(batches).where(batches.c.id == batch_id, batches.c.status.in_(OPEN), is_free)
            query = query.values(lease_owner=me, lease_epoch=batches.c.lease_epoch + 1)
            epoch = (await db.execute(query.returning(batches.c.lease_epoch))).scalar_one_or_none()
        return None if epoch is None else Lease(batch_id, me, int(epoch))

    async def release_lease(self, lease: Lease) -> None:
        """Give a batch back, unless somebody else has it."""
        async with self.database.write() as db:
            await db.execute(sa.update(batches).where(lease.is_current).values(lease_owner=None))

    @staticmethod
    async def check(db: Any, lease: Lease) -> None:
        """Make sure, in a transaction that changes what the lease protects, that it is the present one.

        Raises:
            LeaseLostError: It is not.
        """
        query = sa.select(batches.c.id).where(lease.is_current).with_for_update()
        if (await db.execute(query)).first() is None:
            raise LeaseLostError(lease.batch_id)

    async def fail(self, lease: Lease, errors: Sequence[BatchError]) -> None:
        """End a batch whose input is bad.

        Raises:
            LeaseLostError: It is no longer ours, or no longer validating.
        """
        values = {"errors": msgspec.to_builtins(list(errors)), "failed_at": self.database.stamp()}
        async with self.database.write() as db:
            await self.move(db, lease, "validating", "failed", values)

    async def finalize(self, batch_id: str) -> bool:
        """Have a batch finished whose lines are done or whose time is up."""
        is_due = sa.or_(~has_lines("pending", "leased"), self.database.now() >= batches.c.expires_at)
        query = sa.update(batches).where(batches.c.id == batch_id, batches.c.status == "in_progress", is_due)
        async with self.database.write() as db:
            done = await db.execute(query.values(status="finalizing", finalizing_at=self.database.stamp()))
        return bool(done.rowcount == 1)

    @staticmethod
    async def move(db: Any, lease: Lease, before: str, after: str, values: Mapping[str, Any]) -> None:
        """Change a batch's state and end its lease, in a transaction of the caller's.

        Raises:
            LeaseLostError: The lease is not the present one, or the state is not `before`.
        """
        query = sa.update(batches).where(lease.is_current, batches.c.status == before)
        done = await db.execute(query.values(status=after, lease_owner=None, **values))
        if done.rowcount != 1:
            raise LeaseLostError(lease.batch_id)


def has_lines(*states: str) -> sa.Exists:
    """Return the condition that a batch has lines in one of these states."""
    return sa.exists().where(batch_lines.c.batch_id == batches.c.id, batch_lines.c.state.in_(states))
