"""JSON Schemas of every draft in one form: draft 2020-12's keywords, local references, nothing that says nothing.

It knows where each keyword stood in the schema as it was given.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dovetail.sdk.schemas import keywords, schema
from dovetail.sdk.schemas.keywords import CONTENT, MEANING, draft_of
from dovetail.sdk.schemas.origins import SchemaOrigin, origin_of
from dovetail.sdk.schemas.references import REFERENCES, ReferencedSchema, References

# Whether a schema is in the normal form as it was given: most that requests bring are, and need no second copy.

MAX_TEXT = 16 * 1024
"""Characters of a schema that is kept with its descriptions: a longer one is written without."""
_SAID = ("title", "description", "default", "examples")
_EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_SILENT_PATTERNS = ("", ".*", "^.*")
_SCHEMA = frozenset(("items", "additionalProperties"))
_LISTED = frozenset(("properties", "anyOf"))
_NAME = re.compile(r"#/\$defs/([A-Za-z0-9_]+)")
_ELSEWHERE = frozenset(("$id", "id", "$schema", "$anchor"))
"""Beside any of these definitions may not be those of a document of today's draft."""
_BESIDE_REFERENCE = frozenset(("$ref", "description", "title"))


def is_normal(root: Any, num_chars: int = 0) -> bool:
    """Whether `normalize` would change nothing but leave out descriptions. May say no where it is so.

    Args:
        root: The schema.
        num_chars: Of its text.
    """
    if not isinstance(root, dict):
        return False
    named = root.get("$defs", {})
    plain = _PLAIN if num_chars <= MAX_TEXT else _BARE
    stack: list[Any] = [root]
    if named:
        if not isinstance(named, dict) or not _ELSEWHERE.isdisjoint(root):
            return False
        stack += named.values()
    while stack:
        node = stack.pop()
        if not isinstance(node, dict):
            if node is False:
                continue  # of additional properties
            return False
        for key, value in node.items():
            passes = plain.get(key)
            if passes is None or not passes(value):
                return False
            if key in _SCHEMA:
                stack.append(value)
            elif key in _LISTED:
                stack += value.values() if isinstance(value, dict) else value
        if "$ref" in node and not (_BESIDE_REFERENCE.issuperset(node) and _leads_to_one(node["$ref"], named)):
            return False
        if "$defs" in node and node is not root:
            return False
    return True


def _leads_to_one(reference: str, named: Mapping[str, Any]) -> bool:
    found = _NAME.fullmatch(reference)
    return found is not None and bool(named.get(found[1]))


def _is_schema(value: Any) -> bool:
    """Whether it is a schema that says something."""
    return isinstance(value, dict) and bool(value)


_PLAIN: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_SAID, lambda value: True),
    **dict.fromkeys(("type", "enum", "const", "format", "multipleOf"), lambda value: True),
    **dict.fromkeys(("properties", "anyOf", "$ref", "$defs"), lambda value: True),
    **dict.fromkeys(("minItems", "minLength"), lambda value: type(value) is int and value > 0),
    **dict.fromkeys(("maxItems", "maxLength"), lambda value: type(value) is int),
    **dict.fromkeys(("minimum", "maximum", *_EXCLUSIVE), lambda value: not isinstance(value, bool)),
    "required": bool,
    "items": _is_schema,
    "additionalProperties": lambda value: value is False or _is_schema(value),
    "pattern": lambda value: value not in _SILENT_PATTERNS,
}
"""Keywords that stay as they are, with a value that stays, too."""
_BARE = {key: passes for key, passes in _PLAIN.items() if key not in _SAID}
"""The same without descriptions."""


# One schema object: older drafts' keywords in the newest's words, and without what says nothing.

Node = dict[str, Any]
COUNTS = frozenset(f"{end}{what}" for end in ("min", "max") for what in ("Items", "Length", "Properties", "Contains"))


