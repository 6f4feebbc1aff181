"""Conversations in the database: kept for a time after their last item, up to a number and a size per owner.

Limits and times are those of stored responses, counted apart from them. A conversation itself holds about as much as
one request may have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.responses.items import Item, item_id, new_response_id
from dovetail_server.apis.responses.schema import missing, missing_item
from dovetail_server.http.auth import Keys
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.storage.completion_rows import written
from dovetail_server.storage.database import Database
from dovetail_server.storage.images import packed
from dovetail_server.storage.owned_rows import OwnedRows
from dovetail_server.storage.paths import new_id
from dovetail_server.storage.tables import conversation_items as items
from dovetail_server.storage.tables import conversations as table

MAX_ITEMS = 20_000
"""Of a conversation, whoever added them: each is a row."""
AT_ONCE = 500
encode = msgspec.json.Encoder().encode


class ConversationStore(OwnedRows):
    """The tables of conversations. `owner` is whose conversations a caller may see."""

    def __init__(self, settings: ServeSettings, database: Database, keys: Keys) -> None:
        """Wrap an open database; `keys` say how many each owner may keep."""
        super().__init__(settings, database, table, "conversation", missing)
        self._keys = keys
        self.max_each = settings.max_body_bytes

    async def create(self, owner: str, metadata: Mapping[str, str], first: Sequence[Item]) -> RowMapping:
        """Begin a conversation, and return its row; the owner's oldest ones go where there are too many.

        Raises:
            ServiceError: The database cannot be used now.
        """
        conversation_id, now = new_id("conv_"), self.database.now()
        row = {
            "id": conversation_id,
            "owner": owner,
            "created_at": now,
            "expires_at": now + self.ttl_s,
            "bytes": 0,
            "metadata": written(metadata),
            "next_no": 0,
        }
        async with self.database.write() as db:
            await db.execute(sa.insert(table).values(row))
            await self._append(db, owner, conversation_id, first, is_bounded=True)
            return await self._row(db, owner, conversation_id)

    async def add(self, owner: str, conversation_id: str, new: Sequence[Item]) -> list[Item]:
        """Add a client's items, and return them as they are kept.

        Raises:
            RequestError: 404; or it is full.
        """
        async with self.database.write() as db:
            return await self._append(db, owner, conversation_id, new, is_bounded=True)

    async def add_turn(self, owner: str, conversation_id: str, new: Sequence[Item]) -> None:
        """Add what a response was asked and what it said; one that has room when the response begins takes it.

        Raises:
            RequestError: 404.
        """
        async with self.database.write() as db:
            await self._append(db, owner, conversation_id, new, is_bounded=False)

    async def whole(self, owner: str, conversation_id: str, param: str) -> bytes:
        """Return all items, a list in JSON, for a response that goes on with them.

        Raises:
            RequestError: 404; or it is full, so that the response could not be added.
        """
        async with self.database.read() as db:
            row = await self._row(db, owner, conversation_id, param)
            self._check_room(row, 0, param)
            query = sa.select(items.c.body).where(items.c.conversation_id == conversation_id)
            rows = (await db.execute(query.order_by(items.c.item_no))).all()
            bodies = await self._images.restored(db, owner, [row.body for row in rows])
        return b"[" + b",".join(bodies) + b"]"

    async def item(self, owner: str, conversation_id: str, item: str) -> bytes:
        """Return an item, JSON.

        Raises:
            RequestError: 404.
        """
        async with self.database.read() as db:
            await self._row(db, owner, conversation_id)
            where = items.c.conversation_id == conversation_id, items.c.id == item
            row = (await db.execute(sa.select(items.c.body).where(*where))).one_or_none()
            if row is None:
                raise missing_item(item, conversation_id)
            [body] = await self._images.restored(db, owner, [row.body])
        return body

    async def delete_item(self, owner: str, conversation_id: str, item: str) -> RowMapping:
        """Delete an item, and return the conversation's row.

        Raises:
            RequestError: 404.
        """
        async with self.database.write() as db:
            await self._row(db, owner, conversation_id)
            where = items.c.conversation_id == conversation_id, items.c.id == item
            body = (await db.execute(sa.select(items.c.body).where(*where))).scalar_one_or_none()
            if body is None:
                raise missing_item(item, conversation_id)
            [whole] = await self._images.restored(db, owner, [body])
            await db.execute(sa.delete(items).where(*where))
            smaller = sa.update(table).where(table.c.id == conversation_id).values(bytes=table.c.bytes - len(whole))
            await db.execute(smaller)
            await self._images.drop(db, [conversation_id], item)
            return await self._row(db, owner, conversation_id)

    async def page(
        self, owner: str, conversation_id: str, *, after: str | None, limit: int, is_ascending: bool
    ) -> tuple[list[bytes], bool]:
        """Return a page of items, JSON, and whether there are more.

        Raises:
            RequestError: 404; or `after` names no item.
        """
        query = sa.select(items.c.body).where(items.c.conversation_id == conversation_id)
        async with self.database.read() as db:
            await self._row(db, owner, conversation_id)
            if after is not None:
                where = items.c.conversation_id == conversation_id, items.c.id == after
                at = (await db.execute(sa.select(items.c.item_no).where(*where))).scalar_one_or_none()
                if at is None:
                    raise missing_item(after, conversation_id, "after")
                query = query.where(items.c.item_no > at if is_ascending else items.c.item_no < at)
            order = items.c.item_no if is_ascending else items.c.item_no.desc()
            rows = (await db.execute(query.order_by(order).limit(limit + 1))).all()
            bodies = await self._images.restored(db, owner, [row.body for row in rows[:limit]])
        return bodies, len(rows) > limit

    async def _forget(self, db: AsyncConnection, row_id: str | None = None) -> None:
        is_gone = items.c.conversation_id.not_in(sa.select(table.c.id))
        await db.execute(sa.delete(items).where(is_gone if row_id is None else items.c.conversation_id == row_id))
        await super()._forget(db, row_id)

    async def _append(
        self, db: AsyncConnection, owner: str, conversation_id: str, new: Sequence[Item], *, is_bounded: bool
    ) -> list[Item]:
        row = await self._row(db, owner, conversation_id, for_update=True)
        taken = await self._taken(db, conversation_id, [item["id"] for item in new])
        named, bodies = await asyncio.to_thread(with_names, new, taken)  # a turn may have 65,000 items
        size = sum(map(len, bodies))
        if is_bounded:
            self._check_room(row, size, "items", len(named))
        first = row["next_no"]
        stored = await asyncio.to_thread(lambda: [packed(body) for body in bodies])
        if named:
            values = [
                {"conversation_id": conversation_id, "item_no": first + at, "id": item["id"], "body": body}
                for at, (item, (body, _)) in enumerate(zip(named, stored, strict=True))
            ]
            await db.execute(sa.insert(items), values)
        grown = {
            "bytes": row["bytes"] + size,
            "next_no": first + len(named),
            "expires_at": self.database.now() + self.ttl_s,
        }
        await db.execute(sa.update(table).where(table.c.id == conversation_id).values(grown))
        await self._make_room(db, owner, conversation_id)
        parts = {str(item["id"]): found for item, (_, found) in zip(named, stored, strict=True) if found}
        await self._images.add_parts(db, owner, conversation_id, parts)
        return named

    async def _taken(self, db: AsyncConnection, conversation_id: str, given: Sequence[str]) -> set[str]:
        """Return which of some identifiers a conversation has, a part at a time: statements have a most of values."""
        taken: set[str] = set()
        for at in range(0, len(given), AT_ONCE):
            where = items.c.conversation_id == conversation_id, items.c.id.in_(given[at : at + AT_ONCE])
            taken.update(str(row[0]) for row in await db.execute(sa.select(items.c.id).where(*where)))
        return taken

    def _check_room(self, row: RowMapping, size: int, param: str, num: int = 1) -> None:
        """Refuse to add to a conversation that is full.

        Raises:
            RequestError: It is.
        """
        if row["bytes"] + size > self.max_each:
            what, most, found = "bytes", self.max_each, row["bytes"] + size
        elif row["next_no"] + num > MAX_ITEMS:
            what, most, found = "items in all its time", MAX_ITEMS, row["next_no"] + num
        else:
            return
        text = f"the conversation {row['id']!r} would hold {found} {what}, and may hold {most}; begin another"
        raise RequestError(text, param=param, code="conversation_full")

    async def _make_room(self, db: AsyncConnection, owner: str, keep: str) -> None:
        """Delete an owner's oldest conversations beyond the limits, but not the one that is written."""
        most = min(self.max_num, self._keys.tenant(owner).grant.limits.stored_responses or self.max_num)
        own = table.c.owner == owner
        counts = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(table.c.bytes), 0)).where(own)
        num, total = (await db.execute(counts)).one()
        if num <= most and total <= self.max_bytes:
            return
        query = sa.select(table.c.id, table.c.bytes).where(own, table.c.id != keep)
        gone = []
        for row in await db.execute(query.order_by(table.c.created_at, table.c.id)):
            if num <= most and total <= self.max_bytes:
                break
            num, total = num - 1, total - row.bytes
            gone.append(row.id)
        for conversation_id in gone:
            await db.execute(sa.delete(table).where(table.c.id == conversation_id))
            await db.execute(sa.delete(items).where(items.c.conversation_id == conversation_id))
        if gone:
            await self._images.drop(db)


def with_names(new: Sequence[Item], taken: set[str]) -> tuple[list[Item], list[bytes]]:
    """Return items of which each has an identifier of its own, as clients send some twice, and their JSON."""
    named, base = [], new_response_id()
    for at, item in enumerate(new):
        name = item["id"] if item["id"] not in taken else item_id(base, item["type"], "i", at)
        taken.add(name)
        named.append({**item, "id": name})
    return named, [encode(item) for item in named]
