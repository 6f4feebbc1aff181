"""From the bytes of a body to a checked request: strict JSON, then the family's pydantic model, errors in our words."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from dovetail.contracts.api import Route
from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Request
from dovetail_server.apis.generate.schema import ANY_MODEL
from dovetail_server.apis.guarded import GuardedRoute, called
from dovetail_server.errors.catalogue import from_validation, shortened
from dovetail_server.serving.served import Served

# How many JSON values a body holds, found before it is parsed.
#
# An empty object is two bytes of JSON and 72 of memory, so a body of nothing else would become 24 times its size. Text
# costs what it is, and numbers little more. What is counted are commas and opening brackets: in the whole body first,
# which is an upper bound and takes as long as reading it; outside its strings where that is too many.

MAX_VALUES = 1 << 20
"""Parsing holds Python's lock, and with it the event loop: so many numbers take 50 ms."""
FREE_OBJECTS = 1 << 16
BYTES_PER_OBJECT = 16
MAX_OBJECTS = 1 << 17
"""Objects and lists may be as many as `FREE_OBJECTS`, and one more for each so many bytes, but no more than that:
parsing these takes 50 ms, too."""
_WINDOW = 1 << 16
"""Matching holds Python's lock too, so nothing is matched in larger pieces."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_STRINGS = re.compile(rb'(?:[^"]*+"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_STRING_PIECE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


def check_density(raw: bytes, most_objects: int = MAX_OBJECTS) -> None:
    """Refuse a body of very many values.

    Args:
        raw: The body.
        most_objects: Objects and lists that it may have at most, however large it is.

    Raises:
        RequestError: It would take much more memory than it has bytes, or stop the server while it is parsed.
    """
    most_objects = min(FREE_OBJECTS + len(raw) // BYTES_PER_OBJECT, most_objects)
    counts = _count(raw, 0, len(raw))
    if counts[0] <= most_objects and sum(counts) <= MAX_VALUES:
        return
    num_objects, num_commas = _count_outside_strings(raw, most_objects)
    if num_objects > most_objects:
        text = f"a body of {len(raw)} bytes may hold {most_objects} objects and lists, and this one holds more"
        raise RequestError(text, code="body_too_dense")
    if num_objects + num_commas > MAX_VALUES:
        text = f"the body holds more than {MAX_VALUES} values; send several requests"
        raise RequestError(text, code="body_too_dense")


def _count(raw: bytes, start: int, end: int) -> tuple[int, int]:
    """Return the opening brackets and the commas between two places."""
    return raw.count(b"{", start, end) + raw.count(b"[", start, end), raw.count(b",", start, end)


def _count_outside_strings(raw: bytes, most_objects: int) -> tuple[int, int]:
    """As `_count` for all that is not in strings; stops where it is too many."""
    objects = commas = at = 0
    while at < len(raw) and objects <= most_objects and objects + commas <= MAX_VALUES:
        strings = _STRINGS.match(raw, at, at + _WINDOW)
        end = at if strings is None else strings.end()
        rest = _STRING.sub(b"", raw[at:end])
        quote = raw.find(b'"', end)  # of a string that is longer than the window, if there is one
        last = len(raw) if quote < 0 else quote
        for piece, start, stop in ((rest, 0, len(rest)), (raw, end, last)):
            found = _count(piece, start, stop)
            objects, commas = objects + found[0], commas + found[1]
        at = len(raw) if quote < 0 else _end_of_string(raw, quote + 1)
    return objects, commas


def _end_of_string(raw: bytes, at: int) -> int:
    """Return the place behind a string that begins at `at`; the body's end where it has none."""
    while True:
        match = _STRING_PIECE.match(raw, at, at + _WINDOW)
        end = at if match is None else match.end()
        if raw[end : end + 1] == b'"':
            return end + 1
        if end == at:
            return len(raw)
        at = end


M = TypeVar("M", bound=BaseModel)
SCHEMAS = frozenset(("schema", "json_schema", "parameters", "input_schema", "json", "guided_json"))
"""Fields that hold a JSON schema, whose values may hold any character."""


def parse(raw: bytes, model: type[M], most_objects: int = MAX_OBJECTS) -> M:
    """Decode and check a body; `most_objects` as in `check_density`.

    Raises:
        RequestError: It is not JSON, has too many values, nests too deeply, holds a NUL, or does not fit the model.
    """
    return validated(decoded(raw, most_objects), model)


def decoded(raw: bytes, most_objects: int = MAX_OBJECTS) -> Any:
    """Decode a body; `most_objects` as in `check_density`.

    Raises:
        RequestError: It is not JSON, has too many values, nests too deeply, or holds a NUL.
    """
    check_density(raw, most_objects)
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if b"u0000" in raw and (steps := find_nul(data)) is not None:
        path = "".join(reversed(steps)).removeprefix(".")
        raise RequestError(
            f"{path or 'the body'} holds a NUL character, which no text may", param=path, code="invalid_value"
        )
    return data


def of_route(raw: bytes, route: Route) -> list[Request]:
    """Return the requests that a body makes on a route that generates.

    Raises:
        RequestError: See `parse`; or the API does not serve what it asks for.
    """
    return requests_of(decoded(raw), route)


def requests_of(data: Any, route: Route) -> list[Request]:
    """As `of_route`, of a body that has been decoded.

    Raises:
        RequestError: As `of_route`.
    """
    if route.body is None:
        return route.requests(data)
    if isinstance(route, GuardedRoute):
        what = f"{route.where}: {route.body.__name__}.model_validate()"
        return route.requests(called(what, validated, data, route.body))
    return route.requests(validated(data, route.body))


def validated(data: Any, model: type[M]) -> M:
    """Check a decoded body.

    Raises:
        RequestError: It does not fit the model.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise from_validation(error, data, list(model.model_fields)) from None


def check_name(request: BaseModel, served: Served, tag: str) -> None:
    """Check the model that a request names on a route of this tag, if it has such a field.

    Raises:
        RequestError: It is not served.
    """
    name = getattr(request, "model", None)
    served.name(None if name == ANY_MODEL else name, tag)


def find_nul(value: Any) -> list[str] | None:
    """Return the way to the first string with a NUL outside of JSON schemas, last step first, or None.

    The JSON parser bounds the depth.
    """
    if isinstance(value, str):
        return [] if "\0" in value else None
    if isinstance(value, dict):
        for key, item in value.items():
            if "\0" in key:
                return []
            if key in SCHEMAS and isinstance(item, dict) and "schema" not in item:
                continue
            if isinstance(item, str | dict | list) and (steps := find_nul(item)) is not None:
                return [*steps, f".{shortened(key)}"]
    elif isinstance(value, list):
        for at, item in enumerate(value):
            if isinstance(item, str | dict | list) and (steps := find_nul(item)) is not None:
                return [*steps, f"[{at}]"]
    return None
