"""Which JSON Schemas lie within a plain subset: what the automata backends enforce, keyword by keyword.

Both xgrammar and outlines_core take schemas that they do not enforce in full, without a word. So the question is asked
the other way round: what is known, by tests, to be enforced is listed, and everything else is named as ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarSpec, Support
from dovetail.sdk.schemas import keywords, schema
from dovetail.sdk.schemas.types import kinds_of, types_of_value, values_of
from dovetail_grammar.patterns import has_inner_anchors, is_odd, is_unreadable

_SILENT = keywords.ANNOTATIONS | keywords.DEFINITIONS


@dataclass(frozen=True, kw_only=True)
class Subset:
    """One backend's.

    Attributes:
        by_type: Keywords that are enforced beside `type`, by the type.
        formats: Formats that are enforced.
        keys_are_known: Whether keys beside those that are named cannot spell one of these with an escape.
        alone: Keywords that are enforced where they stand alone.
    """

    by_type: Mapping[str, frozenset[str]]
    formats: frozenset[str]
    keys_are_known: bool = True
    alone: frozenset[str] = field(default_factory=lambda: frozenset(("$ref", "anyOf", "const", "enum")))

    def support(self, spec: GrammarSpec) -> Support:
        """Return what is enforced of a schema."""
        try:
            nodes = schema.nodes(spec.source)
        except RequestError as error:
            return Support.no(error.message)
        if not nodes and schema.parse(spec.source) is False:
            return Support.no("the schema false allows nothing")
        ignored: list[str] = []
        annotations: list[str] = []
        for pointer, node in nodes:
            kind = node.get("type")
            plain = self._plain.get(kind) if isinstance(kind, str) else None
            if isinstance(kind, str) and plain is not None and self.alone.isdisjoint(node):
                if plain.issuperset(node):
                    continue  # most are
                known = self.by_type[kind]
                keys = [key for key in node if key not in plain and not self._passes(key, known, node)]
            else:
                keys = self._ignored(node)
            ignored += [f"{pointer}/{key}" for key in keys]
            if "format" in node and not self._may_enforce(node["format"]):
                annotations.append(f"{pointer}/format")
        return Support.approximate(ignored) if ignored else Support.full(annotations)

    def _may_enforce(self, name: str) -> bool:
        """Whether a format says something about an instance: others are annotations."""
        return name in self.formats or name in _KNOWN_FORMATS

    @cached_property
    def _plain(self) -> Mapping[str, frozenset[str]]:
        """By the type, keywords that are enforced or say nothing, whatever stands in them."""
        return {kind: (known | _SILENT | {"type"}) - _ASKED for kind, known in self.by_type.items()}

    def _passes(self, key: str, known: frozenset[str], node: Mapping[str, Any]) -> bool:
        """Whether a keyword is enforced beside a type, or says nothing."""
        if key in known and self._enforced(key, node):
            return True
        return key[:2] == "x-" or (key == "format" and not self._may_enforce(str(node[key])))

    def _ignored(self, node: Mapping[str, Any]) -> list[str]:
        """Keywords that may not be enforced of a schema with those that stand alone, or of several types."""
        keys = [key for key in node if key not in _SILENT and key[:2] != "x-"]
        if "format" in node and not self._may_enforce(node["format"]):
            keys.remove("format")
        if "$ref" in node and not node["$ref"].startswith("#/") and node["$ref"] != "#":
            return ["$ref"]
        for key in node:
            if key in self.alone:
                return [other for other in keys if other != key and not _agrees(node, key, other)]
        return [key for key in keys if key != "type"]

    def _enforced(self, key: str, node: Mapping[str, Any]) -> bool:
        """Whether a keyword that its type's instances are judged by is, as it stands here."""
        if key == "format":
            return node["format"] in self.formats and not {"minLength", "maxLength", "pattern"} & set(node)
        if key in ("minLength", "maxLength"):
            return "pattern" not in node
        if key == "required":
            return set(node.get("properties", ())).issuperset(node["required"])
        if key == "pattern":
            return is_plain(node["pattern"])
        if key == "properties":
            is_known = self.keys_are_known or node.get("additionalProperties") is False
            return is_known and _ESCAPED.search("".join(node["properties"])) is None
        if key in ("minProperties", "maxProperties"):
            return "properties" not in node and (key == "maxProperties" or node[key] < 2)
        if key in _SPANS:
            least, most = _SPANS[key]
            return bool(node.get(least, 0) <= node.get(most, math.inf))  # else some take either for the other
        if key in _BOUNDS:
            return bool(abs(node[key]) <= MAX_BOUND)
        return True


def is_plain(pattern: str) -> bool:
    """Whether a pattern is of the whole string, and of characters that JSON writes as they are.

    What matches anywhere is matched against the whole by some, and a class such as `.` lets raw control characters in.
    """
    whole = pattern.startswith("^") and re.search(r"(?<!\\)\$$", pattern) is not None
    inner = re.sub(r"\((?:[^()\\]|\\.)*\)", "", pattern)
    if has_inner_anchors(pattern) or is_unreadable(pattern) or is_odd(pattern):
        return False
    return whole and "|" not in inner and _RISKY.search(pattern) is None


MAX_BOUND = 10**15
"""Bounds beyond this one are taken for others."""
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_SPANS = dict.fromkeys(("minItems", "maxItems"), ("minItems", "maxItems"))
_ASKED = (
    _BOUNDS
    | _SPANS.keys()
    | frozenset(
        [*("format", "minLength", "maxLength", "required", "pattern", "properties", "minProperties", "maxProperties")]
    )
)
"""Keywords of which `_enforced` asks how they stand."""
_ESCAPED = re.compile(r'["\\\x00-\x1f]')
"""What JSON writes with an escape."""
_RISKY = re.compile(r"(?<!\\)\.|\[\^|\\(?![dw])[A-Za-z0-9\\]|[\"\x00-\x1f]")
_KNOWN_FORMATS = frozenset(
    [
        *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri"),
        *("iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri", "uri-reference"),
        *("uri-template", "uuid"),
    ]
)


def _agrees(node: Mapping[str, Any], key: str, other: str) -> bool:
    """Whether `type` beside `const` or `enum` adds nothing: all values have it."""
    if other != "type" or key not in ("const", "enum"):
        return False
    types = kinds_of(node)
    return all(types & types_of_value(value) for value in values_of(node) or ())