def simplify(node: Node, places: dict[int, SchemaOrigin], says_unevaluated: Callable[[], bool]) -> Any:
    """Return a schema, whose parts are simple already, in the newest keywords; the argument may be changed.

    Args:
        node: The schema.
        places: Where each schema stood.
        says_unevaluated: Whether the document speaks of what is unevaluated: then what allows everything says that it
            is evaluated.
    """
    if _SIMPLIFIED.isdisjoint(node):
        return node  # most are: what follows asks for each keyword
    names: dict[str, str] = {}
    _old_arrays(node, names)
    _old_bounds(node)
    _old_dependencies(node, names)
    if names:
        places[id(node)] = SchemaOrigin(places[id(node)].pointer, names)
    for key in COUNTS & node.keys():
        if isinstance(node[key], float):
            node[key] = int(node[key])
    if "not" in node and node["not"] in (True, {}):
        return False
    _drop_silent(node, says_unevaluated)
    return node


def _old_arrays(node: Node, names: dict[str, str]) -> None:
    """A list of items, and what comes behind them, are `prefixItems` and `items`."""
    rest = node.pop("additionalItems", None)
    if isinstance(node.get("items"), list):
        given = node.pop("items")
        if given:
            node["prefixItems"] = given
            names["prefixItems"] = "items"
        if rest is not None:
            node["items"] = rest
            names["items"] = "additionalItems"


def _old_bounds(node: Node) -> None:
    """Draft 4 says `true` beside a bound."""
    for exclusive, bound in _EXCLUSIVE.items():
        if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and bound in node:
            node[exclusive] = node.pop(bound)


def _old_dependencies(node: Node, names: dict[str, str]) -> None:
    for name, value in node.pop("dependencies", {}).items():
        key = "dependentRequired" if isinstance(value, list) else "dependentSchemas"
        node.setdefault(key, {})[name] = value
        names[key] = "dependencies"


_SILENT: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "minItems": (0,), "minLength": (0,), "minProperties": (0,), "required": ([],),
    "additionalProperties": (True, {}), "items": (True, {}), "patternProperties": ({},), "dependentRequired": ({},),
    "dependentSchemas": ({},), "propertyNames": (True, {}, {"type": "string"}), "not": (False,),
    "unevaluatedItems": (True, {}), "unevaluatedProperties": (True, {}), "contains": (), "pattern": _SILENT_PATTERNS,
}  # fmt: skip
_EVALUATING = {"additionalProperties": "unevaluatedProperties", "items": "unevaluatedItems"}
"""Keywords beside which nothing is unevaluated, and what would speak of that."""
_EVALUATION_WORDS = frozenset((*_EVALUATING, *_EVALUATING.values()))
_SIMPLIFIED = frozenset(
    (*_SILENT, *COUNTS, *_EXCLUSIVE, "additionalItems", "dependencies", "if", "then", "else", "allOf")
)
"""Keywords that `simplify` may change."""


def _drop_silent(node: Node, says_unevaluated: Callable[[], bool]) -> None:
    """Leave out keywords that every instance passes, and those that need another beside them."""
    for evaluating, rest in _EVALUATING.items():
        if evaluating in node:
            node.pop(rest, None)
    for key in _SILENT.keys() & node.keys():
        is_silent = any(node[key] == value and type(node[key]) is type(value) for value in _SILENT[key])
        if is_silent and not (key in _EVALUATION_WORDS and says_unevaluated()):
            del node[key]
    if "if" not in node:
        node.pop("then", None)
        node.pop("else", None)
    elif "then" not in node and "else" not in node and not says_unevaluated():
        del node["if"]
    if "contains" not in node:
        node.pop("minContains", None)
        node.pop("maxContains", None)
    if "allOf" in node:
        node["allOf"] = [part for part in node["allOf"] if part is not True and part != {}]
        if not node["allOf"]:
            del node["allOf"]


