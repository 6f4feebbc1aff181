"""Walking JSON Schemas: which keyword holds subschemas, what is reachable, what is wrong with one.

Knows the keywords of draft 2020-12 and draft 7. All walks are iterative: depth is the client's choice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from dovetail.errors import RequestError

ONE = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
LISTS = frozenset(["allOf", "anyOf", "items", "oneOf", "prefixItems"])
MAPS = frozenset(["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"])
DEFINITIONS = frozenset(("$defs", "definitions"))
HOLDING = ONE | LISTS | MAPS
ANNOTATIONS = frozenset(
    [
        "$anchor",
        "$comment",
        "$id",
        "$schema",
        "$vocabulary",
        "contentSchema",
        "default",
        "deprecated",
        "description",
        "example",
        "examples",
        "id",
        "nullable",
        "readOnly",
        "title",
        "writeOnly",
    ]
)
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_NUMBERS = frozenset(["exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"])
_COUNTS = frozenset(
    ["maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength", "minProperties"]
)
_STRINGS = frozenset(["$anchor", "$dynamicRef", "$id", "$ref", "format", "pattern"])
_CHECKED = ONE | LISTS | MAPS | _NUMBERS | _COUNTS | _STRINGS | {"type", "required", "enum", "uniqueItems"}
NUM_KEPT = 4
"""Texts whose schemas are kept: those of the requests that are just being routed."""
Node = Mapping[str, Any]


@lru_cache(maxsize=NUM_KEPT)
def parse(source: str) -> Any:
    """Read a schema's text; every backend asks for the same one, so the result is shared and must not be changed.

    Raises:
        RequestError: It is not JSON, or neither an object nor a boolean.
    """
    try:
        schema = json.loads(source)
    except RecursionError:
        raise RequestError("the JSON schema is nested too deeply", code="grammar_too_complex") from None
    except ValueError as error:
        raise RequestError(f"the JSON schema is not valid JSON: {error}", code="invalid_json_schema") from None
    if not isinstance(schema, (dict, bool)):
        raise RequestError(
            f"a JSON schema is an object, true or false, not {json.dumps(schema)[:60]}", code="invalid_json_schema"
        )
    return schema


def children(node: Node, pointer: str, *, definitions: bool) -> list[tuple[str, Any]]:
    """Return pointer and value of every direct subschema."""
    found: list[tuple[str, Any]] = []
    for key, value in node.items():
        if key not in HOLDING:
            continue
        if key in ONE and isinstance(value, (dict, bool)):
            found.append((f"{pointer}/{key}", value))
        elif key in LISTS and isinstance(value, list):
            found += [(f"{pointer}/{key}/{i}", item) for i, item in enumerate(value)]
        elif key in MAPS and isinstance(value, dict) and (definitions or key not in DEFINITIONS):
            found += [
                (f"{pointer}/{key}/{escape(name)}", item)
                for name, item in value.items()
                if not (key == "dependencies" and isinstance(item, list))
            ]
    return found


def every(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield pointer and value of the schema and all schemas in it."""
    stack: list[tuple[str, Any]] = [("", schema)]
    while stack:
        pointer, node = stack.pop()
        yield pointer, node
        if isinstance(node, dict) and not HOLDING.isdisjoint(node):
            stack += children(node, pointer, definitions=True)


def reachable(schema: Any) -> Iterator[tuple[str, Node]]:
    """Yield pointer and object of every schema an instance can be judged by: definitions only where referred to."""
    stack: list[tuple[str, Any]] = [("", schema)]
    seen: set[int] = set()
    while stack:
        pointer, node = stack.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield pointer, node
        if not HOLDING.isdisjoint(node):
            stack += children(node, pointer, definitions=False)
        reference = node.get("$ref")
        if isinstance(reference, str):
            try:
                stack.append((reference.removeprefix("#"), resolve(schema, reference)))
            except KeyError:
                continue  # `check` has judged references


@lru_cache(maxsize=NUM_KEPT)
def nodes(source: str) -> tuple[tuple[str, Node], ...]:
    """Return what `reachable` yields of a schema's text; shared as `parse`'s result is.

    Raises:
        RequestError: See `parse`.
    """
    return tuple(reachable(parse(source)))


def resolve(schema: Any, reference: str) -> Any:
    """Return what a local reference names: `#`, `#/json/pointer` or `#anchor`.

    Raises:
        KeyError: Nothing.
    """
    if reference in ("#", ""):
        return schema
    if not reference.startswith("#/"):
        for _, node in every(schema):
            if isinstance(node, dict) and reference in (f"#{node.get('$anchor')}", node.get("$id"), node.get("id")):
                return node
        raise KeyError(reference)
    node = schema
    for part in reference[2:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node[name]
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            raise KeyError(reference)
    return node


def check(schema: Any) -> None:
    """Refuse what is no schema, naming the place: wrong types of keywords.

    Raises:
        RequestError: With the JSON pointer and the keyword.
    """
    for pointer, node in every(schema):
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise wrong(pointer, "must be a schema: an object, true or false")
        for key, value in node.items():
            if key in _CHECKED and (why := _why_wrong(key, value)) is not None:
                raise wrong(f"{pointer}/{escape(key)}", why)


def _why_wrong(key: str, value: Any) -> str | None:
    """Say what is wrong with a keyword's value, or None."""
    if key == "type":
        given = value if isinstance(value, list) else [value]
        if not given or any(name not in TYPES for name in given if isinstance(name, str)) or not _strings(given):
            return f"must be one or more of {', '.join(TYPES)} (given: {json.dumps(value)[:60]})"
    elif key in ("exclusiveMaximum", "exclusiveMinimum") and isinstance(value, bool):
        return None  # draft 4
    elif key in _NUMBERS:
        if not _number(value) or (key == "multipleOf" and value <= 0):
            return "must be a number" if key != "multipleOf" else "must be a number above 0"
    elif key in _COUNTS:
        if not _number(value) or value < 0 or value != int(value):
            return "must be a whole number, 0 or above"
    elif key in _STRINGS:
        return None if isinstance(value, str) else "must be a string"
    elif key == "required":
        return None if isinstance(value, list) and _strings(value) else "must be a list of strings"
    elif key == "enum":
        return None if isinstance(value, list) and value else "must be a list of one or more values"
    elif key == "uniqueItems":
        return None if isinstance(value, bool) else "must be true or false"
    elif key in MAPS:
        return None if isinstance(value, dict) else "must be an object"
    elif key == "items":
        return None if isinstance(value, (dict, bool, list)) else "must be a schema"
    elif key in LISTS:
        return None if isinstance(value, list) and value else "must be a list of one or more schemas"
    elif key in ONE and not isinstance(value, (dict, bool)):
        return "must be a schema: an object, true or false"
    return None


def _strings(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def wrong(pointer: str, why: str) -> RequestError:
    """Word a fault of a schema, with its place."""
    keyword = pointer.rsplit("/", 1)[-1]
    return RequestError(f"JSON schema, {pointer or '/'} ({keyword}): {why}", code="invalid_json_schema")


def escape(name: str) -> str:
    """Write a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1") if "~" in name or "/" in name else name
