"""One schema object: older drafts' keywords in the newest's words, and without what says nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.sdk.schemas.origins import SchemaOrigin

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


_EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}


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
    "unevaluatedItems": (True, {}), "unevaluatedProperties": (True, {}), "contains": (), "pattern": ("", ".*", "^.*"),
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
