"""The database's end: nothing works for it any more, whatever was cut off and how often."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from dovetail_server.batches.lazy import LazyStorage
from dovetail_server.errors.catalogue import ServiceError
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.storage.database import Database, connect, database_url
from dovetail_server.supervision.supervisor import Supervisor

SLOW = sa.text(
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000) SELECT count(*) FROM n"
)
CUTS = 4
"""A request is cancelled when its client leaves, again as the server stops, and once more with the event loop."""


OTHERS = set[threading.Thread]()


@pytest.fixture(autouse=True)
def other_threads() -> None:
    """Servers of other files' tests have databases of their own, in this process."""
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def threads() -> list[threading.Thread]:
    """Those that work for this test's connections to SQLite."""
    found = [thread for thread in threading.enumerate() if "_connection_worker_thread" in thread.name]
    return [thread for thread in found if thread not in OTHERS]


def opened(tmp_path: Path) -> Database:
    return connect(database_url(None, tmp_path))


async def count(database: Database) -> None:
    async with database.read() as connection:
        await connection.execute(SLOW)


async def write(database: Database) -> None:
    async with database.write() as connection:
        await connection.execute(sa.text("CREATE TABLE IF NOT EXISTS n (i INTEGER)"))
        await connection.execute(SLOW)


@pytest.mark.parametrize("num_rounds", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("work", [count, write])
def test_a_closed_database_has_no_thread(
    tmp_path: Path, work: Callable[[Database], Awaitable[None]], num_rounds: int
) -> None:
    """Not even if what used it was cancelled again and again, as it connected, asked, or gave its connection back."""

    async def run() -> None:
        database = opened(tmp_path)
        tasks = [asyncio.ensure_future(work(database)) for _ in range(3)]
        for _ in range(num_rounds):
            await asyncio.sleep(0.002)
        for _ in range(CUTS):
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
        await database.close()
        assert not threads()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert not threads()


def test_what_is_under_way_ends_before_the_database_does(tmp_path: Path) -> None:
    """It is awaited; what comes later is told that the server is stopping."""

    async def run() -> None:
        database = opened(tmp_path)
        task = asyncio.ensure_future(write(database))
        while not threads():
            await asyncio.sleep(0.001)
        await database.close()
        assert task.done()
        await task
        with pytest.raises(ServiceError, match="shutting down"):
            await count(database)
        with pytest.raises(ServiceError, match="shutting down"):
            await write(database)
        assert not threads()

    asyncio.run(run())


class Slow:
    """A storage that takes a while to open."""

    problem = None

    def __init__(self) -> None:
        self.did: list[str] = []

    async def start(self) -> None:
        self.did.append("start")
        await asyncio.sleep(0.05)
        self.did.append("started")

    async def close(self) -> None:
        self.did.append("close")

    async def abandon(self) -> None:
        self.did.append("abandon")


@pytest.mark.parametrize("num_rounds", [0, 1, 3, 20])
def test_who_leaves_does_not_end_the_opening(tmp_path: Path, num_rounds: int) -> None:
    """It is opened once, for those who wait on; the end of the server waits until it can be closed."""

    async def run() -> None:
        made: list[Slow] = []

        def prepare() -> Slow:
            made.append(Slow())
            return made[-1]

        storage = LazyStorage(ServeSettings(file_storage_path=tmp_path), Supervisor(), prepare)
        leaves, stays = (asyncio.ensure_future(storage.get()) for _ in range(2))
        for _ in range(num_rounds):
            await asyncio.sleep(0.001)
        leaves.cancel()
        assert await stays is made[0]
        await storage.close()
        assert [service.did for service in made] == [["start", "started", "close"]]
        with pytest.raises(ServiceError, match="shutting down"):
            await storage.get()

    asyncio.run(run())


def test_the_end_waits_for_an_opening_that_nobody_waits_for(tmp_path: Path) -> None:
    """What was being opened for a request that was cut off is closed, not left."""

    async def run() -> None:
        service = Slow()
        storage = LazyStorage(ServeSettings(file_storage_path=tmp_path), Supervisor(), lambda: service)
        asking = asyncio.ensure_future(storage.get())
        while not service.did:
            await asyncio.sleep(0.001)
        asking.cancel()
        await storage.close()
        assert service.did == ["start", "started", "close"]

    asyncio.run(run())
