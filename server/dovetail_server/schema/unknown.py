"""Fields that no schema and no dialect knows: refused, or with `--unknown-fields warn` left out and counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from threading import Lock

from starlette.types import ASGIApp, Receive, Scope, Send

from dovetail_server.compat.fields import ELSEWHERE, OURS, refusal

logger = logging.getLogger("dovetail.server")
MAX_NAMES = 100
"""Names that are counted one by one; a client chooses them, so the label of the metric needs a bound."""
MAX_OF_BODY = 16
MAX_CHARS = 64
OTHER = "other"


class UnknownFields:
    """How often each unknown field was left out, of one server. Bodies are read in threads, so it has a lock."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self._lock = Lock()
        self._counts: Counter[str] = Counter()

    def count(self, name: str) -> None:
        """Count a body with this field; the first of each name is logged."""
        with self._lock:
            is_new = name not in self._counts
            if is_new and len(self._counts) >= MAX_NAMES:
                name = OTHER
            self._counts[name] += 1
        if is_new and name != OTHER:
            logger.warning("The unknown field %r is left out of requests (--unknown-fields warn).", name)

    def counted(self) -> dict[str, int]:
        """Return the counts."""
        with self._lock:
            return dict(self._counts)


class LeftOut:
    """The unknown fields of one body, each counted once, however often the body is read."""

    def __init__(self, count: Callable[[str], None]) -> None:
        """Begin with none; `count` is told each name."""
        self._count = count
        self.names: dict[str, None] = {}

    def add(self, names: Iterable[str]) -> None:
        """Note that these fields were left out. Beyond `MAX_OF_BODY` they are counted together."""
        for name in names:
            name = name[:MAX_CHARS] if len(self.names) < MAX_OF_BODY else OTHER
            if name not in self.names:
                self.names[name] = None
                self._count(name)
            if name == OTHER:
                return


LEFT_OUT: ContextVar[LeftOut | None] = ContextVar("left_out", default=None)
"""Of the body that is read; None where unknown fields are refused."""


class LeavesOut:
    """ASGI layer of `--unknown-fields warn`."""

    def __init__(self, app: ASGIApp, fields: UnknownFields) -> None:
        """Wrap `app`."""
        self.app, self.fields = app, fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, whose body may have unknown fields."""
        LEFT_OUT.set(LeftOut(self.fields.count))
        await self.app(scope, receive, send)


def left_out(unknown: list[str]) -> list[str]:
    """Return which of the fields that a schema does not have are refused, and note the others as left out.

    A field that other servers know is refused all the same: it would have changed the reply.
    """
    noted = LEFT_OUT.get()
    if noted is None:
        return unknown
    noted.add(name for name in unknown if not is_known(name))
    return [name for name in unknown if is_known(name)]


def is_known(name: str) -> bool:
    """Whether a field means something to another server, or on another route."""
    return name in ELSEWHERE or name in OURS or refusal(name) is not None
