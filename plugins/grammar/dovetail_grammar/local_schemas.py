"""Schemas whose properties and items do not depend on each other, and what may hold at a place in their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.sdk.schemas.keywords import ANNOTATIONS, DEFINITIONS
from dovetail.sdk.schemas.schema import resolve

MAX_NAMES, MAX_DEPTH = 1024, 64
"""Names of properties whose schemas are kept, of one object; references in a row up to which they are followed."""
_BOUNDED_ITEMS, _BOUNDED_CHARS = ("minItems", "maxItems"), ("minLength", "maxLength")
_OF_STRINGS = frozenset(["pattern", "format", "enum", "const"])
_OF_NUMBERS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const"])
_LOCAL = (
    ANNOTATIONS
    | DEFINITIONS
    | _OF_STRINGS
    | _OF_NUMBERS
    | {*_BOUNDED_ITEMS, *_BOUNDED_CHARS, "type", "properties", "patternProperties", "additionalProperties", "required"}
    | {"minProperties", "maxProperties", "items", "prefixItems", "allOf", "anyOf", "oneOf", "$ref", "x-guidance"}
)
"""Keywords that tell nothing of a value by another value that stands beside it or before it."""
_CONTAINERS = frozenset(["object", "array"])


class Schemas:
    """All schemas that may hold at one place; more than do hold only tell apart what need not be."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]], made: Made) -> None:
        """`nodes`: with the alternatives, parts and references in them."""
        self.nodes, self._made = nodes, made
        self.lengths = _bounds(self.nodes, _BOUNDED_CHARS)
        self.counts = _bounds(self.nodes, _BOUNDED_ITEMS)
        self.reads_strings = any(not _OF_STRINGS.isdisjoint(node) for node in self.nodes)
        self.reads_numbers = any(not _OF_NUMBERS.isdisjoint(node) for node in self.nodes)
        self.has_places = any("prefixItems" in node for node in self.nodes)
        self._values: dict[str, Schemas] = {}
        self._items: Schemas | None = None

    def value(self, name: str) -> Schemas:
        """Return what may hold for a property."""
        found = self._values.get(name)
        if found is None:
            parts: list[Any] = []
            for node in self.nodes:
                parts += [node["properties"][name]] if name in node.get("properties", ()) else []
                parts += [*node.get("patternProperties", {}).values(), node.get("additionalProperties")]
            found = self._made.of(parts)
            if len(self._values) < MAX_NAMES:
                self._values[name] = found
        return found

    @property
    def items(self) -> Schemas:
        """What may hold for an item, at any place."""
        if self._items is None:
            parts = [part for node in self.nodes for part in (node.get("items"), *node.get("prefixItems", ()))]
            self._items = self._made.of(parts)
        return self._items

    def end(self) -> None:
        """Release those of properties and items."""
        self._values.clear()
        self._items = None


class Made:
    """The `Schemas` of one document, one for the same schemas."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[frozenset[int], Schemas] = {}

    def of(self, nodes: Sequence[Any]) -> Schemas:
        """Return what holds where all of `nodes` may."""
        flat = _flat(nodes, self._root)
        return self._known.setdefault(frozenset(map(id, flat)), Schemas(flat, self))

    def end(self) -> None:
        """Release all `Schemas`, which know each other."""
        for schemas in self._known.values():
            schemas.end()
        self._known.clear()


def _flat(nodes: Sequence[Any], root: Any) -> list[Mapping[str, Any]]:
    found: dict[int, Mapping[str, Any]] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if not isinstance(node, dict) or id(node) in found:
            continue
        found[id(node)] = node
        stack += (part for key in ("allOf", "anyOf", "oneOf") for part in node.get(key, ()))
        if "$ref" in node:
            stack.append(_resolve(root, node["$ref"]))
    return list(found.values())


def _bounds(nodes: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> tuple[int, ...]:
    return tuple(sorted({int(node[key]) for node in nodes for key in keys if key in node}))


def is_local(schema: Any) -> bool:
    """Whether what may follow in an open container never depends on a value that was closed in it."""
    stack, seen, containers = [schema], set(), _Containers(schema)
    while stack:
        node = stack.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        if not node.keys() <= _LOCAL or not isinstance(node.get("items", True), (dict, bool)):
            return False
        values = [*node.get("enum", ()), node.get("const")]
        if any(isinstance(value, (dict, list)) for value in values):
            return False
        for key in ("anyOf", "oneOf"):
            admitted = [kind for part in node.get(key, ()) for kind in containers.of(part)]
            if len(admitted) > len(set(admitted)):
                return False  # which alternative holds may show in a value only
        if "$ref" in node:
            try:
                stack.append(_resolve(schema, node["$ref"]))
            except KeyError:
                return False
        stack += (part for key in ("allOf", "anyOf", "oneOf", "prefixItems") for part in node.get(key, ()))
        stack += (part for key in ("properties", "patternProperties") for part in node.get(key, {}).values())
        stack += (node.get("items"), node.get("additionalProperties"))
    return True


class _Containers:
    """The kinds of containers that schemas of a document may admit; rather too many. Each schema is looked at once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, frozenset[str]] = {}

    def of(self, node: Any, depth: int = 0) -> frozenset[str]:
        """Return those of a schema."""
        if node is False:
            return frozenset()
        if not isinstance(node, dict) or depth > MAX_DEPTH:
            return _CONTAINERS
        if id(node) not in self._known:
            self._known[id(node)] = _CONTAINERS  # what leads back to itself
            self._known[id(node)] = self._found(node, depth + 1)
        return self._known[id(node)]

    def _found(self, node: Mapping[str, Any], depth: int) -> frozenset[str]:
        if "enum" in node or "const" in node:
            return frozenset()  # of scalars, or the schema is not local
        found = _CONTAINERS
        if "type" in node:
            found &= {node["type"]} if isinstance(node["type"], str) else set(node["type"])
        for key in ("anyOf", "oneOf"):
            if node.get(key):
                found &= frozenset[str]().union(*(self.of(part, depth) for part in node[key]))
        for part in node.get("allOf", ()):
            found &= self.of(part, depth)
        if "$ref" in node and found:
            try:
                found &= self.of(_resolve(self._root, node["$ref"]), depth)
            except KeyError:
                return found
        return found


def _resolve(root: Any, reference: str) -> Any:
    """Return what a JSON pointer names; anchors would have to be looked for in all of the document each time.

    Raises:
        KeyError: Nothing, or it is no pointer.
    """
    if reference != "#" and not reference.startswith("#/"):
        raise KeyError(reference)
    return resolve(root, reference)
