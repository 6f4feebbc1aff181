"""Outlines' output types, and the Python types they stand for, as request fields: for the offline `LLM`.

Types of `outlines.types` are recognised by their form, so that nothing here imports outlines: `Regex`, `CFG`,
`JsonSchema`, terms such as `Choice`. Also a pydantic model, a dataclass or `TypedDict`, an `Enum`, `Literal[...]`,
`bool`, `int`, `float` and `dict`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from dovetail.contracts.errors import RequestError


def fields_of(output_type: Any) -> Mapping[str, Any]:
    """Return the request's grammar fields that an output type stands for.

    Raises:
        RequestError: It stands for none.
    """
    if isinstance(output_type, str):
        return {"regex": output_type}
    module = type(output_type).__module__
    if module.startswith("outlines."):
        return _outlines(output_type)
    if get_origin(output_type) is Literal:
        return _choices(list(get_args(output_type)))
    if isinstance(output_type, type) and issubclass(output_type, enum.Enum):
        return _choices([member.value for member in output_type])
    if isinstance(output_type, list):
        return _choices(output_type)
    if output_type is dict:
        return {"response_format": {"type": "json_object"}}
    try:
        return {"json_schema": TypeAdapter(output_type).json_schema()}
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError) as error:
        text = f"output_type {output_type!r} is no type that a grammar can be made of ({type(error).__name__})"
        raise RequestError(text, param="output_type", code="invalid_value") from None


def _outlines(term: Any) -> Mapping[str, Any]:
    """A term of `outlines.types`: grammars and schemas carry their source, other terms are regular expressions."""
    if (definition := getattr(term, "definition", None)) is not None:
        return {"ebnf": definition}
    if (schema := getattr(term, "schema", None)) is not None:
        return {"json_schema": schema}
    if (items := getattr(term, "items", None)) is not None and isinstance(items, list):
        return _choices(items)
    if (pattern := getattr(term, "pattern", None)) is not None:
        return {"regex": pattern}
    from outlines.types.dsl import to_regex  # the caller has outlines: the term is one of its own

    return {"regex": to_regex(term)}


def _choices(values: list[Any]) -> Mapping[str, Any]:
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return {"structured_outputs": {"choice": texts}}
