"""What a schema's opposite is, and whether two schemas can both hold: where plain keywords can say so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.grammar import schema
from dovetail.grammar.normal.nodes import kinds_of

Node = dict[str, Any]
MAX_WAYS = 12
"""Alternatives of an opposite."""
MAX_DEPTH = 5
_INVERSE = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
"""The opposite of a bound: the type that it speaks of, the other bound, and how far away."""
_NUMBERS = frozenset(("integer", "number"))


class Logic:
    """Questions about schemas of one document."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        """Keep the definitions, which references lead to."""
        self._definitions = definitions

    def followed(self, node: Any) -> Any:
        """Return the schema that a node which is nothing but a reference stands for; others as they are."""
        for _ in range(MAX_DEPTH):
            if not isinstance(node, dict) or set(node) != {"$ref"} or node["$ref"] == "#":
                return node
            node = self._definitions.get(node["$ref"].removeprefix("#/$defs/").replace("~1", "/").replace("~0", "~"))
        return node

    def opposite(self, node: Any, beside: Node, depth: int = 0) -> Any:
        """Return a schema that holds where another does not, None where plain keywords cannot say it.

        Args:
            node: The schema.
            beside: What else is known of the instance: types and values that it can have.
            depth: Of the recursion.
        """
        node = self.followed(node)
        if isinstance(node, bool):
            return not node
        if not isinstance(node, dict) or depth > MAX_DEPTH:
            return None
        ways: list[Any] = []
        for key, value in node.items():
            if key in ("then", "else", "minContains", "maxContains"):
                return None
            found = self._opposite_of(key, value, node, beside, depth)
            if found is None:
                return None
            ways += found
        return any_of(ways) if len(ways) <= MAX_WAYS else None

    def _opposite_of(self, key: str, value: Any, node: Node, beside: Node, depth: int) -> list[Any] | None:
        """Alternatives that together are one keyword's opposite."""
        if key in _INVERSE:
            kind, other, step = _INVERSE[key]
            return [{"type": kind, other: value + step}] if value + step >= 0 or kind == "number" else []
        if key == "type":
            return _other_types(node, beside)
        if key in ("enum", "const"):
            return _other_values(value if key == "enum" else [value], node, beside)
        if key == "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        if key == "properties":
            return self._other_properties(value, beside, depth)
        if key == "not":
            return [value]
        if key == "allOf":
            parts = [self.opposite(part, beside, depth + 1) for part in value]
            return None if any(part is None for part in parts) else parts
        if key == "anyOf":
            parts = [self.opposite(part, beside, depth + 1) for part in value]
            return None if any(part is None for part in parts) else [all_of(parts)]
        return None

    def _other_properties(self, value: Mapping[str, Any], beside: Node, depth: int) -> list[Any] | None:
        """Some property is there and is not what it should be."""
        ways = []
        for name, part in value.items():
            declared = self.followed(beside.get("properties", {}).get(name, {}))
            other = self.opposite(part, declared if isinstance(declared, dict) else {}, depth + 1)
            if other is None:
                return None
            if other is not False:
                ways.append({"type": "object", "required": [name], "properties": {name: other}})
        return ways

    def are_apart(self, first: Any, second: Any, beside: Node, depth: int = 0) -> bool:
        """Whether no instance can conform to both. May say no where it is so.

        Args:
            first: A schema.
            second: Another.
            beside: What both are alternatives in.
            depth: Of the recursion.
        """
        if depth > MAX_DEPTH:
            return False
        one, two = self._seen(first, depth), self._seen(second, depth)
        if one is False or two is False:
            return True
        kinds = _common(_common(kinds_of(one), kinds_of(two)), kinds_of(beside))
        if not kinds:
            return True
        for node, other in ((one, two), (two, one)):
            values = _values(node)
            if values is not None and not any(self._may_be(value, other, kinds) for value in values):
                return True
        if kinds <= _NUMBERS and (_low(one) > _high(two) or _low(two) > _high(one)):
            return True
        return kinds == {"object"} and self._objects_apart(one, two, beside, depth)

    def _objects_apart(self, one: Node, two: Node, beside: Node, depth: int) -> bool:
        required = {*one.get("required", ()), *two.get("required", ()), *beside.get("required", ())}
        for name in required:
            first, second = _property(one, name), _property(two, name)
            declared = self.followed(beside.get("properties", {}).get(name, {}))
            known = declared if isinstance(declared, dict) else {}
            if first is False or second is False or self.are_apart(first, second, known, depth + 1):
                return True
        return False

    def _seen(self, node: Any, depth: int) -> Any:
        """Return a schema with the plain keywords of its references and conjunctions beside its own."""
        node = self.followed(node)
        if not isinstance(node, dict) or depth > MAX_DEPTH:
            return {} if node is True or not isinstance(node, bool) else False
        parts = [self._seen(part, depth + 1) for part in node.get("allOf", ())]
        if "$ref" in node:
            parts.append(self._seen({"$ref": node["$ref"]}, depth + 1))
        made = dict(node)
        for part in parts:
            if part is False:
                return False
            if "type" in part and "type" in made:
                made["type"] = sorted(_common(kinds_of(made), kinds_of(part)))
            for key in ("type", "const", "enum"):
                if key in part:
                    made.setdefault(key, part[key])
            made["required"] = [*made.get("required", ()), *part.get("required", ())]
            made["properties"] = {**part.get("properties", {}), **made.get("properties", {})}
        return made

    def _may_be(self, value: Any, node: Node, kinds: frozenset[str]) -> bool:
        """Whether a value may conform to a schema, by its type and its values."""
        if not types_of_value(value) & kinds:
            return False
        values = _values(node)
        return values is None or any(is_same(value, other) for other in values)


