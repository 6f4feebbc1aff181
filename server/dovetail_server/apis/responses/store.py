"""Responses in the database: kept for a time, up to a number and a size per owner, the oldest given up first."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec.structs import replace
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.responses import objects as ro
from dovetail_server.apis.responses.items import OPEN, Item, missing, response_of_item, turn_items
from dovetail_server.errors import catalogue as errors
from dovetail_server.http.auth import Keys
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.storage.database import Database
from dovetail_server.storage.owned_rows import OwnedRows, too_much
from dovetail_server.storage.process_lease import ProcessLease
from dovetail_server.storage.tables import responses as table
from dovetail_server.supervision.supervisor import Supervisor

MAX_TURNS = 10_000
"""Longest chain of `previous_response_id`."""
FIXED = ("id", "owner")
"""Columns that stay as they were first written."""
MAX_GROUP = 64
"""Responses written in one transaction."""
SLACK = 1.05
"""How far the limits may be passed before the oldest responses go."""

Row = dict[str, Any]
Waiting = tuple[Row, Mapping[str, bytes], asyncio.Future[None]]
"""A row, its images, and who waits for it."""
encode = msgspec.json.Encoder().encode
decode_response = msgspec.json.Decoder(ro.ResponseObject).decode


class ResponseColumns(msgspec.Struct):
    """What columns have of a response."""

    id: str
    status: ro.ResponseStatus
    previous_response_id: str | None
    background: bool


decode_head = msgspec.json.Decoder(ResponseColumns).decode


@dataclass(slots=True)
class StoredSize:
    """About how much is stored for an owner: a bit more where something was deleted since the last count."""

    num: int = 0
    num_bytes: int = 0


class ResponseStore(OwnedRows):
    """The table `responses`, as one process uses it. `owner` is whose responses a caller may see."""

    def __init__(
        self, settings: ServeSettings, database: Database, lease: ProcessLease, tasks: Supervisor, keys: Keys
    ) -> None:
        """Wrap an open database; `lease` names this process, `keys` say how many each owner may keep."""
        super().__init__(settings, database, table, "response", missing)
        self._keys = keys
        self.lease = lease
        self._tasks = tasks
        self._held: dict[str, StoredSize] = defaultdict(StoredSize)
        self._waiting: list[Waiting] = []
        self._writer: asyncio.Task[None] | None = None
        self._missing: set[str] = set()
        self._check: asyncio.Task[None] | None = None

    async def check_writable(self) -> None:
        """Wait until something could be written; callers at the same time share one attempt.

        Raises:
            ServiceError: The database cannot be written now.
        """
        if self._check is None or self._check.done():
            self._check = self._tasks.start("response store check", self._write_nothing(), is_awaited=True)
        await asyncio.shield(self._check)

    async def _write_nothing(self) -> None:
        async with self.database.write():
            pass

    async def put(self, owner: str, body: bytes, items: bytes) -> None:
        """Write a response, or what has become of one in the background; one that was deleted stays deleted.

        Args:
            owner: Whose it is.
            body: The response, JSON.
            items: Its own input, JSON.

        Raises:
            ServiceError: The database cannot be used now.
        """
        response = decode_head(body)
        is_open = response.status in OPEN
        num_bytes = len(body) + len(items)
        items, images = await self._images.pack(items)
        row: Row = {
            "id": response.id,
            "owner": owner,
            "previous_id": response.previous_response_id,
            "status": response.status,
            "is_background": response.background,
            "process": self.lease.name if is_open else None,
            "bytes": num_bytes,
            "body": body,
            "items": items,
        }
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, images, written))
        if self._writer is None or self._writer.done():
            self._writer = self._tasks.start("response writer", self._write())
        await written

    async def _write(self) -> None:
        """Write what waits, in groups: while one is being made durable, the next gathers."""
        while self._waiting:
            group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
            try:
                await self._write_group([(row, images) for row, images, _ in group])
            except asyncio.CancelledError:
                fail([*group, *self._waiting], errors.draining())
                self._waiting = []
                raise
            except Exception as error:
                fail(group, error)
            else:
                for *_, written in group:
                    if not written.done():
                        written.set_result(None)

    async def _write_group(self, group: Sequence[tuple[Row, Mapping[str, bytes]]]) -> None:
        rows = [row for row, _ in group]
        new = [row for row in rows if is_first(row)]
        async with self.database.write() as db:
            if new:
                now = self.database.now()
                await db.execute(
                    self.database.insert_once(table).values(created_at=now, expires_at=now + self.ttl_s), new
                )
            for row in rows:
                if not is_first(row):
                    values = {name: value for name, value in row.items() if name not in FIXED}
                    is_ours = table.c.process == self.lease.name  # not, where others took this process for gone
                    await db.execute(sa.update(table).where(table.c.id == row["id"], is_ours).values(values))
            for row, images in group:
                if is_first(row):  # what ends in the background has the images that it began with
                    await self._images.add(db, row["owner"], row["id"], images)
        for row in rows:
            self._held[row["owner"]].num += is_first(row)
            self._held[row["owner"]].num_bytes += row["bytes"]
        held = {owner: self._held[owner] for owner in {row["owner"] for row in rows}}
        if any(h.num > self._most(o) * SLACK or h.num_bytes > self.max_bytes * SLACK for o, h in held.items()):
            await self.trim()

    def _most(self, owner: str) -> int:
        """Return how many responses of an owner are kept."""
        return min(self.max_num, self._keys.tenant(owner).grant.limits.stored_responses or self.max_num)

    async def with_input(self, owner: str, response_id: str) -> tuple[RowMapping, bytes]:
        """Return a response's row, and its own input, JSON.

        Raises:
            RequestError: 404.
        """
        row = await self.get(owner, response_id)
        async with self.database.read() as db:
            [items] = await self._images.restored(db, owner, [row["items"]])
        return row, items

    async def chain(self, owner: str, response_id: str) -> list[tuple[bytes, bytes]]:
        """Return what a response that continues this one begins with: input items and reply of each, for `turn_items`.

        Raises:
            RequestError: It, or one that it continues, is not there or has no output.
        """
        turns = sa.select(table.c.id, table.c.previous_id, sa.literal(0).label("depth"))
        turns = turns.where(table.c.id == response_id, *self._visible(owner))
        found = turns.cte("turns", recursive=True)
        more = sa.select(table.c.id, table.c.previous_id, found.c.depth + 1).where(
            table.c.id == found.c.previous_id, found.c.depth < MAX_TURNS, *self._visible(owner)
        )
        found = found.union_all(more)
        query = sa.select(table, found.c.depth).join(found, table.c.id == found.c.id).order_by(found.c.depth.desc())
        async with self.database.read() as db:
            rows = list((await db.execute(query)).mappings())
            if not rows or rows[0]["previous_id"] is not None:
                raise missing(response_id if not rows else rows[0]["previous_id"], "previous_response_id")
            return await self._turns(db, owner, rows)

    async def item(self, owner: str, identifier: str, param: str) -> Item:
        """Return an item of a stored response.

        Raises:
            RequestError: There is none of this id.
        """
        response_id = response_of_item(identifier)
        turns = []
        if response_id is not None:
            async with self.database.read() as db:
                query = sa.select(table).where(table.c.id == response_id, *self._visible(owner))
                turns = await self._turns(db, owner, list((await db.execute(query)).mappings()))
        for item in (item for turn in turns for item in turn_items(*turn)):
            if item["id"] == identifier:
                return item
        text = f"{param}: no item {identifier!r} in a stored response; send the item itself"
        raise RequestError(text, param=param, code="item_not_found", status=404)

    async def trim(self) -> int:
        """Delete what has expired, and of each owner the oldest responses beyond the limits.

        Those that are still generated stay: their owner waits for them.

        Returns:
            How many went.
        """
        count = sa.select(table.c.owner, sa.func.count(), sa.func.sum(table.c.bytes)).group_by(table.c.owner)
        is_open = table.c.process.is_not(None)
        async with self.database.write() as db:
            old = too_much(table, self.database.now(), self.max_num, self.max_bytes, is_open)
            query = sa.delete(table).where(old)
            num = (await db.execute(query)).rowcount
            rows = (await db.execute(count)).all()
            if owners := [row[0] for row in rows if int(row[1]) > self._most(str(row[0]))]:
                for owner in owners:
                    own = table.c.owner == owner
                    oldest = sa.select(table.c.id).where(own).order_by(table.c.created_at.desc(), table.c.id.desc())
                    beyond = oldest.offset(self._most(str(owner)))
                    gone = sa.delete(table).where(table.c.id.in_(beyond), sa.not_(is_open))
                    num += (await db.execute(gone)).rowcount
                rows = (await db.execute(count)).all()
            if num:
                await self._images.drop(db)
        self._held = defaultdict(StoredSize, {str(row[0]): StoredSize(int(row[1]), int(row[2])) for row in rows})
        return int(num)

    async def fail_orphans(self, process: str) -> None:
        """End the responses of a process that is gone."""
        await self._end(table.c.process == process)

    async def _end(self, which: sa.ColumnElement[bool]) -> None:
        error = ro.ResponseError(code="server_error", message="the server stopped before the response was complete")
        async with self.database.write() as db:
            query = sa.select(table.c.id, table.c.body).where(table.c.process.is_not(None), which).with_for_update()
            for row in (await db.execute(query)).all():
                body = encode(replace(decode_response(row.body), status="failed", error=error))
                values = {"body": body, "status": "failed", "process": None}
                await db.execute(sa.update(table).where(table.c.id == row.id).values(values))

    async def end_lost(self, known: Collection[str]) -> None:
        """End what is on record as generated here and is not, as after an error while it was written down.

        Args:
            known: What is generated here. One that is missing twice in a row is lost.
        """
        async with self.database.read() as db:
            query = sa.select(table.c.id).where(table.c.process == self.lease.name)
            found = {str(row[0]) for row in await db.execute(query)} - set(known)
        await self._end(table.c.id.in_(found & self._missing))
        self._missing = found

    async def _turns(self, db: AsyncConnection, owner: str, rows: Sequence[RowMapping]) -> list[tuple[bytes, bytes]]:
        """Return each row's own input and the response, both JSON.

        Raises:
            RequestError: One is not complete.
        """
        turns = [row_turn(row) for row in rows]
        items = await self._images.restored(db, owner, [own for own, _ in turns])
        return [(own, body) for own, (_, body) in zip(items, turns, strict=True)]


def fail(group: Sequence[Waiting], error: Exception) -> None:
    """Tell whoever waits for these rows that they were not written."""
    for *_, written in group:
        if not written.done():
            written.set_exception(error)


def is_first(row: Row) -> bool:
    """Tell whether a row is new: one in the background is written when it begins, and again when it ends."""
    return not row["is_background"] or row["status"] == "queued"


def row_turn(row: RowMapping) -> tuple[bytes, bytes]:
    """Return a response's own input, with digests in place of images, and the response, both JSON.

    Raises:
        RequestError: It is not complete.
    """
    if row["status"] not in ("completed", "incomplete"):
        text = f"the response {row['id']!r} is {row['status']}; only a complete one can be continued"
        raise RequestError(text, param="previous_response_id", code="invalid_value")
    return bytes(row["items"]), bytes(row["body"])
