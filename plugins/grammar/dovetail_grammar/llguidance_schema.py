"""What llguidance enforces of a JSON Schema, and schemas rewritten so that it refuses no more than it must.

The walk is static: it may call FULL what the compiler refuses in the end (an error, and the next way is tried), never
what the compiler would accept and not enforce. Known of the latter kind, found by tests: a pattern whose character
class excludes a quote or a backslash, which their escapes get past; `minProperties` above 1 over keys that are not
listed, as a repeated key counts twice.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.contracts.grammar import GrammarSpec, Kind, Relax, Support
from dovetail.errors import RequestError
from dovetail.grammar import schema

FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"]
)
ENFORCED = frozenset(
    [
        "$defs",
        "$ref",
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "definitions",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "required",
        "type",
    ]
)
IGNORED = frozenset(
    [
        "$dynamicAnchor",
        "$dynamicRef",
        "$recursiveAnchor",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    ]
)
"""Keywords of the drafts that the library refuses."""
_UNREADABLE = re.compile(r"\(\?[=!<]|\\[1-9bBk]")
_NEGATED = re.compile(r"\[\^((?:\\.|[^\]\\])*)\]")
_HARMLESS = re.compile(r"[A-Za-z0-9]-[A-Za-z0-9]|\\[sSwWdDnrtfv./\]\[^*+?(){}|$-]|-$|^-")
_CONTROLS = re.compile(r"\\x[01]|\\u00[01]|\\c|\\0|[\x00-\x1f]")
_GUIDANCE = "x-guidance"


class SchemaWalk:
    """Finds what is not enforced in one schema."""

    def __init__(self, spec: GrammarSpec) -> None:
        self._relax = spec.relax
        self._ignored: list[str] = []
        self._reason = ""
        self._nodes: tuple[tuple[str, schema.Node], ...] = ()
        try:
            self._nodes = schema.nodes(spec.source)
        except RequestError as error:
            self._reason = error.message

    def support(self) -> Support:
        """Return the answer for the whole schema."""
        for pointer, node in self._nodes:
            for key in node:
                self._keyword(pointer, key, node)
        if self._reason:
            return Support.no(self._reason)
        return Support.approximate(self._ignored) if self._ignored else Support.full()

    def _keyword(self, pointer: str, key: str, node: Mapping[str, Any]) -> None:
        where = f"{pointer}/{key}"
        if key in IGNORED:
            self._give_up(Relax.UNSUPPORTED, where)
        elif key == "oneOf" and Relax.ONE_OF in self._relax:
            self._ignored.append(where)
        elif key == "pattern":
            self._pattern(where, node[key])
        elif key == "patternProperties":
            for pattern in node[key]:
                self._pattern(where, pattern)
        elif key == "minProperties" and node[key] > 1 and not _all_required(node):
            self._ignored.append(where)

    def _pattern(self, where: str, pattern: str) -> None:
        if is_unreadable(pattern):
            self._give_up(Relax.UNSUPPORTED, where)
        elif is_leaky(pattern):
            self._ignored.append(where)

    def _give_up(self, item: Relax, where: str) -> None:
        if item in self._relax:
            self._ignored.append(where)
        elif not self._reason:
            self._reason = f"{where} is not supported"


def is_unreadable(pattern: str) -> bool:
    """Whether a pattern has look-around, back-references or word boundaries."""
    return _UNREADABLE.search(pattern) is not None


def is_leaky(pattern: str) -> bool:
    """Whether a class may let an escaped quote or backslash through that it excludes.

    Such a class holds a control character, by being written so or by negation. May say so of a pattern that is fine.
    """
    if _CONTROLS.search(pattern):
        return True
    return any(set(_HARMLESS.sub("", body)) & set('"\\-') for body in _NEGATED.findall(pattern))


def prepare_schema(spec: GrammarSpec, max_whitespace: int) -> GrammarSpec:
    """Return a schema for the library: unknown formats dropped, what is relaxed left out, whitespace bounded.

    The library's own options in a schema (`x-guidance`) are replaced: they could loosen what is enforced.
    """
    root = {"type": "object"} if spec.kind is Kind.JSON_OBJECT else schema.parse(spec.source)
    drop = Relax.UNSUPPORTED in spec.relax
    root = prepare_value(root, drop=drop)
    if root is True:
        root = {}
    if isinstance(root, dict):
        root[_GUIDANCE] = {
            "whitespace_pattern": whitespace(max_whitespace),
            "coerce_one_of": Relax.ONE_OF in spec.relax,
            "lenient": drop,
        }
    return replace(spec, kind=Kind.JSON, source=json.dumps(root, ensure_ascii=False))


def prepare_value(root: Any, *, drop: bool) -> Any:
    """Copy a schema without unknown formats and, with `drop`, without what the library does not know."""
    if not isinstance(root, dict):
        return root
    result: dict[str, Any] = {}
    for key, value in root.items():
        if key == _GUIDANCE or (key == "format" and value not in FORMATS):
            continue
        if drop and (key in IGNORED or (key == "pattern" and is_unreadable(value))):
            continue
        result[key] = _prepare_keyword(key, value, drop=drop)
    return result


def _prepare_keyword(key: str, value: Any, *, drop: bool) -> Any:
    """Copy a keyword's value; depth is bounded, the source was checked."""
    if key in schema.ONE and isinstance(value, dict):
        return prepare_value(value, drop=drop)
    if key in schema.LISTS and isinstance(value, list):
        options = [prepare_value(item, drop=drop) for item in value]
        return merge_strings(options) if key == "anyOf" else options
    if key in schema.MAPS and isinstance(value, dict):
        names = [name for name in value if not (drop and key == "patternProperties" and is_unreadable(name))]
        return {name: prepare_value(value[name], drop=drop) for name in names}
    return value


def merge_strings(options: list[Any]) -> list[Any]:
    """Join alternatives that are strings of certain lengths.

    Two kinds of long strings at once keep the library from its shortcuts: a mask within them costs fifty times as much.
    """
    spans = sorted(span for option in options if (span := _lengths(option)) is not None)
    if len(spans) < 2:
        return options
    joined = [spans[0]]
    for low, high in spans[1:]:
        if low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    strings: list[Any] = [
        {"type": "string", "minLength": int(low)} | ({} if high == math.inf else {"maxLength": int(high)})
        for low, high in joined
    ]
    others = [option for option in options if _lengths(option) is None]
    if joined == [(0, math.inf)]:
        others = [option for option in others if not (isinstance(option, dict) and option.get("type") == "string")]
    return strings + others


def _lengths(option: Any) -> tuple[float, float] | None:
    """Return the lengths of a schema that is nothing but a string of these lengths."""
    if not isinstance(option, dict) or option.get("type") != "string":
        return None
    if any(key not in ("type", "minLength", "maxLength") and key not in schema.ANNOTATIONS for key in option):
        return None
    low, high = option.get("minLength", 0), option.get("maxLength", math.inf)
    return (low, high) if low <= high else None


def whitespace(most: int) -> str:
    """The pattern of whitespace between JSON tokens."""
    return rf"[ \t\r\n]{{0,{most}}}"


def _all_required(node: Mapping[str, Any]) -> bool:
    """Whether an object has exactly its listed properties, all of them required."""
    listed = set(node.get("properties", ()))
    return node.get("additionalProperties") is False and listed <= set(node.get("required", ()))
