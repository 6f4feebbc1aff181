"""Whether two schemas can both hold: what an `if` or `oneOf` asks before it becomes plain alternatives."""

from __future__ import annotations

import math
from typing import Any

from dovetail.sdk.schemas.types import kinds_in_common, kinds_of, types_of_value, values_of
from dovetail_grammar.rewriting.finder import Finder
from dovetail_grammar.rewriting.logic import Logic, Node, all_of, is_same

MAX_DEPTH = 5
MAX_LOOKS = 50_000
"""Schemas that are looked at to compare one document's options."""


class Disjoint:
    """Compares the schemas of one document."""

    def __init__(self, logic: Logic, finder: Finder) -> None:
        """Keep what follows references, and what finds expressions in texts."""
        self._logic = logic
        self._finder = finder
        self._looks = MAX_LOOKS

    def are_disjoint(self, first: Any, second: Any, beside: Node, depth: int = 0) -> bool:
        """Whether no instance can conform to both. May say no where it is so.

        Args:
            first: A schema.
            second: Another.
            beside: What both are alternatives in.
            depth: Of the recursion.
        """
        self._looks -= 1
        if depth > MAX_DEPTH or self._looks < 0:
            return False
        one, two = self.seen(first, depth), self.seen(second, depth)
        if one is False or two is False:
            return True
        kinds = kinds_in_common(kinds_in_common(kinds_of(one), kinds_of(two)), kinds_of(beside))
        if not kinds:
            return True
        for node, other in ((one, two), (two, one)):
            values = values_of(node)
            if values is not None and not any(self._may_be(value, other, kinds) for value in values):
                return True
        if kinds == {"object"} and self._objects_disjoint(one, two, beside, depth):
            return True
        return self._options_disjoint(one, two, beside, depth) or self._options_disjoint(two, one, beside, depth)

    def are_items_disjoint(self, one: Node, two: Node, depth: int = 0) -> bool:
        """Whether an array that conforms to both of two schemas, as `seen`, has no items."""
        if "prefixItems" in one or "prefixItems" in two or not ("items" in one and "items" in two):
            return False
        return self.are_disjoint(one["items"], two["items"], {}, depth + 1)

    def _options_disjoint(self, one: Node, two: Node, beside: Node, depth: int) -> bool:
        """Whether each option of a schema is apart from another schema."""
        for key in ("anyOf", "oneOf"):
            if key in one:
                rest = {name: value for name, value in one.items() if name not in _SEEN}
                parts = [{"allOf": [rest, option]} for option in one[key]]
                if all(self.are_disjoint(part, two, beside, depth + 1) for part in parts):
                    return True
        return False

    def _objects_disjoint(self, one: Node, two: Node, beside: Node, depth: int) -> bool:
        required = dict.fromkeys((*one.get("required", ()), *two.get("required", ()), *beside.get("required", ())))
        for name in required:
            first, second = _property(one, name), _property(two, name)
            declared = self._logic.followed(beside.get("properties", {}).get(name, {}))
            known = declared if isinstance(declared, dict) else {}
            if first is False or second is False or self.are_disjoint(first, second, known, depth + 1):
                return True
        return False

    def seen(self, node: Any, depth: int = 0) -> Any:
        """Return a schema with the plain keywords of its references and conjunctions beside its own."""
        node = self._logic.followed(node)
        self._looks -= 1
        if not isinstance(node, dict) or depth > MAX_DEPTH or self._looks < 0:
            return {} if node is True or not isinstance(node, bool) else False
        parts = [self.seen(part, depth + 1) for part in node.get("allOf", ())]
        if "$ref" in node:
            parts.append(self.seen({"$ref": node["$ref"]}, depth + 1))
        made = dict(node)
        for part in parts:
            if part is False:
                return False
            _merge(made, part)
        return made

    def _may_be(self, value: Any, node: Node, kinds: frozenset[str]) -> bool:
        """Whether a value may conform to a schema, by its type, its values, and what is said of a string."""
        if not types_of_value(value) & kinds:
            return False
        values = values_of(node)
        if values is not None and not any(is_same(value, other) for other in values):
            return False
        if not isinstance(value, str):
            return True
        if not node.get("minLength", 0) <= len(value) <= node.get("maxLength", math.inf):
            return False
        try:
            return "pattern" not in node or self._finder.matches(node["pattern"], value)
        except ValueError:
            return True


_MERGED = ("type", "anyOf", "oneOf", "pattern", "minLength", "maxLength")
"""Keywords of which one part of a conjunction says enough to be told apart by."""


def _merge(made: Node, part: Node) -> None:
    """Put the plain keywords of a conjunction's part beside those that are known."""
    if "type" in part and "type" in made:
        made["type"] = sorted(kinds_in_common(kinds_of(made), kinds_of(part)))
    values, others = values_of(made), values_of(part)
    if others is not None:
        made.pop("const", None)
        made["enum"] = [one for one in others if values is None or any(is_same(one, value) for value in values)]
    for key in _MERGED:
        if key in part:
            made.setdefault(key, part[key])
    made["required"] = [*made.get("required", ()), *part.get("required", ())]
    named = dict(made.get("properties", {}))
    for name, said in part.get("properties", {}).items():
        named[name] = said if named.get(name, True) in (True, {}) else all_of([named[name], said])
    made["properties"] = named


_SEEN = ("anyOf", "oneOf", "allOf", "$ref")
"""Keywords that `seen` has looked into."""


def _property(node: Node, name: str) -> Any:
    """Return what a schema says of a property's value."""
    if name in node.get("properties", {}):
        return node["properties"][name]
    if "patternProperties" in node or "additionalProperties" not in node:
        return {}
    return node["additionalProperties"]
