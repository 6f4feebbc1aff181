"""One schema object: older drafts' keywords in the newest's words, and without what says nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import regex

from dovetail.sdk import expressions
from dovetail.sdk.schemas import schema

T = TypeVar("T")
Node = dict[str, Any]
COUNTS = frozenset(
    [
        "minItems",
        "minLength",
        "minProperties",
        "minContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maxContains",
    ]
)
IN_PLACE = frozenset(("$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas"))
MAX_FIND_S = 0.05
"""Seconds of processor time that one schema's expressions are looked for in its names."""
MAX_FIND_WORK = 10_000
"""What one schema's automata may take before no other is made, in terms: some 50 ms."""
MAX_PATTERN = 2000
LARGEST = 10**18
"""Bounds of numbers beyond it are this one: backends write numbers out."""


@dataclass(frozen=True, slots=True)
class SchemaOrigin:
    """Where a schema stood: its pointer, and what its keywords were called there.

    Attributes:
        pointer: In the given document.
        names: Keywords that have another name there.
        whole: The schema was made of the keyword at `pointer`: what is in it stood there.
    """

    pointer: str
    names: Mapping[str, str] | None = None
    whole: bool = False

    def keyword(self, parts: Sequence[str]) -> str:
        """Return the pointer of what stands below the schema."""
        if self.whole or not parts:
            return self.pointer
        first = (self.names or {}).get(parts[0], parts[0])
        return "/".join((self.pointer, first, *parts[1:]))


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
    _unevaluated(node)
    _contains(node)
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
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and bound in node:
            node[exclusive] = node.pop(bound)


def _old_dependencies(node: Node, names: dict[str, str]) -> None:
    for name, value in node.pop("dependencies", {}).items():
        key = "dependentRequired" if isinstance(value, list) else "dependentSchemas"
        node.setdefault(key, {})[name] = value
        names[key] = "dependencies"


def clamp(node: Node) -> None:
    """Bring bounds of numbers, which may be `true` in draft 4, to what backends can write out."""
    for key in _BOUNDS.keys() & node.keys():
        if _BOUNDS[key] * node[key] > LARGEST:
            node[key] = _BOUNDS[key] * LARGEST


_SILENT: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "minItems": (0,), "minLength": (0,), "minProperties": (0,), "required": ([],),
    "additionalProperties": (True, {}), "items": (True, {}), "patternProperties": ({},), "dependentRequired": ({},),
    "dependentSchemas": ({},), "propertyNames": (True, {}, {"type": "string"}), "not": (False,),
    "unevaluatedItems": (True, {}), "unevaluatedProperties": (True, {}), "contains": (), "pattern": ("", ".*", "^.*"),
}  # fmt: skip
_BOUNDS = {"maximum": 1, "exclusiveMaximum": 1, "minimum": -1, "exclusiveMinimum": -1}
_EVALUATING = {"additionalProperties": "unevaluatedProperties", "items": "unevaluatedItems"}
"""Keywords beside which nothing is unevaluated, and what would speak of that."""
_EVALUATION_WORDS = frozenset((*_EVALUATING, *_EVALUATING.values()))
_SIMPLIFIED = frozenset((*_SILENT, *COUNTS, *_BOUNDS, "additionalItems", "dependencies", "if", "then", "else", "allOf"))
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


def _unevaluated(node: Node) -> None:
    """Where nothing in place evaluates, the items that are unevaluated are those behind the first."""
    if "unevaluatedItems" in node and not IN_PLACE & set(node) and "contains" not in node:
        node.setdefault("items", node.pop("unevaluatedItems"))


def _contains(node: Node) -> None:
    """Without a condition, what is contained is counted."""
    if "contains" not in node:
        return
    least, most = node.get("minContains", 1), node.get("maxContains")
    if node.get("contains") in (True, {}) and "contains" in node and "unevaluatedItems" not in node:
        node["minItems"] = max(node.get("minItems", 0), least)
        if most is not None:
            node["maxItems"] = min(node.get("maxItems", most), most)
    elif not ("contains" in node and least == 0 and most is None and "unevaluatedItems" not in node):
        return
    for key in ("contains", "minContains", "maxContains"):
        node.pop(key, None)
    if node.get("minItems") == 0:
        del node["minItems"]


_OWN_SYNTAX = re.compile(r"\\[AGKLMNRXZhm]|\{(?!\d)|\[\[:|\(\?(?![:=!<])")
"""What the library reads in a way of its own."""


class Finder:
    """Reads expressions of one schema, and finds them in names and texts of it, at bounded cost: clients write both.

    Automata are bounded by their work, so that the same schema has the same form each time.
    """

    def __init__(self) -> None:
        self._left_s = MAX_FIND_S
        self._left_work = MAX_FIND_WORK

    def matches(self, pattern: str, text: str) -> bool:
        """Whether an expression finds something in a text.

        Raises:
            ValueError: It is no expression, or finding takes too long.
        """
        if self._left_s <= 0 or len(pattern) > MAX_PATTERN or _OWN_SYNTAX.search(pattern):
            raise ValueError("finding it takes too long, or means something else elsewhere")
        began = time.thread_time()
        try:
            return regex.search(pattern, text, timeout=self._left_s) is not None
        except (regex.error, TimeoutError, RecursionError, OverflowError) as error:
            if isinstance(error, TimeoutError):  # by the clock of all threads: this one's may say that time is left
                self._left_s = 0.0
            raise ValueError(str(error)) from None
        finally:
            self._left_s -= time.thread_time() - began

    def complement(self, pattern: str) -> str | None:
        """Return an expression of the texts in which another one is not found; None where none is known."""
        return self._counted(lambda: expressions.complement(pattern))

    def _counted(self, find: Callable[[], tuple[T, int]]) -> T | None:
        if self._left_work <= 0:
            return None
        found, work = find()
        self._left_work -= work
        return found


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
