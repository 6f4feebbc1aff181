"""Validation that ends at the first faults, however many a body has.

pydantic goes on through a list or an object to collect every fault. A body of 27 MB can have nine million of them, and
each costs more than the value that it is about; one is what the reply names.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

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


class EarlyModel(BaseModel):
    """A model whose lists and objects, at any depth, are given up at their first faults."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's schema with its lists and objects changed."""
        schema = handler(source)
        _change(schema)
        return schema
