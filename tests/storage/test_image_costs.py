"""What images of stored objects cost the database, which has one writer for whom all others wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from dovetail_server.settings.serve import ServeSettings
from dovetail_server.storage.completions import CompletionStore
from dovetail_server.storage.database import connect, database_url, migrate
from dovetail_server.storage.images import MIN_BYTES
from dovetail_server.storage.paths import StoragePaths

Statement = tuple[str, Any]


def messages(num: int, name: str = "") -> bytes:
    return json.dumps([f"data:{name}{at:06d}{'x' * MIN_BYTES}" for at in range(num)]).encode()


def statements(folder: Path, work: Callable[[CompletionStore, list[Statement]], Awaitable[None]]) -> list[Statement]:
    """Run work on an empty database, and return what was executed since it last cleared the list."""
    seen: list[Statement] = []

    async def run() -> None:
        url = database_url(None, folder)
        migrate(url, StoragePaths(folder))
        database = connect(url)

        @sa.event.listens_for(database.engine.sync_engine, "before_cursor_execute")
        def note(_: Any, __: Any, statement: str, values: Any, *___: Any) -> None:
            seen.append((statement, values))

        try:
            await work(CompletionStore(ServeSettings(file_storage_path=folder), database), seen)
        finally:
            await database.close()

    asyncio.run(run())
    return seen


def test_a_body_of_many_short_urls_is_stored_in_few_statements(tmp_path: Path) -> None:
    """Their number is that of one URL's: 32 MiB of them held up all who write for half a minute."""

    async def work(store: CompletionStore, seen: list[Statement]) -> None:
        given = messages(1000)
        await store.put("alice", "many", "m", {}, b"{}", given)
        assert await store.messages("alice", "many") == given
        seen.clear()
        await store.put("alice", "more", "m", {}, b"{}", messages(1000, "more"))

    assert 0 < len(statements(tmp_path, work)) < 10


def test_what_is_deleted_alone_is_looked_for(tmp_path: Path) -> None:
    """Not all images that anybody has stored, for each deletion."""

    async def work(store: CompletionStore, seen: list[Statement]) -> None:
        await store.put("alice", "one", "m", {}, b"{}", messages(3))
        await store.put("alice", "two", "m", {}, b"{}", messages(2))
        await store.put("bob", "his", "m", {}, b"{}", messages(3))
        seen.clear()
        await store.delete("alice", "one")
        [(deletion, values)] = [one for one in seen if one[0].startswith("DELETE FROM stored_images")]
        async with store.database.read() as db:
            plan = (await db.exec_driver_sql(f"EXPLAIN QUERY PLAN {deletion}", values)).all()
            assert plan[0].detail.startswith("SEARCH stored_images USING"), plan
            left = (await db.execute(sa.text("SELECT owner, count(*) FROM stored_images GROUP BY owner"))).all()
        assert [tuple(row) for row in left] == [("alice", 2), ("bob", 3)]

    statements(tmp_path, work)
