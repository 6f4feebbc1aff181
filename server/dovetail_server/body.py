"""Reading a JSON body: strict JSON, then the family's pydantic model, with errors in our words."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from dovetail.errors import RequestError
from dovetail_server.density import check_density
from dovetail_server.errors import ClientGoneError, from_validation, shortened

M = TypeVar("M", bound=BaseModel)
BIG_BODY = 1 << 15
"""Bodies above this many bytes are parsed in a worker thread: a thousand tiny messages take 5 ms."""


def json_body(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    """Return a FastAPI dependency that reads the body as `model`."""

    async def read(request: Request) -> M:
        try:
            raw = await request.body()
        except ClientDisconnect:
            raise ClientGoneError("the client left while sending its body") from None
        check_content_type(request.headers.get("content-type", ""), raw)
        if len(raw) > BIG_BODY:
            return await asyncio.to_thread(parse, raw, model)
        return parse(raw, model)

    return read


def check_content_type(content_type: str, raw: bytes) -> None:
    """Refuse other media types: a page in a browser may send those to a local server without asking first."""
    kind = content_type.split(";", 1)[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json") or not raw:
        return
    text = (
        f"content-type {kind or 'is missing'!r}: the body must be JSON; send the header content-type: application/json"
    )
    raise RequestError(text, code="unsupported_media_type", status=415)


def parse(raw: bytes, model: type[M]) -> M:
    """Decode and check a body.

    Raises:
        RequestError: It is not JSON, has too many values, nests too deeply, holds a NUL, or does not fit the model.
    """
    check_density(raw)
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if b"u0000" in raw and (steps := find_nul(data)) is not None:
        path = "".join(reversed(steps)).removeprefix(".")
        raise RequestError(
            f"{path or 'the body'} holds a NUL character, which no text may", param=path, code="invalid_value"
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise from_validation(error, data, list(model.model_fields)) from None


def find_nul(value: Any) -> list[str] | None:
    """Return the way to the first string with a NUL, last step first, or None. The JSON parser bounds the depth."""
    if isinstance(value, str):
        return [] if "\0" in value else None
    if isinstance(value, dict):
        for key, item in value.items():
            if "\0" in key:
                return []
            if isinstance(item, str | dict | list) and (steps := find_nul(item)) is not None:
                return [*steps, f".{shortened(key)}"]
    elif isinstance(value, list):
        for at, item in enumerate(value):
            if isinstance(item, str | dict | list) and (steps := find_nul(item)) is not None:
                return [*steps, f"[{at}]"]
    return None
