"""What an API brings, looked at before it is served: the server's start and the conformance kit find the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from reprlib import repr as short
from typing import Any

import msgspec

from dovetail.contracts.api import Api, Route, View
from dovetail.contracts.errors import described
from dovetail.contracts.replies import Writer

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
ID_PREFIX = re.compile(r"[A-Za-z0-9_.-]{0,32}")
MEDIA_TYPE = re.compile(r"[a-z0-9.+-]+/[a-z0-9.+-]+(; ?[a-z-]+=[A-Za-z0-9.+-]+)*")
"""It becomes a header as it is."""
MAX_KEEP_ALIVE = 1024
PATH = re.compile(r"(/[A-Za-z0-9._~:@!$&'()*+,;=-]+)+")


def routes_of(api: Api) -> list[Route | View]:
    """Return the routes of an API that can be served.

    Raises:
        ValueError: It cannot: the text says why.
    """
    given: Any = api.routes()
    if not isinstance(given, list | tuple):
        raise ValueError(f"routes() returned {type(given).__name__}; possible: a list of Route and View")
    for fault in (fault for faults in (_of_routes(given), _of_owned(api)) for fault in faults):
        raise ValueError(fault)
    return list(given)


def _of_routes(routes: Iterable[Any]) -> Iterator[str]:
    seen: set[str] = set()
    schemas: dict[str, type] = {}
    for route in routes:
        if not isinstance(route, Route | View):
            yield f"routes() returned {route!r}; possible: a Route or a View of contracts.api"
        if not isinstance(route.name, str) or NAME.fullmatch(route.name) is None:
            yield f"route name {route.name!r}: use letters, digits and _"
        if not isinstance(route.path, str) or ".." in route.path or PATH.fullmatch(route.path) is None:
            yield f"path {route.path!r}: a path begins with /, ends otherwise, and has neither parameters nor .."
        for text in ("about", "tag"):
            if not isinstance(value := getattr(route, text), str) or not value.strip() or not value.isprintable():
                yield f"{route.path}: {text} is {short(value)}; give a line of text"
        for key in (route.name, route.path):
            if key in seen:
                yield f"{key!r} is there twice"
            seen.add(key)
        yield from _of_generating(route) if isinstance(route, Route) else _of_view(route)
        for field in ("body", "reply", "error"):
            schema = getattr(route, field, None)
            if schema is not None and schemas.setdefault(f"{schema.__module__}.{schema.__name__}", schema) != schema:
                yield f"{route.path}: two schemas are called {schema.__name__}; give each a name of its own"


def _of_generating(route: Route) -> Iterator[str]:
    writer: Any = route.writer
    if not callable(route.read):
        yield f"{route.path}: read is {route.read!r}; give a function of a body"
    if not isinstance(writer, type) or not issubclass(writer, Writer):
        yield f"{route.path}: writer is {writer!r}; give a class made of contracts.replies.Writer"
    if missing := sorted(getattr(writer, "__abstractmethods__", ())):
        yield f"{route.path}: {writer.__qualname__} does not implement {', '.join(missing)}"
    if not isinstance(writer.media_type, str) or MEDIA_TYPE.fullmatch(writer.media_type) is None:
        yield f"{route.path}: {writer.__qualname__}.media_type is {writer.media_type!r}; give one such as text/plain"
    if not isinstance(writer.keep_alive, bytes) or len(writer.keep_alive) > MAX_KEEP_ALIVE:
        yield f"{route.path}: {writer.__qualname__}.keep_alive must be bytes, at most {MAX_KEEP_ALIVE}"
    if not isinstance(writer.reports_aborts, bool):
        given = short(writer.reports_aborts)
        yield f"{route.path}: {writer.__qualname__}.reports_aborts is {given}; possible: True, False"
    if (body := route.body) is not None:
        if not hasattr(body, "model_validate"):
            yield f"{route.path}: body is {body!r}; give a pydantic model, or none"
        yield from _of_document(route, "body", lambda: body.model_json_schema())
    for field in ("reply", "error"):
        yield from _of_struct(route, field)
    if not isinstance(route.id_prefix, str) or ID_PREFIX.fullmatch(route.id_prefix) is None:
        yield f"{route.path}: id_prefix is {short(route.id_prefix)}; use up to 32 letters, digits, _ . and -"
    if route.place not in ("prefix", "any"):
        yield f"{route.path}: place is {route.place!r}; possible: prefix, any"


def _of_view(view: View) -> Iterator[str]:
    if not callable(view.show):
        yield f"{view.path}: show is {view.show!r}; give a function of the server's facts and a body"
    if view.method not in ("GET", "POST"):
        yield f"{view.path}: method is {view.method!r}; possible: GET, POST"
    yield from _of_struct(view, "error")


def _of_struct(route: Route | View, field: str) -> Iterator[str]:
    given: Any = getattr(route, field)
    if given is not None and not (isinstance(given, type) and issubclass(given, msgspec.Struct)):
        yield f"{route.path}: {field} is {given!r}; give a msgspec.Struct, or none"
    if given is not None:
        yield from _of_document(route, field, lambda: msgspec.json.schema(given))


def _of_document(route: Route | View, field: str, describe: Callable[[], object]) -> Iterator[str]:
    """Yield why the OpenAPI document, which is one for all APIs, cannot have a schema."""
    try:
        msgspec.json.encode(describe())
    except Exception as error:
        yield f"{route.path}: {field} cannot be described as a JSON schema: {described(error)}"


def _of_owned(api: Api) -> Iterator[str]:
    owns: Any = api.owns
    if not isinstance(owns, list | tuple):
        yield f"owns is {owns!r}; give paths in a tuple"
    for path in owns:
        if not isinstance(path, str) or PATH.fullmatch(path) is None:
            yield f"owns {path!r}: a path begins with / and has more behind it, but no / at its end"
    if owns and type(api).failed is Api.failed:
        yield f"it owns {', '.join(owns)} and has no failed(), which tells of their errors"
