"""Opening the database: SQLite in WAL mode beside the files, or PostgreSQL by URL."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from weakref import WeakSet

import aiosqlite
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from dovetail.base.distribution import install_extra
from dovetail.contracts.errors import ConfigError
from dovetail_server.errors.catalogue import ServiceError, draining
from dovetail_server.storage.disk import touch, waiting_lock
from dovetail_server.storage.paths import DATABASE, StoragePaths
from dovetail_server.storage.paths import MIGRATION_LOCK as MIGRATION_LOCK_FILE
from dovetail_server.storage.tables import metadata

logger = logging.getLogger("dovetail.server")
BUSY_S = 5.0
CLOSE_S = 5.0
"""Time for what is under way to end before connections are closed below it."""
MIGRATIONS = Path(__file__).parent / "migrations"
UNIX_DAY = 2440587.5
"""1970-01-01, as Julian days count."""
PG_OPTIONS = "-c lock_timeout=10s -c idle_in_transaction_session_timeout=60s"
"""Nobody waits without end for a server that stands still in the middle of a transaction."""
MIGRATION_LOCK, FILES_LOCK, LINES_LOCK, IMAGES_LOCK = range(0x646F7665, 0x646F7669)


def unavailable(error: Exception) -> ServiceError:
    """Return the error for a database that cannot be used now; the same request may succeed later."""
    cause = getattr(error, "orig", None) or error
    reason = " ".join(str(cause).split())[:200] or type(cause).__name__
    full = "full" in reason.lower()
    text = f"the database of files and batches cannot be used now: {reason}"
    code = "insufficient_storage" if full else "storage_unavailable"
    return ServiceError(text, code=code, status=507 if full else 503, retry_after_s=5)


class Database:
    """Connections for reading, and transactions for writing, one at a time on SQLite."""

    def __init__(self, engine: AsyncEngine, threads: Collection[Thread] = ()) -> None:
        """Wrap an engine whose database is migrated; `threads` are those of its connections."""
        self.engine = engine
        self._threads = threads
        self.is_sqlite = engine.dialect.name == "sqlite"
        self._writer = asyncio.Lock()
        self._num_blocks = 0
        self._is_closed = False

    def insert_once(self, table: sa.Table, *key: str) -> sa.Insert:
        """Return an insertion into a table with a key, by default `id`, which leaves a row alone that is there.

        A reply that is made again on another server has the identifier that it had on the first, which may have
        written it.
        """
        insert = sqlite.insert if self.is_sqlite else postgresql.insert
        return insert(table).on_conflict_do_nothing(index_elements=key or ("id",))

    def now(self) -> sa.ColumnElement[float]:
        """Return the time as the database has it, in seconds: the clocks of servers may differ and jump."""
        if self.is_sqlite:
            return (sa.func.julianday("now", type_=sa.Float) - UNIX_DAY) * 86400.0
        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Float)

    def stamp(self, later_s: int = 0) -> sa.ColumnElement[int]:
        """Return `now`, or so much later, in whole seconds."""
        return sa.cast(sa.func.round(self.now() - 0.5), sa.BigInteger) + later_s

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection for queries.

        Raises:
            ServiceError: The database is locked, full, unreachable or closed.
        """
        with self._block():
            async with self.engine.connect() as connection:
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that is committed at the block's end.

        Raises:
            ServiceError: The database is locked, full, unreachable or closed; nothing was written.
        """
        with self._block():
            if not self.is_sqlite:
                async with self.engine.begin() as connection:
                    yield connection
                return
            async with self._writer, self.engine.connect() as plain:
                connection = await plain.execution_options(dovetail_write=True)
                async with connection.begin():
                    yield connection

    async def alone(self, db: AsyncConnection, lock: int) -> None:
        """Let no other transaction that asks for `lock` go on before this one, of `write`, has ended.

        So what is added up in it is still true when it is committed. SQLite has one writer in any case.
        """
        if not self.is_sqlite:
            await db.execute(sa.select(sa.func.pg_advisory_xact_lock(lock)))

    @contextmanager
    def _block(self) -> Iterator[None]:
        """Count a block that uses the database, and turn its errors into ours."""
        if self._is_closed:
            raise draining()
        self._num_blocks += 1
        try:
            yield
        except (DBAPIError, PoolTimeoutError, OSError) as error:
            raise translate(error) from error
        finally:
            self._num_blocks -= 1

    async def close(self) -> None:
        """Close all connections, once what is under way has ended; nothing new begins.

        A query that was cancelled goes on in the thread of its connection, and would tell an event loop that may be
        closed by then: the threads are awaited, too.
        """
        self._is_closed = True
        deadline = time.monotonic() + CLOSE_S
        while (self._num_blocks or self._num_lent()) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await self.engine.dispose()
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if late := max(self._num_blocks, sum(thread.is_alive() for thread in self._threads)):
            logger.warning("The database was closed below %d queries that did not end within %g s.", late, CLOSE_S)

    def _num_lent(self) -> int:
        pool = self.engine.pool
        return pool.checkedout() if isinstance(pool, sa.QueuePool) else 0


def translate(error: Exception) -> Exception:
    """Turn what is the database's fault into ours; a mistake in a statement stays what it is."""
    if isinstance(error, OperationalError | InterfaceError | PoolTimeoutError | OSError):
        return unavailable(error)
    return error


