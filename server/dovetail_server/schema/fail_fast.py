"""Validation that ends at the first faults, however many a body has.

pydantic goes on through a list or an object to collect every fault. A body of 27 MB can have nine million of them, and
each costs more than the value that it is about; one is what the reply names.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, PydanticKnownError, core_schema

PIECE = 64
"""Entries of an object that are validated together: no more than these are looked at behind the first fault."""


def _change(part: Any) -> None:
    if isinstance(part, list | tuple):
        for item in part:
            _change(item)
    if not isinstance(part, dict) or (part.get("type") == "function-wrap" and isinstance(_target(part), InPieces)):
        return
    for value in part.values():
        _change(value)
    if part.get("type") == "list":
        part["fail_fast"] = True
    elif part.get("type") == "dict":
        whole = dict(part)
        part.clear()
        in_pieces = InPieces(whole.get("max_length"))
        part.update(core_schema.no_info_wrap_validator_function(in_pieces, whole))


class PlainList:
    """Validator of a list of plain values: it checks them as a list of `kind`, and leaves them as they were sent.

    A message is 50 bytes of JSON, 250 as a dictionary and 900 as a model. So models are made of a few at a time and
    dropped: once to check them, and again when they are read.
    """

    def __init__(self, kind: Any, *, least: int = 0, most: int) -> None:
        """Check entries as `kind`, of which there may be `least` to `most`."""
        self.kind = kind
        self.least, self.most = least, most

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of a list of `kind` with our check around it."""
        items = handler.generate_schema(self.kind)
        whole = core_schema.list_schema(items, min_length=self.least, max_length=self.most, strict=True, fail_fast=True)
        return core_schema.no_info_wrap_validator_function(self._check, whole)

    def _check(self, value: Any, handler: core_schema.ValidatorFunctionWrapHandler) -> Any:
        if type(value) is not list or len(value) <= PIECE:
            handler(value)
            return value
        if len(value) > self.most:
            context = {"field_type": "List", "max_length": self.most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", context)
        for start in range(0, len(value), PIECE):
            try:
                handler(value[start : start + PIECE])
            except ValidationError as error:
                raise _moved(error, start) from None
        return value


def _moved(error: ValidationError, start: int) -> ValidationError:
    """Return findings in a piece of a list as findings in the list."""
    found = [
        InitErrorDetails(
            type=PydanticCustomError(item["type"], "{text}", {"text": item["msg"]}),
            loc=(start + int(item["loc"][0]), *item["loc"][1:]),
            input=item["input"],
        )
        for item in error.errors(include_url=False, include_context=False)
    ]
    return ValidationError.from_exception_data("list", found)


def _target(wrap: dict[str, Any]) -> Any:
    return wrap.get("function", {}).get("function")


class InPieces:
    """Validates an object piece by piece, after a look at its size."""

    def __init__(self, most: int | None) -> None:
        """Allow `most` entries."""
        self.most = most

    def __call__(self, value: Any, handler: core_schema.ValidatorFunctionWrapHandler) -> Any:
        """Validate."""
        if not isinstance(value, dict) or len(value) <= PIECE:
            return handler(value)
        if self.most is not None and len(value) > self.most:
            context = {"field_type": "Dictionary", "max_length": self.most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", context)
        result: dict[Any, Any] = {}
        for piece in _pieces(value):
            result |= handler(piece)
        return result


def _pieces(value: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    entries = iter(value.items())
    while piece := dict(islice(entries, PIECE)):
        yield piece


class FailFastModel(BaseModel):
    """A model that stops validating a list or object, at any depth, at its first errors."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's schema with its lists and objects changed."""
        schema = handler(source)
        _change(schema)
        return schema
