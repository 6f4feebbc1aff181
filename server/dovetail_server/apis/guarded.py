"""A package's API as the server calls it: results are checked, and what does not end is ended, by name.

Readers and writers of built-in APIs are called directly; this costs their requests nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from dovetail.contracts.api import Api, Route, ServerFacts, View
from dovetail.contracts.errors import PluginError, RequestError
from dovetail.contracts.replies import ChoiceView, Failure, Reply, StepView, Writer
from dovetail.contracts.requests import JsonObject, Request
from dovetail.processing.checked import checked
from dovetail.text.inline import InlineCostError
from dovetail_server.apis.watch import WATCH, Interruption
from dovetail_server.errors.body import ErrorBody, ErrorDetail

logger = logging.getLogger("dovetail.server")
T = TypeVar("T")
MAX_PIECE = 1 << 26
"""Bytes that a writer may return at once: with each part that a client takes, the transport moves all that is left."""


class _Refusal(msgspec.Struct):
    """What a `RequestError` consists of, once it is no class of ours."""

    message: str
    param: str | None
    code: str | None
    status: Annotated[int, msgspec.Meta(ge=400, le=599)]


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
        what = f"{self.who}: failed()"
        return called(what, _error, what, self._failed, failure, request_id)


def watch(apis: Sequence[Api]) -> None:
    """End calls of packages' code that do not end from now on, if there is a package."""
    if any(isinstance(api, Guarded) for api in apis):
        WATCH.start()


def called(what: str, call: Callable[..., T], *args: Any) -> T:
    """Call a package's code.

    Raises:
        RequestError: It refuses what it was given.
        PluginError: It does not end, or raises anything else, perhaps what would end a process, a task or a loop.
        InlineCostError: See `Watch.run`.
    """
    try:
        return WATCH.run(what, call, *args)
    except (Interruption, InlineCostError):
        raise
    except RequestError as error:
        raise _sound(what, error) from error.__cause__
    except BaseException as error:
        if isinstance(error, PluginError) and str(error).startswith(what):
            raise
        if isinstance(error, MemoryError) and WATCH.give_up is not None:
            raise  # the bound of a process that reads a body, which its reply names
        text = f"{what} raised {type(error).__name__}; possible: RequestError for what is not served"
        raise PluginError(text) from error


def _sound(what: str, error: RequestError) -> RequestError | PluginError:
    """Return a package's refusal, or why it is none that a client could be sent."""
    given = {name: getattr(error, name, None) for name in _Refusal.__struct_fields__}
    try:
        msgspec.convert(given, _Refusal)
        msgspec.json.encode(given)
    except (TypeError, ValueError) as wrong:
        return PluginError(f"{what} raised a RequestError that cannot be told: {wrong}")
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedRoute(Route):
    """A package's route. `where` it is, for messages."""

    where: str


def _route(route: Route | View, where: str) -> GuardedRoute | View:
    given = {field.name: getattr(route, field.name) for field in fields(View if isinstance(route, View) else Route)}
    if isinstance(route, View):
        show = route.show
        given["show"] = lambda facts, body: called(f"{where}: show()", _shown, where, show, facts, body)
        return View(**given)  # no class of the package's
    named = {"where": f"{where}: {route.writer.__qualname__}"}
    writer = called(f"{where}: a class made of {route.writer.__qualname__}", _subclass, route.writer, named)

    def read(body: Any) -> list[Request]:
        made = checked(called(f"{where}: read()", route.read, body), f"{where}: read()")
        if route.only_streams and not made[0].stream:
            text = f"{where}: read() returned a Request whose stream is False; possible: True (only_streams)"
            raise PluginError(text)
        return made

    return GuardedRoute(**given | {"read": read, "writer": writer, "where": where})


def _subclass(writer: type[Writer], named: dict[str, Any]) -> type[Writer]:
    return type(writer.__name__, (_Checked, writer), named)


def _shown(where: str, show: Callable[..., Any], facts: ServerFacts, body: JsonObject) -> Any:
    """Return what a view shows, as JSON.

    Raises:
        PluginError: It is no object, or none of plain values.
    """
    made = show(facts, body)
    if not isinstance(made, Mapping):
        raise PluginError(f"{where}: show() returned {type(made).__name__}; possible: a dict of plain values")
    return _encoded(f"{where}: show()", made)