def any_of(parts: Sequence[Any]) -> Any:
    """Return a schema that one of some has to hold for."""
    parts = [part for part in parts if part is not False]
    if not parts:
        return False
    return True if any(part is True for part in parts) else parts[0] if len(parts) == 1 else {"anyOf": parts}


def all_of(parts: Sequence[Any]) -> Any:
    """Return a schema that all of some have to hold for."""
    parts = [part for part in parts if part is not True and part != {}]
    if not parts:
        return True
    return False if any(part is False for part in parts) else parts[0] if len(parts) == 1 else {"allOf": parts}


def is_same(first: Any, second: Any) -> bool:
    """Whether two values are equal as JSON."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(is_same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(is_same(first[key], second[key]) for key in first)
    return bool(first == second)


def has_repeats(values: Any) -> bool:
    """Whether a value is an array with two equal items."""
    if not isinstance(values, list):
        return False
    return any(is_same(one, two) for i, one in enumerate(values) for two in values[:i])


def types_of_value(value: Any) -> frozenset[str]:
    """Return the names of the types that a value has: a whole number is an integer and a number."""
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, (int, float)):
        return _NUMBERS if float(value).is_integer() else frozenset(("number",))
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return frozenset((names[type(value)],))


def _other_types(node: Node, beside: Node) -> list[Any] | None:
    taken = set(kinds_of(node))
    if "integer" in taken and "number" not in taken and "number" in kinds_of(beside):
        return None  # numbers that are not whole have no name
    if taken & _NUMBERS:
        taken |= _NUMBERS
    rest = [kind for kind in schema.TYPES if kind not in taken and kind != "integer"]
    return [{"type": rest}] if rest else []


def _other_values(values: Sequence[Any], node: Node, beside: Node) -> list[Any] | None:
    known = _values(beside)
    if known is None:
        kinds = kinds_of(beside) & kinds_of(node)
        if not kinds <= {"boolean", "null"}:
            return None
        known = [value for kind in sorted(kinds) for value in ([False, True] if kind == "boolean" else [None])]
    rest = [value for value in known if not any(is_same(value, other) for other in values)]
    return [{"enum": rest}] if rest else []


def _values(node: Any) -> list[Any] | None:
    """Return the values that a schema names; None where it names none."""
    if not isinstance(node, dict):
        return None
    if "const" in node:
        return [node["const"]]
    given = node.get("enum")
    return given if isinstance(given, list) else None


def _common(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    both = first & second
    if ("number" in first and "integer" in second) or ("integer" in first and "number" in second):
        both |= {"integer"}
    return both


def _property(node: Node, name: str) -> Any:
    """Return what a schema says of a property's value."""
    if name in node.get("properties", {}):
        return node["properties"][name]
    if "patternProperties" in node or "additionalProperties" not in node:
        return {}
    return node["additionalProperties"]


def _low(node: Node) -> float:
    return float(max(node.get("minimum", -math.inf), node.get("exclusiveMinimum", -math.inf)))


def _high(node: Node) -> float:
    return float(min(node.get("maximum", math.inf), node.get("exclusiveMaximum", math.inf)))
