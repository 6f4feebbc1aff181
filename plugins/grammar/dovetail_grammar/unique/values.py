"""How many values a schema in the normal form allows, at least: whether an array can always go on to its next item.

Where the first items of an array are described one by one, what the first one is may leave nothing for the second. That
cannot happen where each item that must come has more values than there are items before it that could take one.
"""

from __future__ import annotations

import json
from typing import Any

from dovetail.sdk.schemas.schema import TYPES

MANY = 1 << 16
_DEPTH = 6
_SAID = frozenset(("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"))
_STRINGS = frozenset(("type", "minLength", "maxLength"))
_NUMBERS = frozenset(("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))


def goes_on(node: dict[str, Any], definitions: dict[str, Any]) -> bool:
    """Whether each item of an array that must come is sure to have a value that none before it has taken."""
    first, rest = node["prefixItems"], node.get("items", True)
    must = node.get("minItems", 0)
    if must > len(first) + MANY:
        return False
    items = [first[i] if i < len(first) else rest for i in range(min(must, len(first) + 64))]
    counted = [_count(item, definitions, _DEPTH) for item in items]
    if must > len(items) and counted[-1] < must:
        return False
    num_possible_equals = [sum(_may_equal(item, before) for before in items[:i]) for i, item in enumerate(items)]
    return all(not num or count > num for count, num in zip(counted, num_possible_equals, strict=True))


def _count(node: Any, definitions: dict[str, Any], depth: int) -> int:
    """Bound the number of values from below; 0 where that is not known."""
    if isinstance(node, bool):
        return MANY if node else 0
    said = set(node) - _SAID
    if not said:
        return MANY
    listed = _listed(node)
    if listed is not None:
        return len(listed)
    if depth == 0:
        return 0
    if said == {"$ref"}:
        return _count(definitions.get(node["$ref"], False), definitions, depth - 1)
    if said == {"anyOf"}:
        return max(_count(option, definitions, depth - 1) for option in node["anyOf"])
    given = node.get("type", TYPES)
    kinds = [given] if isinstance(given, str) else given
    return max(_of_type(kind, node, said, definitions, depth) for kind in kinds)


def _of_type(kind: str, node: dict[str, Any], said: set[str], definitions: dict[str, Any], depth: int) -> int:
    if "type" not in said:
        return 0  # each keyword speaks of one type only, but which options there are is not looked at
    if kind == "boolean" or kind == "null":
        return (2 if kind == "boolean" else 1) if said == {"type"} else 0
    if kind == "string":
        return _of_strings(node, said)
    if kind == "integer" or kind == "number":
        return _of_numbers(kind, node, said)
    inner = [node[key] for key in ("items", "additionalProperties") if key in node]
    if said == {"type"}:
        return MANY
    if kind == "array" and said <= {"type", "items", "maxItems"} and node.get("maxItems", 1) >= 1:
        return _count(inner[0], definitions, depth - 1) if inner else MANY
    if kind == "object" and said <= {"type", "properties", "required", "additionalProperties"}:
        parts = [_count(part, definitions, depth - 1) for part in node.get("properties", {}).values()]
        if any(not count for count in parts) or not set(node.get("required", ())) <= set(node.get("properties", ())):
            return 0
        return max([*parts, *(_count(part, definitions, depth - 1) for part in inner or [True])])
    return 0


def _of_strings(node: dict[str, Any], said: set[str]) -> int:
    if not said <= _STRINGS or node.get("minLength", 0) > node.get("maxLength", MANY):
        return 0
    return MANY if node.get("maxLength", 1) >= 2 else 60 if node.get("maxLength", 1) == 1 else 1


def _of_numbers(kind: str, node: dict[str, Any], said: set[str]) -> int:
    if not said <= _NUMBERS:
        return 0
    low = max(float(node.get("minimum", "-inf")), float(node.get("exclusiveMinimum", "-inf")))
    high = min(float(node.get("maximum", "inf")), float(node.get("exclusiveMaximum", "inf")))
    room = high - low
    return 0 if room < 2 else int(min(room, MANY)) - 1  # the ends may not count


def _listed(node: dict[str, Any]) -> set[str] | None:
    """Return the values that a schema lists, as texts that are equal for equal values."""
    if "const" not in node and "enum" not in node:
        return None
    if set(node) - _SAID - {"const", "enum"}:
        return set()  # others may not fit what else is said
    values = [node["const"]] if "const" in node else node["enum"]
    return {_text(value) for value in values}


def _text(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer():
        return str(int(value))
    return json.dumps(value, sort_keys=True)


def _may_equal(one: Any, other: Any) -> bool:
    """Whether two schemas may allow the same value."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one is not False and other is not False
    first, second = _listed(one), _listed(other)
    if first and second:
        return bool(first & second)
    types, others = _types(one), _types(other)
    return bool(types & others)


_TYPE_OF = {
    dict: "object", list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null",
}  # fmt: skip


def _types(node: Any) -> set[str]:
    if not isinstance(node, dict):
        return _types({}) if node else set()
    if "type" not in node and "anyOf" in node:
        return {kind for option in node["anyOf"] for kind in _types(option)}
    if "const" in node or "enum" in node:
        return {_TYPE_OF[type(value)] for value in ([node["const"]] if "const" in node else node["enum"])}
    given = node.get("type", TYPES)
    return {"number" if kind == "integer" else kind for kind in ([given] if isinstance(given, str) else given)}
