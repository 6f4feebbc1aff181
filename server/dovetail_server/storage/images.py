"""Images in what is stored: each once for its owner, by content, however many responses and turns have it.

In the JSON of a row, a `data:` URL is replaced by a mark and the digest of its text. `stored_images` has the text, and
`image_uses` a row for each place that has it. An image goes in the transaction in which its last use goes. Owners share
nothing, so nobody learns from a size or a time what another has stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from dovetail.contracts.errors import RequestError
from dovetail_server.storage.database import IMAGES_LOCK, Database
from dovetail_server.storage.tables import image_uses as uses
from dovetail_server.storage.tables import stored_images as images

Kind = Literal["response", "completion", "conversation"]
START, END = b'"data:', b'"'
MIN_BYTES = 1024
"""What is shorter stays where it is."""
MARK = b"\x01"
"""No JSON text has it: control characters are escaped there."""
_PLACE = re.compile(rb'"\x01([0-9a-f]{64})"')
IN_THREAD = 1 << 18
"""Bytes from which on a thread looks for images."""
AT_ONCE = 500


def packed(data: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return JSON with digests in place of its `data:` URLs, and these with their quotation marks, by digest."""
    found: dict[str, bytes] = {}
    parts: list[bytes] = []
    done = at = 0
    if MARK in data:
        return data, found
    while (at := data.find(START, at)) >= 0:
        end = data.find(END, at + len(START)) + 1
        if not end:
            break
        if end - at >= MIN_BYTES:
            text = data[at:end]
            digest = hashlib.sha256(text).hexdigest()
            found[digest] = text
            parts += (data[done:at], b'"', MARK, digest.encode(), b'"')
            done = end
        at = end
    return (b"".join((*parts, data[done:])), found) if found else (data, found)


def digests_in(data: bytes) -> set[str]:
    """Return the digests that stand in packed JSON."""
    return {digest.decode() for digest in _PLACE.findall(data)} if MARK in data else set()


def unpacked(data: bytes, known: Mapping[str, bytes]) -> bytes:
    """Undo `packed`."""
    return _PLACE.sub(lambda found: known[found[1].decode()], data) if MARK in data else data


class StoredImages:
    """The tables `stored_images` and `image_uses`, as one kind of stored object uses them, in its transactions.

    `add` and `drop` come last in a transaction: they take a lock, and who holds it waits for no other row.
    """

    def __init__(self, database: Database, kind: Kind, holders: sa.Table) -> None:
        """Wrap an open database; `holders` is the table of what has the images, whose key is `id`."""
        self._database, self._kind, self._holders = database, kind, holders

    async def pack(self, data: bytes) -> tuple[bytes, dict[str, bytes]]:
        """As `packed`, beside the event loop where that takes long."""
        return packed(data) if len(data) < IN_THREAD else await asyncio.to_thread(packed, data)

    async def add(
        self, db: AsyncConnection, owner: str, holder: str, found: Mapping[str, bytes], part: str = ""
    ) -> None:
        """Note that a part of something has images, and keep those that are new.

        Args:
            db: A transaction.
            owner: Whose they are.
            holder: What has them.
            found: What `packed` returned.
            part: Which part of that.
        """
        await self.add_parts(db, owner, holder, {part: found})

    async def add_parts(
        self, db: AsyncConnection, owner: str, holder: str, parts: Mapping[str, Mapping[str, bytes]]
    ) -> None:
        """Do the same for several parts, in no more statements: a body may have any number of short `data:` URLs."""
        used = [
            {"owner": owner, "kind": self._kind, "holder": holder, "part": part, "digest": digest}
            for part, found in parts.items()
            for digest in found
        ]
        if not used:
            return
        texts = {digest: text for found in parts.values() for digest, text in found.items()}
        rows = [{"owner": owner, "digest": digest, "data": text} for digest, text in texts.items()]
        await self._database.alone(db, IMAGES_LOCK)  # nobody takes an image for unused meanwhile
        await db.execute(self._database.insert_once(images, "owner", "digest"), rows)
        await db.execute(self._database.insert_once(uses, "kind", "holder", "part", "digest"), used)

    async def restored(self, db: AsyncConnection, owner: str, data: Sequence[bytes]) -> list[bytes]:
        """Return packed JSON as it came.

        Raises:
            RequestError: An image was deleted since the JSON was read, and so was what had it.
        """
        wanted = sorted(set().union(*map(digests_in, data)))
        known: dict[str, bytes] = {}
        for at in range(0, len(wanted), AT_ONCE):
            where = images.c.owner == owner, images.c.digest.in_(wanted[at : at + AT_ONCE])
            rows = await db.execute(sa.select(images.c.digest, images.c.data).where(*where))
            known.update({str(row[0]): bytes(row[1]) for row in rows})
        if len(known) < len(wanted):
            text = "an image of this was deleted meanwhile; send it again"
            raise RequestError(text, code="image_not_found", status=404)
        return [unpacked(bytes(one), known) for one in data]

    async def drop(self, db: AsyncConnection, holders: Collection[str] | None = None, part: str | None = None) -> None:
        """Forget uses, and images that have none left.

        Args:
            db: The transaction in which what has them goes.
            holders: What goes; None: all that is not in its table any more.
            part: Only this part of it.
        """
        where = [uses.c.kind == self._kind]
        if holders is None:
            where.append(uses.c.holder.not_in(sa.select(self._holders.c.id)))
        else:
            where.append(uses.c.holder.in_(holders))
        if part is not None:
            where.append(uses.c.part == part)
        if (await db.execute(sa.select(uses.c.digest).where(*where).limit(1))).first() is None:
            return
        await self._database.alone(db, IMAGES_LOCK)
        gone: dict[str, list[str]] = {}
        for row in (await db.execute(sa.select(uses.c.owner, uses.c.digest).where(*where).distinct())).all():
            gone.setdefault(str(row.owner), []).append(str(row.digest))
        await db.execute(sa.delete(uses).where(*where))
        used = sa.exists().where(uses.c.owner == images.c.owner, uses.c.digest == images.c.digest)
        for owner, digests in gone.items():  # these alone: all that is stored, of everybody, may be any number
            for at in range(0, len(digests), AT_ONCE):
                some = images.c.owner == owner, images.c.digest.in_(digests[at : at + AT_ONCE])
                await db.execute(sa.delete(images).where(*some, sa.not_(used)))
