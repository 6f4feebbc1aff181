"""Keywords that most backends refuse, in terms of those that they enforce, where both mean the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dovetail.sdk.schemas import schema
from dovetail.sdk.schemas.origins import SchemaOrigin
from dovetail.sdk.schemas.types import kinds_in_common, kinds_of, values_of
from dovetail_grammar.rewriting import counts
from dovetail_grammar.rewriting.disjoint import Disjoint
from dovetail_grammar.rewriting.finder import Finder
from dovetail_grammar.rewriting.logic import Logic, all_of, any_of, is_closed
from dovetail_grammar.rewriting.names import NameRules
from dovetail_grammar.rewriting.unevaluated import EvaluatedReader

Node = dict[str, Any]
MAX_OPTIONS = 24
"""Alternatives that one keyword may become, and options of a `oneOf` that are looked at."""
MAX_PRODUCT = 48
"""Alternatives of one schema, multiplied."""
MAX_SEARCHES = 50
"""Schemas of one document of which it is asked whether less may be allowed."""


class Rewriter:
    """Rewrites one document in place."""

    def __init__(self, root: Any, places: dict[int, SchemaOrigin], room: int) -> None:
        """Prepare.

        Args:
            root: The document.
            places: Where its parts stood.
            room: How many characters it may grow by.
        """
        self._root = root
        self._places = places
        self._room = room
        finder = Finder()
        self._logic = Logic(root.get("$defs", {}) if isinstance(root, dict) else {}, finder)
        self._disjoint = Disjoint(self._logic, finder)
        self._evaluated = EvaluatedReader(self._logic)
        self._names = NameRules(self._logic, finder)
        self._num_searches = 0
        self._kept: list[Any] = []  # objects that `places` knows by identity

    def run(self) -> bool:
        """Rewrite; returns whether there is a keyword to rewrite."""
        every = [node for _, node in schema.every(self._root) if isinstance(node, dict)]
        if all(map(KEYWORDS.isdisjoint, every)):
            return False
        for node in every:
            _rest_of_items(node)
            _contained(node)
        for node in every:
            if not KEYWORDS.isdisjoint(node):
                for key, rewriting in REWRITES.items():
                    if key in node:
                        rewriting(self, node)
        return True

    def _replace(self, node: Node, key: str, made: Any, *also: str, most: int = MAX_PRODUCT) -> bool:
        """Put a schema in a keyword's place, if there is room for it.

        Args:
            node: Where the keyword stands.
            key: The keyword.
            made: The schema.
            also: Keywords that go with it.
            most: How many alternatives the node may then have in all.
        """
        if made is None or not self._fits(node, made, most):
            return False
        for name in (key, *also):
            node.pop(name, None)
        self._mark(made, self._place(node, key))
        if made is True:
            return True
        if isinstance(made, dict) and set(made) == {"anyOf"} and "anyOf" not in node:
            node["anyOf"] = made["anyOf"]
            if (place := self._places.get(id(node))) is not None:
                self._places[id(node)] = replace(place, names={**(place.names or {}), "anyOf": key})
        else:
            node.setdefault("allOf", []).append(made)
        return True

    def _fits(self, node: Node, made: Any, most: int = MAX_PRODUCT) -> bool:
        options = len(made["anyOf"]) if isinstance(made, dict) and "anyOf" in made else 1
        size = len(json.dumps(made)) if options > 1 else 0
        if options * _num_alternatives(node) > most or size > self._room:
            return False
        self._room -= size
        return True

    def _place(self, node: Node, key: str) -> SchemaOrigin | None:
        place = self._places.get(id(node))
        return None if place is None else SchemaOrigin(place.keyword([key]), whole=True)

    def _mark(self, made: Any, place: SchemaOrigin | None) -> None:
        """Note where a new schema's parts come from; parts that stood in the document keep their own place."""
        if place is None:
            return
        for _, part in schema.every(made):
            if isinstance(part, dict) and id(part) not in self._places:
                self._places[id(part)] = place
                self._kept.append(part)

    def unevaluated(self, node: Node) -> None:
        """Where it is known what is evaluated, the rest is what is additional."""
        found = self._evaluated.evaluated(node)
        if found is None:
            return
        rest = node.pop("unevaluatedProperties")
        if found.all_of_them:
            return
        for key, names in (("properties", found.names), ("patternProperties", found.patterns)):
            if names:
                node[key] = {**dict.fromkeys(names, True), **node.get(key, {})}
        node["additionalProperties"] = rest
        if (place := self._places.get(id(node))) is not None:
            called = {**(place.names or {}), "additionalProperties": "unevaluatedProperties"}
            self._places[id(node)] = replace(place, names=called)

    def negation(self, node: Node) -> None:
        """`not`, where the opposite can be said."""
        self._replace(node, "not", self._logic.opposite(node["not"], _beside(node, "not")))

    def condition(self, node: Node) -> None:
        """`if`: it and `then` hold, or its opposite and `else` do."""
        first, then, other = node["if"], node.get("then", True), node.get("else", True)
        if then is True and other is True:
            return  # it is there for what it evaluates
        if then is True:
            made = any_of([first, other])
        else:
            opposite = self._logic.opposite(first, _beside(node, "if", "then", "else"))
            made = None if opposite is None else any_of([all_of([first, then]), all_of([opposite, other])])
        self._replace(node, "if", made, "then", "else")

    def dependents(self, node: Node) -> None:
        """A property is not there, or what depends on it is. Both name it: keys come in the order of names."""
        made = [
            any_of([_absent(name), {"properties": {name: {}}, "required": needed}])
            for name, needed in node["dependentRequired"].items()
            if needed
        ]
        self._replace_each(node, "dependentRequired", made)

    def dependent_schemas(self, node: Node) -> None:
        """As above, with schemas."""
        made = [
            any_of([_absent(name), all_of([{"properties": {name: {}}}, part])])
            for name, part in node["dependentSchemas"].items()
        ]
        self._replace_each(node, "dependentSchemas", made)

    def _replace_each(self, node: Node, key: str, made: list[Any]) -> None:
        if 2 ** len(made) * _num_alternatives(node) <= MAX_PRODUCT:
            place = self._place(node, key)
            del node[key]
            for part in made:
                self._mark(part, place)
            node["allOf"] = [*node.get("allOf", ()), *made]
            if not node["allOf"]:
                del node["allOf"]

    def one_of(self, node: Node) -> None:
        """Options that exclude each other may be `anyOf`, and so may others with each other's opposites."""
        options = [option for option in node["oneOf"] if option is not False]
        if not options or len(options) > 4 * MAX_OPTIONS:
            return
        beside = _beside(node, "oneOf")
        made = []
        for index, option in enumerate(options):
            parts = [option]
            for other in options[:index] + options[index + 1 :]:
                if self._disjoint.are_disjoint(option, other, beside):
                    continue
                opposite = self._without(option, other, beside) if len(options) <= MAX_OPTIONS else None
                if opposite is None:
                    if self._is_negated(node):
                        return  # to allow less here would allow more there
                    opposite = self._logic.outside(other, self._known(option, beside))
                    if opposite is None or self._disjoint.are_disjoint(option, opposite, beside):
                        return
                parts.append(opposite)
            made.append(all_of(parts))
        changed = any(part is not option for part, option in zip(made, options, strict=True))
        if changed:
            self._replace(node, "oneOf", any_of(made))
            return
        del node["oneOf"]
        if "anyOf" in node:
            node.setdefault("allOf", []).append({"anyOf": options})
            self._mark(node["allOf"][-1], self._place(node, "oneOf"))
        else:
            node["anyOf"] = options

    def _is_negated(self, node: Node) -> bool:
        """Whether a schema stands, or is referred to, in a keyword that allows more where the schema allows less.

        Schemas around one are rewritten before it. The document is searched each time, so only for a few schemas.
        """
        self._num_searches += 1
        if self._num_searches > MAX_SEARCHES:
            return True
        every = (each for _, each in schema.every(self._root) if isinstance(each, dict))
        waiting = [part for each in every if each is not node for part in _negated(each)]
        found: set[int] = set()
        while waiting:
            for _, part in schema.every(waiting.pop()):
                if not isinstance(part, dict) or id(part) in found:
                    continue
                found.add(id(part))
                if isinstance(part.get("$ref"), str):
                    waiting.append(self._root if part["$ref"] == "#" else self._logic.followed({"$ref": part["$ref"]}))
        return id(node) in found

    def _known(self, option: Any, beside: Node) -> Node:
        """Return what is known of an option's instances."""
        own = self._disjoint.seen(option)
        if not isinstance(own, dict):
            return beside
        kinds = sorted(kinds_in_common(kinds_of(own), kinds_of(beside)))
        return {**beside, "type": kinds, "required": [*beside.get("required", ()), *own.get("required", ())]}

    def _without(self, option: Any, other: Any, beside: Node) -> Any:
        """Return what must hold, too, of an option's instances not to conform to another; None where none can say."""
        one, two = self._disjoint.seen(option), self._logic.followed(other)
        if not isinstance(one, dict) or not isinstance(two, dict):
            return self._logic.opposite(other, beside)
        kinds = kinds_in_common(kinds_in_common(kinds_of(one), kinds_of(two)), kinds_of(beside))
        if kinds == {"array"} and two.keys() <= _ARRAYS and self._disjoint.are_items_disjoint(one, two):
            return {"minItems": 1}  # an empty array is all that conforms to both
        named, listed = one.get("properties", {}), beside.get("properties", {})
        known = {**beside, "type": sorted(kinds_in_common(kinds_of(one), kinds_of(beside)))}
        known["properties"] = {**listed, **{n: part for n, part in named.items() if values_of(listed.get(n)) is None}}
        own = self._logic.followed(option)
        if isinstance(own, dict) and is_closed(own):
            known["additionalProperties"] = False
            known["properties"] = {name: known["properties"][name] for name in named}
            known.pop("patternProperties", None)
        return self._logic.opposite(other, known)

    def property_names(self, node: Node) -> None:
        """Names that are listed are properties, and those that match are properties by pattern."""
        made = self._names.said_of(node)
        if made is None:
            return
        if "patternProperties" not in node and (place := self._places.get(id(node))) is not None:
            self._places[id(node)] = replace(place, names={**(place.names or {}), "patternProperties": "propertyNames"})
        del node["propertyNames"]
        node |= made

    def min_properties(self, node: Node) -> None:
        """Some of the optional properties are there, or others that are not declared."""
        alternatives = counts.alternatives_of(node)
        if alternatives is not None:
            self._replace(node, "minProperties", any_of(alternatives or _not_object(node)), most=counts.MAX_SINGLE + 1)


