"""Chat completions that a request asked to be stored: kept for a time, up to a number and a size per owner.

Limits and times are those of stored responses, counted apart from them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from dovetail_server.errors import catalogue as errors
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.storage.completion_rows import missing, written
from dovetail_server.storage.database import Database
from dovetail_server.storage.files import read_page
from dovetail_server.storage.owned_rows import OwnedRows
from dovetail_server.storage.tables import chat_completions as table

logger = logging.getLogger("dovetail.server")
LOOK_EVERY = 20
"""The limits are looked at again when a twentieth of them has come in since."""


class CompletionStore(OwnedRows):
    """The table `chat_completions`. `owner` is whose completions a caller may see."""

    def __init__(self, settings: ServeSettings, database: Database) -> None:
        """Wrap an open database."""
        super().__init__(settings, database, table, "completion", missing)
        self._num_new = self._num_new_bytes = 0

    async def put(
        self, owner: str, completion_id: str, model: str, metadata: Mapping[str, str], body: bytes, messages: bytes
    ) -> None:
        """Write a completion.

        Args:
            owner: Whose it is.
            completion_id: Unlike any other.
            model: The name that the reply carries.
            metadata: The request's.
            body: The reply, JSON.
            messages: The request's, JSON.

        Raises:
            ServiceError: The database cannot be used now.
        """
        size = len(body) + len(messages)
        messages, found = await self._images.pack(messages)
        async with self.database.write() as db:
            now = self.database.now()
            values = {
                "id": completion_id,
                "owner": owner,
                "model": model,
                "created_at": now,
                "expires_at": now + self.ttl_s,
                "bytes": size,
                "metadata": written(metadata),
                "body": body,
                "messages": messages,
            }
            await db.execute(self.database.insert_once(table).values(values))
            await self._images.add(db, owner, completion_id, found)
        self._num_new, self._num_new_bytes = self._num_new + 1, self._num_new_bytes + size
        if self._num_new * LOOK_EVERY > self.max_num or self._num_new_bytes * LOOK_EVERY > self.max_bytes:
            self._num_new = self._num_new_bytes = 0
            await self.trim()

    async def messages(self, owner: str, completion_id: str) -> bytes:
        """Return a completion's messages, JSON.

        Raises:
            RequestError: 404.
        """
        row = await self.get(owner, completion_id)
        async with self.database.read() as db:
            [whole] = await self._images.restored(db, owner, [row["messages"]])
        return whole

    async def page(
        self,
        owner: str,
        *,
        after: str | None,
        limit: int,
        is_ascending: bool,
        model: str | None,
        metadata: Mapping[str, str],
    ) -> tuple[list[RowMapping], bool]:
        """Return a page of completions, and whether there are more.

        Raises:
            RequestError: `after` names none.
        """
        query = sa.select(table).where(*self._visible(owner))
        if model is not None:
            query = query.where(table.c.model == model)
        for key, value in metadata.items():
            query = query.where(has_pair(key, value))
        async with self.database.read() as db:
            return await read_page(db, table, query, after, limit, is_ascending)


def has_pair(key: str, value: str) -> sa.ColumnElement[bool]:
    """Select what has a pair in its metadata.

    The text `,"key":"value"` stands in an object of texts only as a pair: within a text a quote has a backslash before
    it. JSON operators of databases do not all find keys with quotes or beyond ASCII, and LIKE ignores case in some.
    """
    pairs = sa.literal(",").concat(sa.func.substr(table.c.metadata, 2))
    return sa.func.replace(pairs, "," + written({key: value})[1:-1], "") != pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionKeeper:
    """Keeps one completion when it has ended.

    Attributes:
        id: What the reply is called: unlike any other, whatever name the client chose for the request.
        messages: The request's, JSON.
    """

    store: CompletionStore
    owner: str
    id: str
    metadata: Mapping[str, str]
    messages: bytes

    async def finish(self, body: bytes, model: str) -> bool:
        """Keep the reply; where that is not possible, it is given out all the same, and the log says so."""
        try:
            await self.store.put(self.owner, self.id, model, self.metadata, body, self.messages)
        except errors.ServiceError as error:
            logger.warning("Chat completion %s could not be stored: %s", self.id, error)
            return False
        return True


class _Messages(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw(b"[]")


def messages_of(raw: bytes) -> bytes:
    """Return the `messages` of a request's body as they stand there; none where its API has no such field."""
    return bytes(msgspec.json.decode(raw, type=_Messages).messages)
