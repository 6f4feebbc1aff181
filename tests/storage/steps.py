"""Every call that storage makes to the disk and the database, so that a test can fail one of them, or stop there."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa

from dovetail_server.storage import disk

CALLS = frozenset(
    {
        *("open", "close", "fsync", "replace", "link", "unlink", "rmdir", "mkdir", "listdir", "stat", "statvfs"),
        *("pread", "ftruncate", "fdopen"),
    }
)
Act = Callable[[str], None]


class Steps:
    """Names each call as it comes: `disk fsync publish`, `db UPDATE batches SET status`, `db COMMIT after …`."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.act: Act | None = None
        self._site = ""
        self._left = 0
        self._lock = threading.Lock()

    def arm(self, site: str, act: Act, occurrence: int = 1) -> None:
        """Do something at a call of this name, counted from now."""
        with self._lock:
            self._site, self._left, self.act = site, occurrence, act

    def disarm(self) -> None:
        with self._lock:
            self.act = None

    @property
    def is_armed(self) -> bool:
        return self.act is not None

    def note(self, site: str) -> None:
        """Called at each."""
        with self._lock:
            self.seen[site] += 1
            if self.act is None or site != self._site:
                return
            self._left -= 1
            if self._left > 0:
                return
            act, self.act = self.act, None
        act(site)


class WatchedFile:
    """An open file whose reads and writes are steps."""

    def __init__(self, file: Any, steps: Steps, place: str) -> None:
        self._file = file
        self._steps = steps
        self._place = place

    def __getattr__(self, name: str) -> Any:
        if name in ("write", "flush", "read", "readline"):
            self._steps.note(f"disk {name} {self._place}")
        return getattr(self._file, name)

    def __enter__(self) -> WatchedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class WatchedOs:
    """`os` as `disk` uses it."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name not in CALLS:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            place = calling()
            if name == "fdopen":
                return WatchedFile(found(*args, **kwargs), self._steps, place)
            if name == "close":
                found(*args, **kwargs)  # a close that fails has closed all the same
                return self._steps.note(f"disk close {place}")
            self._steps.note(f"disk {name} {place}")
            return found(*args, **kwargs)

        return call


def calling() -> str:
    import sys

    return sys._getframe(2).f_code.co_name


@contextlib.contextmanager
def watched_disk(steps: Steps) -> Iterator[None]:
    disk.os = WatchedOs(steps)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        disk.os = os  # type: ignore[attr-defined]


def watch_database(engine: Any, steps: Steps) -> None:
    """Make every statement and commit of an engine a step; a commit also one after it has counted."""
    sync, last = engine.sync_engine, {}
    commit = sync.dialect.do_commit

    def execute(cursor: Any, statement: str, parameters: Any, context: Any) -> None:
        last[id(context.root_connection.connection.dbapi_connection)] = name = shortened(statement)
        steps.note(f"db {name}")

    def do_commit(connection: Any) -> None:
        name = last.get(id(getattr(connection, "dbapi_connection", connection)), "nothing")
        steps.note(f"db COMMIT after {name}")
        commit(connection)
        steps.note(f"db COMMITTED after {name}")

    sa.event.listen(sync, "do_execute", execute)
    sa.event.listen(sync, "do_executemany", execute)
    sync.dialect.do_commit = do_commit


def shortened(statement: str) -> str:
    """Enough of a statement to tell it from others."""
    words = " ".join(statement.split())
    for mark in ("SELECT ",):
        if words.startswith(mark) and " FROM " in words:
            head, _, tail = words.partition(" FROM ")
            return f"{head[:30]} FROM {tail[:50]}"
    return words[:70]
