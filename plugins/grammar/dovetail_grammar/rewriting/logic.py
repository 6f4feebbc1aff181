"""What a schema's opposite is, where plain keywords can say so."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.sdk.schemas import schema
from dovetail.sdk.schemas.types import kinds_in_common, kinds_of, types_of_value
from dovetail_grammar.rewriting.finder import Finder

Node = dict[str, Any]
MAX_ALTERNATIVES = 12
"""Alternatives of an opposite."""
MAX_ABSENT = 3
"""Properties of which one is absent."""
MAX_DEPTH = 5
MAX_TEXTS = 64
"""Texts that a string is said not to be."""
MAX_NUMBERS = 3
"""Numbers that a number is said not to be, …"""
LARGEST_EXACT = 2**53
"""… none of them beyond what a float tells from its neighbours."""
_PLAIN = r"[A-Za-z0-9_ /:@!#%&,;<=>~\"'`-]"
"""Characters that mean themselves in every dialect of expressions."""
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
_LISTED: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
"""Values of the types that have few."""


class Logic:
    """Questions about schemas of one document."""

    def __init__(self, definitions: Mapping[str, Any], finder: Finder) -> None:
        """Keep the definitions, which references lead to, and what reads expressions."""
        self._definitions = definitions
        self._finder = finder

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
        alternatives: list[Any] = []
        for key, value in node.items():
            if key in ("then", "else", "minContains", "maxContains"):
                return None
            found = self._opposite_of(key, value, node, beside, depth)
            if found is None:
                return None
            alternatives += found
        return any_of(alternatives) if len(alternatives) <= MAX_ALTERNATIVES else None

    def outside(self, node: Any, beside: Node) -> Any:
        """Return a schema of some instances that another does not hold for, None where none are known.

        Those that lack a property that it requires, and that its neighbour in a `oneOf` does not: all that are written,
        mostly. Else those that break one of the keywords whose opposite can be said.

        Args:
            node: The schema.
            beside: What is known of the instances; without those that this requires the schema cannot be told apart.
        """
        node = self.followed(node)
        if not isinstance(node, dict):
            return None
        merged = [part for part in (node, *map(self.followed, node.get("allOf", ()))) if isinstance(part, dict)]
        known = set(beside.get("required", ()))
        names = dict.fromkeys(name for part in merged for name in part.get("required", ()) if name not in known)
        if names:
            return any_of([{"type": "object", "properties": {name: False}} for name in names][:MAX_ABSENT])
        alternatives: list[Any] = []
        for part in merged:
            for key in part.keys() & {"type", "properties", "enum", "const", "pattern"}:
                if key != "properties":
                    alternatives += self._opposite_of(key, part[key], part, beside, 0) or ()
                    continue
                for name, value in part[key].items():
                    alternatives += self._other_properties({name: value}, beside, 0) or ()
        return any_of(alternatives[:MAX_ALTERNATIVES]) if alternatives else None

    def _opposite_of(self, key: str, value: Any, node: Node, beside: Node, depth: int) -> list[Any] | None:
        """Alternatives that together are one keyword's opposite."""
        if key in _INVERSE:
            kind, other, step = _INVERSE[key]
            return [{"type": kind, other: value + step}] if value + step >= 0 or kind == "number" else []
        if key == "type":
            return _other_types(node, beside)
        if key == "pattern":
            others = self._finder.complement(value)
            return None if others is None else [{"type": "string", "pattern": others}]
        if key in ("enum", "const"):
            return _other_values(value if key == "enum" else [value], node, beside)
        if key == "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        if key == "properties":
            return self._other_properties(value, beside, depth)
        if key == "additionalProperties":
            return _other_names(node, beside) if value is False else None
        if key == "not":
            return [value]
        if key in ("allOf", "anyOf"):
            parts = [self.opposite(part, beside, depth + 1) for part in value]
            return None if any(part is None for part in parts) else parts if key == "allOf" else [all_of(parts)]
        return None

    def _other_properties(self, value: Mapping[str, Any], beside: Node, depth: int) -> list[Any] | None:
        """Some property is there and is not what it should be."""
        alternatives = []
        for name, part in value.items():
            if is_closed(beside) and name not in beside.get("properties", {}):
                continue  # it cannot be there
            declared = self.followed(beside.get("properties", {}).get(name, {}))
            other = self.opposite(part, declared if isinstance(declared, dict) else {}, depth + 1)
            if other is None:
                return None
            if other is not False:
                alternatives.append({"type": "object", "required": [name], "properties": {name: other}})
        return alternatives


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


def _other_types(node: Node, beside: Node) -> list[Any] | None:
    taken = set(kinds_of(node))
    if "integer" in taken and "number" not in taken and "number" in kinds_of(beside):
        return None  # numbers that are not whole have no name
    if taken & _NUMBERS:
        taken |= _NUMBERS
    rest = [kind for kind in schema.TYPES if kind not in taken and kind != "integer"]
    return [{"type": rest}] if rest else []


def is_closed(node: Node) -> bool:
    """Whether an object has none but the properties that are listed."""
    return node.get("additionalProperties") is False and "patternProperties" not in node


def _other_names(node: Node, beside: Node) -> list[Any] | None:
    """A property is there that a schema does not list, where the instance has some of few names only."""
    if not is_closed(beside) or "patternProperties" in node:
        return None
    listed = node.get("properties", {})
    others = [name for name, part in beside.get("properties", {}).items() if part is not False and name not in listed]
    return [{"type": "object", "required": [name]} for name in others]


def _other_values(values: Sequence[Any], node: Node, beside: Node) -> list[Any] | None:
    kinds = kinds_in_common(kinds_of(beside), kinds_of(node))
    listed = [value for kind in sorted(kinds & _LISTED.keys()) for value in _LISTED[kind]]
    rest = [value for value in listed if not any(is_same(value, other) for other in values)]
    alternatives: list[Any] = [{"enum": rest}] if rest else []
    if "string" in kinds:
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) > MAX_TEXTS or not all(re.fullmatch(rf"(?:{_PLAIN}|[.+*?])+", text) for text in texts):
            return None
        plain = "|".join(re.sub(r"[.+*?]", r"\\\g<0>", text) for text in texts)
        alternatives.append({"type": "string"} | ({"pattern": f"^(?!(?:{plain})$)"} if texts else {}))
    if kinds & _NUMBERS:
        numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
        if len(numbers) > MAX_NUMBERS or any(abs(number) > LARGEST_EXACT for number in numbers):
            return None
        alternatives += _between(sorted(set(numbers)), "number" if "number" in kinds else "integer")
    whole = [kind for kind in ("array", "object") if kind in kinds]
    if any(isinstance(value, (list, dict)) for value in values if types_of_value(value) & set(whole)):
        return None
    return alternatives + ([{"type": whole}] if whole else [])


def _between(numbers: Sequence[float], kind: str) -> list[Any]:
    """Numbers that are none of some: below, between and above them."""
    made: list[Any] = []
    for low, high in zip([None, *numbers], [*numbers, None], strict=True):
        option: Node = {"type": kind}
        option |= {} if low is None else {"exclusiveMinimum": low}
        option |= {} if high is None else {"exclusiveMaximum": high}
        made.append(option)
    return made