def database_url(url: str | None, folder: Path) -> str:
    """Return the URL to open; `url` is that of `--database-url`.

    Raises:
        ConfigError: Another kind of database, or one whose driver is not installed.
    """
    if url is None:
        return f"sqlite+aiosqlite:///{folder / DATABASE}"
    if not url.startswith("postgresql+psycopg://"):
        kind = url.split(":", 1)[0]
        raise ConfigError(f"--database-url: {kind!r} is not supported; give postgresql+psycopg://user@host/name")
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise ConfigError(f"--database-url: psycopg is not installed; {install_extra('postgres')}") from None
    return url


def connect(url: str) -> Database:
    """Open a migrated database."""
    if url.startswith("postgresql"):
        return Database(
            create_async_engine(
                url, pool_pre_ping=True, pool_size=8, pool_timeout=BUSY_S, connect_args={"options": PG_OPTIONS}
            )
        )
    threads = WeakSet[Thread]()

    def open_file(*args: Any, **options: Any) -> aiosqlite.Connection:
        connection = aiosqlite.connect(*args, **options)
        connection._thread.daemon = True  # as SQLAlchemy has it, for connections that it opens itself
        threads.add(connection._thread)
        return connection

    options = {"timeout": BUSY_S, "async_creator_fn": open_file}
    engine = create_async_engine(url, connect_args=options, pool_size=8, pool_timeout=BUSY_S * 2)
    sa.event.listen(engine.sync_engine, "connect", set_up_sqlite)
    sa.event.listen(engine.sync_engine, "begin", begin_sqlite)
    return Database(engine, threads)


def set_up_sqlite(connection: Any, record: object) -> None:
    """Configure a new connection; a commit is on disk when it returns."""
    connection.isolation_level = None  # transactions are begun below, not by the driver
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={int(BUSY_S * 1000)}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def begin_sqlite(connection: sa.Connection) -> None:
    """Begin a transaction; one that will write takes the lock at once, so that it never has to be repeated."""
    is_write = connection.get_execution_options().get("dovetail_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")


def migrate(url: str, layout: StoragePaths) -> None:
    """Bring the tables up to date; called in a worker thread.

    Raises:
        ServiceError: The database cannot be used.
    """
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    engine = sa.create_engine(url.replace("sqlite+aiosqlite:", "sqlite:"))
    try:
        with waiting_lock(layout.folder / MIGRATION_LOCK_FILE):
            if engine.dialect.name == "sqlite":
                touch(layout.database)  # SQLite's own mode would follow the umask; its journals take that of the file
            run_migrations(engine, config)
    except CommandError as error:
        text = f"another version made the database of files and batches: {error}; start that one, or take an empty one"
        raise ServiceError(text, code="storage_unavailable", status=503) from error
    except (SQLAlchemyError, OSError) as error:
        raise unavailable(error) from error
    finally:
        engine.dispose()


def run_migrations(engine: sa.Engine, config: Config) -> None:
    """Make the tables in a new database; bring those of an older one up to date."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(MIGRATION_LOCK)))
        else:
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # else each table would be committed by itself
        config.attributes["connection"] = connection
        if sa.inspect(connection).has_table("alembic_version"):
            command.upgrade(config, "head")
        else:
            metadata.create_all(connection)
            command.stamp(config, "head")
