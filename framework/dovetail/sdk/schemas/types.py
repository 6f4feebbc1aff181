"""Which types the instances of a schema can have, and the types of a value."""

from __future__ import annotations

from typing import Any

from dovetail.sdk.schemas import schema

_NUMBERS = frozenset(("integer", "number"))


def kinds_of(node: Any) -> frozenset[str]:
    """Return the types that a schema's own `type` allows."""
    given = node.get("type") if isinstance(node, dict) else None
    if given is None:
        return frozenset(schema.TYPES)
    return frozenset([given] if isinstance(given, str) else given)


def kinds_in_common(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    """Return the types that values of two sets of types can both have."""
    both = first & second
    if ("number" in first and "integer" in second) or ("integer" in first and "number" in second):
        both |= {"integer"}
    return both


def types_of_value(value: Any) -> frozenset[str]:
    """Return the names of the types that a value has: a whole number is an integer and a number."""
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, (int, float)):
        return _NUMBERS if float(value).is_integer() else frozenset(("number",))
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return frozenset((names[type(value)],))


def values_of(node: Any) -> list[Any] | None:
    """Return the values that a schema names; None where it names none."""
    if not isinstance(node, dict):
        return None
    if "const" in node:
        return [node["const"]]
    given = node.get("enum")
    return given if isinstance(given, list) else None