_REFERENCES = frozenset(REFERENCES)
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that a reference writes with escapes, which not every library reads."""
_UNEVALUATED = frozenset(("unevaluatedItems", "unevaluatedProperties"))


@dataclass(frozen=True)
class Normal:
    """A schema in the normal form.

    Attributes:
        schema: It.
        dropped: Places in the given schema that are not enforced: of references that lead out of it, and where there
            are any, of what speaks of unevaluated parts, as these might evaluate them.
        places: For schemas of the form, by the identity of the object, where they stood; without any, where they do.
        text: Its source, where that is the text that was given.
    """

    schema: Any
    dropped: tuple[str, ...]
    places: Mapping[int, SchemaOrigin]
    text: str | None = None

    @cached_property
    def source(self) -> str:
        """The form as JSON text; what is derived from it is asked for by each backend's way."""
        return self.text if self.text is not None else json.dumps(self.schema, ensure_ascii=False)

    def place(self, pointer: str) -> str:
        """Return where a keyword of the form, named by its pointer, stood in the given schema."""
        return origin_of(self.schema, self.places, pointer)


def normalize(given: Any, text: str | None = None, *, is_split: bool = False) -> Normal:
    """Return a schema, which `schema.check` has passed, in the normal form.

    Args:
        given: The schema.
        text: What it was read from, where its descriptions may stay: then most schemas are served as they came.
        is_split: Its properties become schemas of their own: nothing in it refers to all of it, and where it only
            names an object of its definitions, it is that object.
    """
    if not isinstance(given, dict):
        return Normal(given, (), {})
    if text is not None and is_normal(given, len(text)):
        return Normal(given, (), {}, text)
    work = _Document(given, is_split=is_split)
    made = work.write()
    if work.dropped:
        work.drop_unevaluated(made)
    return Normal(made, tuple(work.dropped), work.places)


def plain(given: Any) -> Any:
    """Return a schema in draft 2020-12's keywords, to validate texts by."""
    return _Document(given).write() if isinstance(given, dict) else given