def _error(what: str, failed: Callable[..., Any], failure: Failure, request_id: str | None) -> tuple[Any, msgspec.Raw]:
    """Return status and body of an error, the body as JSON.

    Raises:
        PluginError: They are not two, or the body is none of plain values.
    """
    made = failed(failure, request_id)
    if not isinstance(made, tuple) or len(made) != 2:
        raise PluginError(f"{what} returned {type(made).__name__}; possible: a status and a body of plain values")
    return made[0], _encoded(what, made[1])


def _encoded(what: str, made: Any) -> msgspec.Raw:
    try:
        data = msgspec.json.encode(made)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise PluginError(f"{what} returned what JSON cannot say: {error}") from None
    return msgspec.Raw(_checked(what, data))


class _Choice:
    """A choice as a package's writer is given it: to be read, for the server goes on with it."""

    __slots__ = ("_choice",)

    def __init__(self, choice: ChoiceView) -> None:
        object.__setattr__(self, "_choice", choice)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._choice, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a choice is not a writer's to set")


class _Checked(Writer):
    """Stands before a package's writer, whose methods return bytes; the reply it is given is a copy."""

    where: ClassVar[str]

    def __init__(self, reply: Reply) -> None:
        """Begin; in a thread, where a call that sleeps cannot be ended, wait for the first call on the event loop."""
        self._servers, self._has_begun = reply, False
        self._choices: tuple[Any, ...] = tuple(_Choice(choice) for choice in reply.choices)
        self._given = replace(reply, choices=self._choices, requests=tuple(reply.requests))
        if WATCH.is_timed_here():
            self._begin()

    def _begin(self) -> None:
        self._given.is_kept = self._servers.is_kept
        if not self._has_begun:
            self._has_begun = True
            called(f"{self.where}()", super().__init__, self._given)

    def open(self) -> bytes:
        return self._bytes("open", super().open)

    def step(self, steps: Sequence[StepView]) -> bytes:
        return self._bytes("step", super().step, self._read_only(steps))  # type: ignore[safe-super]  # the package's

    def close(self) -> bytes:
        return self._bytes("close", super().close)

    def take(self, steps: Sequence[StepView]) -> None:
        self._begin()
        called(f"{self.where}.take()", super().take, self._read_only(steps))

    def whole(self) -> bytes:
        made = self._bytes("whole", super().whole)  # type: ignore[safe-super]
        if not made:
            raise PluginError(f"{self.where}.whole() returned nothing; possible: JSON as bytes")
        return made

    def fail(self, failure: Failure) -> bool:
        self._begin()
        return bool(called(f"{self.where}.fail()", super().fail, failure))

    @classmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        try:
            made = called(f"{cls.where}.failed()", super().failed, failure, request_id)
            return _checked(f"{cls.where}.failed()", made)
        except Exception:
            logger.exception("%s.failed() cannot tell of an error", cls.where)
        detail = ErrorDetail(message=failure.message, type=failure.kind, param=failure.param, code=failure.code)
        error_body = msgspec.json.encode(ErrorBody(detail))
        return (
            b"event: error\ndata: " + error_body + b"\n\n"
            if cls.media_type == Writer.media_type
            else error_body + b"\n"
        )

    def _read_only(self, steps: Sequence[Any]) -> list[StepView]:
        return [replace(step, choice=self._choices[step.choice.index]) for step in steps]

    def _bytes(self, name: str, call: Callable[..., bytes], *args: Any) -> bytes:
        self._begin()
        what = f"{self.where}.{name}()"
        return _checked(what, called(what, call, *args))


def _checked(what: str, made: Any) -> bytes:
    if isinstance(made, bytearray | memoryview):
        made = bytes(made)
    if not isinstance(made, bytes):
        raise PluginError(f"{what} returned {type(made).__name__}; possible: bytes")
    if len(made) > MAX_PIECE:
        raise PluginError(f"{what} returned {len(made)} bytes at once; possible: {MAX_PIECE}")
    return made
