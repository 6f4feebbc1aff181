"""Reading a JSON body: strict JSON, then the family's pydantic model, with errors in our words."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from dovetail.errors import RequestError
from dovetail_server.errors import ClientGoneError, from_validation

M = TypeVar("M", bound=BaseModel)
BIG_BODY = 1 << 18
"""Bodies above this many bytes are parsed in a worker thread."""


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
        RequestError: It is not JSON, nests too deeply, holds a NUL, or does not fit the model.
    """
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if b"u0000" in raw and (path := find_nul(data, "")) is not None:
        raise RequestError(f"{path} holds a NUL character, which no text may", param=path, code="invalid_value")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise from_validation(error, data, list(model.model_fields)) from None


def find_nul(value: Any, path: str) -> str | None:
    """Return the path of the first string with a NUL, or None. The JSON parser bounds the depth."""
    if isinstance(value, str):
        return path if "\0" in value else None
    if isinstance(value, dict):
        steps = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
        bad_key = next((path or "the body" for key in value if "\0" in key), None)
        if bad_key is not None:
            return bad_key
    elif isinstance(value, list):
        steps = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    else:
        return None
    return next((found for step, item in steps if (found := find_nul(item, step)) is not None), None)
