"""A package's API as the server calls it: results are checked, and what does not end is ended, by name.

Readers and writers of built-in APIs are called directly; this costs their requests nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import msgspec

from dovetail.contracts.api import Api, Route, View
from dovetail.contracts.errors import PluginError
from dovetail.contracts.replies import Failure, Reply, StepView, Writer
from dovetail.contracts.requests import Request
from dovetail_server.apis.watch import WATCH
from dovetail_server.error_body import ErrorBody, ErrorDetail

logger = logging.getLogger("dovetail.server")
T = TypeVar("T")


class Guarded(Api):
    """Calls another API."""

    def __init__(self, api: Api, who: str, routes: Sequence[Route | View]) -> None:
        """Take an API.

        Args:
            api: A package's.
            who: Plugin and package, for messages.
            routes: What it returned, checked.
        """
        self.who = who
        self.owns = tuple(api.owns)  # type: ignore[misc]  # an instance's own: the class is everybody's
        self._failed = api.failed
        self._routes = tuple(_route(route, f"{who}: {route.path}") for route in routes)

    def __str__(self) -> str:
        """Return plugin and package."""
        return self.who

    def routes(self) -> Sequence[Route | View]:
        """Return its routes."""
        return self._routes

    def failed(self, failure: Failure, request_id: str | None) -> tuple[int, Any]:
        """Return an error in its words."""
        return called(f"{self.who}: failed()", self._failed, failure, request_id)


def called(what: str, call: Callable[..., T], *args: Any) -> T:
    """Call a package's code.

    Raises:
        PluginError: It does not end, or ends the process.
        Exception: What it raises.
    """
    try:
        return WATCH.run(what, call, *args)
    except SystemExit as error:
        raise PluginError(
            f"{what} called sys.exit({error.code!r}); raise RequestError for what is not served"
        ) from None


def _route(route: Route | View, where: str) -> Route | View:
    if isinstance(route, View):
        return replace(route, show=lambda facts, body: called(f"{where}: show()", route.show, facts, body))
    named = {"where": f"{where}: {route.writer.__qualname__}"}
    writer = type(route.writer.__name__, (_Checked, route.writer), named)

    def read(body: Any) -> Request | list[Request]:
        made = called(f"{where}: read()", route.read, body)
        for request in made if isinstance(made, list) else (made,):
            for pattern in request.names.renamed if isinstance(request, Request) else ():
                check_pattern(where, pattern)
        return made

    return replace(route, read=read, writer=writer)


@lru_cache(256)
def check_pattern(where: str, pattern: str) -> None:
    """Refuse what refusals could not be worded with.

    Raises:
        PluginError: It is no regular expression.
    """
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        text = f"{where}: Names.renamed has {pattern!r}, which is no regular expression ({error}); correct it"
        raise PluginError(text) from None


class _Checked(Writer):
    """Stands before a package's writer, whose methods return bytes."""

    where: ClassVar[str]

    def __init__(self, reply: Reply) -> None:
        called(f"{self.where}()", super().__init__, reply)

    def open(self) -> bytes:
        return self._bytes("open", super().open)

    def step(self, steps: Sequence[StepView]) -> bytes:
        return self._bytes("step", super().step, steps)  # type: ignore[safe-super]  # the package's

    def close(self) -> bytes:
        return self._bytes("close", super().close)

    def take(self, steps: Sequence[StepView]) -> None:
        called(f"{self.where}.take()", super().take, steps)

    def whole(self) -> bytes:
        made = self._bytes("whole", super().whole)  # type: ignore[safe-super]
        if not made:
            raise PluginError(f"{self.where}.whole() returned nothing; possible: JSON as bytes")
        return made

    def fail(self, failure: Failure) -> bool:
        return bool(called(f"{self.where}.fail()", super().fail, failure))

    @classmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        try:
            made = called(f"{cls.where}.failed()", super().failed, failure, request_id)
            return _checked(f"{cls.where}.failed()", made)
        except Exception:
            logger.exception("%s.failed() cannot tell of an error", cls.where)
        detail = ErrorDetail(message=failure.message, type=failure.kind, param=failure.param, code=failure.code)
        told = msgspec.json.encode(ErrorBody(detail))
        return b"event: error\ndata: " + told + b"\n\n" if cls.media_type == Writer.media_type else told + b"\n"

    def _bytes(self, name: str, call: Callable[..., bytes], *args: Any) -> bytes:
        what = f"{self.where}.{name}()"
        return _checked(what, called(what, call, *args))


def _checked(what: str, made: Any) -> bytes:
    if not isinstance(made, bytes):
        raise PluginError(f"{what} returned {type(made).__name__}; possible: bytes")
    return made