REWRITES: dict[str, Callable[[Rewriter, Node], None]] = {
    "unevaluatedProperties": Rewriter.unevaluated,
    "propertyNames": Rewriter.property_names,
    "not": Rewriter.negation,
    "if": Rewriter.condition,
    "dependentRequired": Rewriter.dependents,
    "dependentSchemas": Rewriter.dependent_schemas,
    "oneOf": Rewriter.one_of,
    "minProperties": Rewriter.min_properties,
}
KEYWORDS = frozenset((*REWRITES, "contains", "unevaluatedItems"))
_IN_PLACE = frozenset(("$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas", "contains"))
_ARRAYS = frozenset(("type", "items", "maxItems", "uniqueItems"))
"""Keywords with which a schema allows an empty array."""


def _rest_of_items(node: Node) -> None:
    """Where nothing in place evaluates, the items that are unevaluated are those behind the first."""
    if "unevaluatedItems" in node and _IN_PLACE.isdisjoint(node):
        node.setdefault("items", node.pop("unevaluatedItems"))


def _contained(node: Node) -> None:
    """Without a condition, what is contained is counted."""
    if "contains" not in node or "unevaluatedItems" in node:
        return
    least, most = node.get("minContains", 1), node.get("maxContains")
    if node["contains"] in (True, {}):
        node["minItems"] = max(node.get("minItems", 0), least)
        if most is not None:
            node["maxItems"] = min(node.get("maxItems", most), most)
    elif least or most is not None:
        return
    for key in ("contains", "minContains", "maxContains"):
        node.pop(key, None)
    if node.get("minItems") == 0:
        del node["minItems"]


def _beside(node: Node, *without: str) -> Node:
    """Return what else is known of a schema's instances."""
    return {key: value for key, value in node.items() if key not in without}


def _negated(node: Node) -> list[Any]:
    """Return the parts of a schema that it allows more with, the less they allow."""
    counted = ["contains"] if "maxContains" in node else []
    return [*node.get("oneOf", ()), *(node[key] for key in ("not", "if", *counted) if key in node)]


def _absent(name: str) -> Node:
    return {"properties": {name: False}}


def _not_object(node: Node) -> list[Any]:
    kinds = sorted(kinds_of(node) - {"object"})
    return [{"type": kinds}] if kinds else []


def _num_alternatives(node: Node) -> int:
    """How many alternatives a schema has already."""
    alternatives = len(node.get("anyOf", ())) or 1
    for part in node.get("allOf", ()):
        if isinstance(part, dict):
            alternatives *= len(part.get("anyOf", ())) or 1
    return alternatives
