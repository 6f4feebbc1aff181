"""From the bytes of a body to a checked request: strict JSON, then the family's pydantic model, errors in our words."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from dovetail.contracts.api import Route
from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Request
from dovetail_server.apis.generate.schema import ANY_MODEL
from dovetail_server.apis.guarded import GuardedRoute, called
from dovetail_server.errors.catalogue import from_validation, shortened
from dovetail_server.reading.json_limits import MAX_OBJECTS, check_density
from dovetail_server.serving.served import Served

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