class _Document:
    """Writes one document anew."""

    def __init__(self, given: Node, *, is_split: bool = False) -> None:
        self._is_split = is_split
        self.places: dict[int, SchemaOrigin] = {}
        self.dropped: list[str] = []
        self._given = given
        self._draft = draft_of(given)
        self._names: dict[int, str] = {}
        self._taken: dict[str, int] = {}  # names, and how many were made of each
        self._targets: deque[tuple[str, ReferencedSchema]] = deque()

    @cached_property
    def _references(self) -> References:
        return References(self._given, self._draft)

    @cached_property
    def _anchors(self) -> Counter[str]:
        return Counter(
            node["$dynamicAnchor"]
            for _, node in schema.every(self._given)
            if isinstance(node, dict) and isinstance(node.get("$dynamicAnchor"), str)
        )

    @cached_property
    def _is_unevaluated_said(self) -> bool:
        found = (node for _, node in schema.every(self._given) if isinstance(node, dict))
        return any(node[key] not in (True, {}) for node in found for key in _UNEVALUATED & node.keys())

    def write(self) -> Any:
        """Return the document; definitions that nothing refers to are left out."""
        root = self._node(*(self._object() if self._is_split else (self._given, "")))
        definitions: Node = {}
        while self._targets:
            name, target = self._targets.popleft()
            definitions[name] = self._node(target.node, target.pointer)
        if definitions and isinstance(root, dict):
            root["$defs"] = definitions
        return root

    def drop_unevaluated(self, root: Any) -> None:
        """Leave out what speaks of unevaluated parts: a reference that was dropped might evaluate them."""
        for _, node in schema.every(root):
            for key in _UNEVALUATED & node.keys() if isinstance(node, dict) else ():
                self.dropped.append(self.places[id(node)].keyword([key]))
                del node[key]

    def _object(self) -> tuple[Node, str]:
        """Return the schema with properties that the document names, and its place; else the document."""
        node, pointer, seen = self._given, "", [self._given]
        while node.keys() & MEANING <= {"$ref", "allOf", "type"} and node.get("type", "object") == "object":
            parts, reference = node.get("allOf", []), node.get("$ref")
            if len(parts) + (reference is not None) != 1:
                break
            node, pointer = (parts[0], f"{pointer}/allOf/0") if parts else self._target(node)
            if not isinstance(node, dict) or any(node is each for each in seen):
                break
            seen.append(node)
            if node.get("type") == "object":
                return node, pointer
        return self._given, ""

    def _target(self, node: Node) -> tuple[Any, str]:
        try:
            found = self._references.resolve(node["$ref"], self._references.base_of(node))
        except (KeyError, ValueError):
            return None, ""
        return found.node, found.pointer

    def _node(self, node: Any, pointer: str) -> Any:
        if not isinstance(node, dict):
            return node
        made: Node = {}
        self.places[id(made)] = SchemaOrigin(pointer)
        reference = self._reference(node, pointer)
        if reference is False:
            return False
        if isinstance(reference, str):
            made["$ref"] = reference
        if "$ref" in node and self._draft is not None and self._draft < 2019:
            return made  # what stands beside it says nothing in those drafts
        meaning = MEANING | CONTENT if self._draft == 7 else MEANING
        for key, value in node.items():
            if key in meaning:
                holds = key in keywords.HOLDING and isinstance(value, (dict, list))
                made[key] = self._value(key, value, f"{pointer}/{key}") if holds else value
        return simplify(made, self.places, lambda: self._is_unevaluated_said)

    def _reference(self, node: Node, pointer: str) -> str | bool | None:
        """Return where a node's reference leads, in the new document; a boolean where it leads to one."""
        if _REFERENCES.isdisjoint(node):
            return None
        key = next((key for key in REFERENCES if isinstance(node.get(key), str)), None)
        if key is None:
            return None
        try:
            target = self._references.resolve(node[key], self._references.base_of(node))
        except (KeyError, ValueError):
            target = None
        moves = target is not None and (self._is_dynamic(target) or (key == "$recursiveRef" and self._recurs(target)))
        if target is None or not isinstance(target.node, (dict, bool)) or (key != "$ref" and moves):
            self.dropped.append(f"{pointer}/{key}")
            return None
        if isinstance(target.node, bool):
            return target.node
        if target.node is self._given and not self._is_split:
            return "#"
        name = self._names.get(id(target.node))
        if name is None:
            name = self._names[id(target.node)] = self._new_name(target.pointer)
            self._targets.append((name, target))
        return f"#/$defs/{schema.escape(name)}"

    def _is_dynamic(self, target: ReferencedSchema) -> bool:
        """Whether another schema of the document may stand in for a target of `$dynamicRef`."""
        name = target.node.get("$dynamicAnchor") if isinstance(target.node, dict) else None
        return isinstance(name, str) and self._anchors[name] > 1

    def _recurs(self, target: ReferencedSchema) -> bool:
        """Whether a schema around a target of `$recursiveRef` may stand in for it: none is around the document."""
        return (
            isinstance(target.node, dict)
            and target.node.get("$recursiveAnchor") is True
            and target.node is not self._given
        )

    def _new_name(self, pointer: str) -> str:
        name = _NO_NAME.sub("_", pointer.rsplit("/", 1)[-1]) or "d"
        made = name
        while made in self._taken:
            self._taken[name] = self._taken.get(name, 1) + 1
            made = f"{name}-{self._taken[name]}"
        self._taken[made] = 1
        return made

    def _value(self, key: str, value: Any, pointer: str) -> Any:
        if key in keywords.ONE and isinstance(value, dict):
            return self._node(value, pointer)
        if key in keywords.LISTS and isinstance(value, list):
            return [self._node(item, f"{pointer}/{index}") for index, item in enumerate(value)]
        if key in keywords.MAPS and isinstance(value, dict):
            return {name: self._node(item, f"{pointer}/{schema.escape(name)}") for name, item in value.items()}
        return value
