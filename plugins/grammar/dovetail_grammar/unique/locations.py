"""Where a schema in the normal form asks for `uniqueItems`, and what of it a reader of the text has to know for that.

Alternatives are not told apart: where one of them asks for it, the array's items differ. So no text is let through that
a schema forbids, and of an array that one alternative allows to repeat itself the others decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from dovetail.sdk.schemas.schema import escape
from dovetail_grammar.unique.values import goes_on

Node = dict[str, Any]
KEY = "uniqueItems"
MIXED = "x-mixed"
"""Of what is returned: items of one array differ in what they may be. What one can be says nothing of another then."""
HERE = ("allOf", "anyOf", "oneOf")
_PLAIN = re.compile(r"(\^?)([\w /-]*)", re.ASCII)
_ONE = ("items", "additionalProperties")
_LISTS = (*HERE, "prefixItems")
_MAPS = ("properties", "patternProperties")


def unique_places(schema: Any) -> tuple[Any, frozenset[str]]:
    """Return the part of a schema that leads to arrays with differing items, and pointers of the keyword there.

    Left to others are arrays of which the first items are described one by one, and where what one of them is can
    leave nothing for another that must come: only a search over all of them would see that.

    Returns:
        None and nothing where there are no such arrays.
    """
    if not isinstance(schema, dict):
        return None, frozenset()
    nodes = list(_positive(schema))
    asked = [(pointer, node) for pointer, node in nodes if node.get(KEY) is True]
    if not asked:
        return None, frozenset()
    definitions = {f"#/$defs/{escape(name)}": node for name, node in schema.get("$defs", {}).items()}
    found = {pointer for pointer, node in asked if _is_watchable(node, definitions)}
    if not found:
        return None, frozenset()
    leading = _leading(schema, found)
    root = _pruned({key: value for key, value in schema.items() if key != "$defs"}, "", found, leading) or {}
    if any("prefixItems" in node for _, node in nodes):
        root[MIXED] = True
    pruned = {
        name: made
        for name, node in schema.get("$defs", {}).items()
        if (made := _pruned(node, f"/$defs/{escape(name)}", found, leading)) is not None
    }
    return (root | {"$defs": pruned} if pruned else root), frozenset(f"{place}/{KEY}" for place in found)


def _is_watchable(node: Node, definitions: Node) -> bool:
    if isinstance(node.get("items"), list):
        return False  # of an older draft, as it came
    return "prefixItems" not in node or goes_on(node, definitions)


def _leading(schema: Node, found: set[str]) -> set[str]:
    """Return the references that lead to one of some places, over others as well."""
    parts = {f"#/$defs/{escape(name)}": node for name, node in schema.get("$defs", {}).items()} | {"#": schema}
    holders: dict[str, list[str]] = {}
    reached: list[str] = []
    for name, part in parts.items():
        stack: list[tuple[str, Any]] = [(name[1:], part)]
        while stack:
            pointer, node = stack.pop()
            if isinstance(node, dict):
                stack += _children(node, pointer)
                if pointer in found:
                    reached.append(name)
                if "$ref" in node:
                    holders.setdefault(node["$ref"], []).append(name)
    leading: set[str] = set()
    while reached:
        name = reached.pop()
        if name not in leading:
            leading.add(name)
            reached += holders.get(name, ())
    return leading


def _positive(schema: Node) -> Iterator[tuple[str, Node]]:
    """Yield the schemas that a value of the text has to conform to, or may."""
    stack: list[tuple[str, Any]] = [("", schema)]
    seen: set[int] = set()
    definitions = {f"#/$defs/{escape(name)}": node for name, node in schema.get("$defs", {}).items()}
    while stack:
        pointer, node = stack.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield pointer, node
        stack += _children(node, pointer)
        if (name := node.get("$ref")) in definitions:
            stack.append((name[1:], definitions[name]))


def _children(node: Node, pointer: str) -> Iterator[tuple[str, Any]]:
    yield from ((f"{pointer}/{key}", node[key]) for key in _ONE if key in node)
    for key in _LISTS:
        yield from ((f"{pointer}/{key}/{i}", part) for i, part in enumerate(node.get(key, ())))
    for key in _MAPS:
        yield from ((f"{pointer}/{key}/{escape(name)}", part) for name, part in node.get(key, {}).items())


def _pruned(node: Any, pointer: str, found: set[str], leading: set[str]) -> Node | None:
    """Return what of a schema leads to one of some places; references lead there that are in `leading`."""
    if not isinstance(node, dict):
        return None
    made: Node = {KEY: True} if pointer in found else {}
    if node.get("$ref") in leading:
        made["$ref"] = node["$ref"]
    for key in _ONE:
        if (part := _pruned(node.get(key), f"{pointer}/{key}", found, leading)) is not None:
            made[key] = part
    for key in _LISTS:
        parts = [_pruned(part, f"{pointer}/{key}/{i}", found, leading) for i, part in enumerate(node.get(key, ()))]
        if any(part is not None for part in parts):
            made[key] = [part or {} for part in parts]
    for key in _MAPS:
        named = {
            name: _pruned(part, f"{pointer}/{key}/{escape(name)}", found, leading)
            for name, part in node.get(key, {}).items()
        }
        if any(part is not None for part in named.values()) or (named and "additionalProperties" in made):
            made[key] = {name: part or {} for name, part in named.items()}
    return made or None


class ValueShape:
    """What a value in the text may have to conform to: all schemas that speak of it, alternatives among them."""

    def __init__(self, root: Node, nodes: tuple[Any, ...]) -> None:
        """Gather the schemas that hold in place."""
        self._root = root
        self._nodes: list[Node] = []
        stack, seen = list(nodes), set()
        while stack:
            node = stack.pop()
            if not isinstance(node, dict) or not node or id(node) in seen:
                continue
            seen.add(id(node))
            self._nodes.append(node)
            stack += [part for key in HERE for part in node.get(key, ())]
            if "$ref" in node:
                stack.append(_resolved(root, node["$ref"]))
        self._members: dict[str, ValueShape | None] = {}

    @cached_property
    def is_unique(self) -> bool:
        """Whether an array's items differ."""
        return any(node.get(KEY) is True for node in self._nodes)

    @property
    def is_mixed(self) -> bool:
        """See `MIXED`."""
        return MIXED in self._root

    @cached_property
    def _declared(self) -> frozenset[str]:
        return frozenset(name for node in self._nodes for name in node.get("properties", ()))

    @cached_property
    def _rest(self) -> ValueShape | None:
        return self._shape([node["items"] for node in self._nodes if "items" in node])

    def item(self, index: int) -> ValueShape | None:
        """Return what is said of an array's item; None for nothing."""
        first = [node["prefixItems"] for node in self._nodes if "prefixItems" in node]
        if not any(index < len(parts) for parts in first):
            return self._rest
        found = [parts[index] for parts in first if index < len(parts)]
        return self._shape([*found, *(node["items"] for node in self._nodes if "items" in node)])

    def member(self, name: str) -> ValueShape | None:
        """Return what is said of an object's value; None for nothing."""
        if name not in self._declared and not self._has_plain_patterns:
            return self._other
        if name not in self._members:
            found = self._shape([part for node in self._nodes for part in _parts_of(node, name)])
            if name not in self._declared:
                return found  # any number of names may come
            self._members[name] = found
        return self._members[name]

    @cached_property
    def _has_plain_patterns(self) -> bool:
        """Whether the name of an undeclared property says which patterns find it."""
        return any(_PLAIN.fullmatch(pattern) for node in self._nodes for pattern in node.get("patternProperties", ()))

    @cached_property
    def _other(self) -> ValueShape | None:
        return self._shape([part for node in self._nodes for part in _parts_of(node, "")])

    def _shape(self, nodes: list[Any]) -> ValueShape | None:
        made = ValueShape(self._root, tuple(nodes))
        return made if made._nodes else None


def _parts_of(node: Node, name: str) -> Iterator[Any]:
    named = node.get("properties", {})
    if name in named:
        yield named[name]
    elif "additionalProperties" in node:
        yield node["additionalProperties"]
    yield from (part for pattern, part in node.get("patternProperties", {}).items() if _may_match(pattern, name))


def _may_match(pattern: str, name: str) -> bool:
    """Whether a pattern may find something: yes but for plain texts. No expression runs in the engine's thread."""
    plain = _PLAIN.fullmatch(pattern)
    if plain is None:
        return True
    return name.startswith(plain[2]) if plain[1] else plain[2] in name


def _resolved(root: Node, reference: str) -> Any:
    if reference == "#":
        return root
    name = reference.removeprefix("#/$defs/").replace("~1", "/").replace("~0", "~")
    return root.get("$defs", {}).get(name, {})


def shape_of(schema: Mapping[str, Any]) -> ValueShape:
    """Return what is said of the whole text, by what `unique_places` returned."""
    return ValueShape(dict(schema), (dict(schema),))
