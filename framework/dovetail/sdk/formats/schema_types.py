"""Which JSON types a tool's parameter may have, for formats that write values without JSON's quotes.

`value_text` turns the text that a model wrote for a parameter into JSON text of a type that the schema allows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NoReturn
from urllib.parse import unquote

from dovetail.sdk.formats.python_literals import literal_json

STRING = frozenset(["string"])
CONTAINERS = frozenset(["array", "object"])
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_ANCHORS = ("$anchor", "$dynamicAnchor")
_MAX_DEPTH = 8
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def schemas_by_tool(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the parameters' schema of each tool that has one, by the tool's name."""
    found = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        if isinstance(parameters, Mapping):
            found[str(function.get("name"))] = _object_of(parameters)
    return found


def is_tool(name: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of a request's tools has a name."""
    return any(tool.get("function", tool).get("name") == name for tool in tools)


def _object_of(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with the properties of the object that it only names."""
    node: Any = root
    for _ in range(_MAX_DEPTH):
        if not isinstance(node, Mapping) or "properties" in node:
            break
        parts, reference = node.get("allOf"), _reference(node)
        if reference is not None:
            node = resolve(reference, root)
        elif isinstance(parts, list) and len(parts) == 1:
            node = parts[0]
        else:
            break
    return {**root, "properties": node["properties"]} if node is not root and properties_of(node) else root


def _reference(schema: Mapping[str, Any]) -> str | None:
    return next((schema[key] for key in _REFERENCES if isinstance(schema.get(key), str)), None)


def properties_of(schema: Any) -> Mapping[str, Any]:
    """Return the properties that a schema declares."""
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def types_of(schema: Any, root: Mapping[str, Any] | None = None, depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset([given])
    reference = _reference(schema)
    named = frozenset[str]() if reference is None else types_of(resolve(reference, root), root, depth + 1)
    if isinstance(given, list):
        kinds = frozenset(kind for kind in given if isinstance(kind, str))
        return _both(kinds, named) if named else kinds
    if named:
        return named
    if isinstance(values := schema.get("enum"), list):
        return frozenset(type_name(value) for value in values)
    if "const" in schema:
        return frozenset([type_name(schema["const"])])
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(key), list):
            found = [types_of(branch, root, depth + 1) for branch in branches]
            if key == "allOf":
                return reduce(_both, filter(None, found), frozenset[str]())
            return frozenset().union(*found) if all(found) else frozenset()
    if "properties" in schema:
        return frozenset(["object"])
    return frozenset(["array"]) if "items" in schema else frozenset()


def _both(one: frozenset[str], two: frozenset[str]) -> frozenset[str]:
    """Return the types that two schemas allow together; `one` where none does, or it says nothing."""
    number = frozenset(["integer"]) if {"integer", "number"} <= one | two else frozenset[str]()
    return (one & two) | number if one else two


def type_name(value: Any) -> str:
    """Return the JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def value_text(text: str, types: frozenset[str]) -> str:
    """Return JSON text for what a model wrote without quotes.

    Text that is JSON of an allowed type passes as written. Where the schema does not say, JSON that is no string does.
    Python's `True`, `False` and `None` are understood, and its lists and dictionaries where the schema wants one.
    Anything else is a string.
    """
    stripped = text.strip()
    stripped = PYTHON_WORDS.get(stripped, stripped)
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        found = _container_text(stripped) if stripped[:1] in "[{(" and types & CONTAINERS else None
        return found if found is not None else quoted(text)
    kind = type_name(value)
    if types:
        allowed = kind in types or (kind == "integer" and "number" in types)
        allowed = allowed or (kind == "number" and value.is_integer() and "integer" in types)
        if allowed or "string" not in types:
            return stripped
        return quoted(text)
    return quoted(text) if kind == "string" else stripped


def _container_text(text: str) -> str | None:
    """Return JSON text for a list or an object that is Python, or is escaped as if it stood in a string."""
    if (python := literal_json(text)) is not None:
        return python
    try:
        inner = str(json.loads(f'"{text}"', strict=False))
        return inner if isinstance(json.loads(inner), list | dict) else None
    except (ValueError, RecursionError):
        return None


def cut_text(text: str, types: frozenset[str]) -> str:
    """Return JSON text for the beginning of a value, cut short: it keeps the type that it was going to have."""
    stripped = text.strip()
    if not stripped or (stripped[0] in "[{" and types & CONTAINERS):
        return stripped
    return value_text(text, types)


def quoted(text: str) -> str:
    """Return a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> NoReturn:
    """NaN and Infinity are no JSON."""
    raise ValueError(name)


def resolve(reference: str, root: Mapping[str, Any] | None) -> Any:
    """Follow a local reference such as `#/$defs/City`, `#`, or `#city` for a definition's anchor."""
    found: Any = root
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        groups = [root.get(key) for key in ("$defs", "definitions")] if root is not None else []
        definitions = [each for group in groups if isinstance(group, Mapping) for each in group.values()]
        named = (each for each in definitions if isinstance(each, Mapping) and reference[1:] in map(each.get, _ANCHORS))
        return next(named, None) if reference.startswith("#") else None
    for step in unquote(reference[2:]).split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found
