"""Which JSON Schemas lie within a plain subset: what the automata backends enforce, keyword by keyword.

Both xgrammar and outlines_core take schemas that they do not enforce in full, without a word. So the question is asked
the other way round: what is known, by tests, to be enforced is listed, and everything else is named as ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.contracts.grammar import GrammarSpec, Support
from dovetail.errors import RequestError
from dovetail.grammar import schema
from dovetail_grammar.patterns import has_inner_anchors, is_unreadable

_SILENT = schema.ANNOTATIONS | schema.DEFINITIONS
_OF_TYPE = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """One backend's.

    Attributes:
        by_type: Keywords that are enforced beside `type`, by the type.
        formats: Formats that are enforced.
        alone: Keywords that are enforced where they stand alone.
    """

    by_type: Mapping[str, frozenset[str]]
    formats: frozenset[str]
    alone: frozenset[str] = field(default_factory=lambda: frozenset(("$ref", "anyOf", "const", "enum")))

    def support(self, spec: GrammarSpec) -> Support:
        """Return what is enforced of a schema."""
        try:
            root = schema.parse(spec.source)
        except RequestError as error:
            return Support.no(error.message)
        if root is False:
            return Support.no("the schema false allows nothing")
        ignored: list[str] = []
        annotations: list[str] = []
        for pointer, node in schema.nodes(spec.source):
            ignored += [f"{pointer}/{key}" for key in self._ignored(node)]
            if "format" in node and not self._may_enforce(node["format"]):
                annotations.append(f"{pointer}/format")
        return Support.approximate(ignored) if ignored else Support.full(annotations)

    def _may_enforce(self, name: str) -> bool:
        """Whether a format says something about an instance: others are annotations."""
        return name in self.formats or name in _KNOWN_FORMATS

    def _ignored(self, node: Mapping[str, Any]) -> list[str]:
        """Keywords of one schema that may not be enforced."""
        keys = [key for key in node if key not in _SILENT and key[:2] != "x-"]
        if "format" in node and not self._may_enforce(node["format"]):
            keys.remove("format")
        if not keys:
            return []
        if "$ref" in keys and not node["$ref"].startswith("#/") and node["$ref"] != "#":
            return ["$ref"]
        for key in () if self.alone.isdisjoint(keys) else self.alone.intersection(keys):
            return [other for other in keys if other != key and not _agrees(node, key, other)]
        kind = node.get("type")
        if not isinstance(kind, str):
            return [key for key in keys if key != "type"]
        known = self.by_type.get(kind, frozenset())
        return [key for key in keys if key != "type" and not (key in known and self._enforced(key, node))]

    def _enforced(self, key: str, node: Mapping[str, Any]) -> bool:
        """Whether a keyword that its type's instances are judged by is, as it stands here."""
        if key == "format":
            return node["format"] in self.formats and not {"minLength", "maxLength", "pattern"} & set(node)
        if key in ("minLength", "maxLength"):
            return "pattern" not in node
        if key == "required":
            return set(node["required"]) <= set(node.get("properties", ()))
        if key == "pattern":
            return is_plain(node["pattern"])
        if key == "properties":
            return all(json.dumps(name, ensure_ascii=False) == f'"{name}"' for name in node["properties"])
        if key in ("minProperties", "maxProperties"):
            return "properties" not in node and (key == "maxProperties" or node[key] < 2)
        return True


def is_plain(pattern: str) -> bool:
    """Whether a pattern is of the whole string, and of characters that JSON writes as they are.

    What matches anywhere is matched against the whole by some, and a class such as `.` lets raw control characters in.
    """
    whole = pattern.startswith("^") and re.search(r"(?<!\\)\$$", pattern) is not None
    inner = re.sub(r"\((?:[^()\\]|\\.)*\)", "", pattern)
    if has_inner_anchors(pattern) or is_unreadable(pattern):
        return False
    return whole and "|" not in inner and _RISKY.search(pattern) is None


_RISKY = re.compile(r"(?<!\\)\.|\[\^|\\[sSWDpPcxu\\]|[\"\x00-\x1f]")
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
    types = node["type"] if isinstance(node["type"], list) else [node["type"]]
    values = node["enum"] if key == "enum" else [node["const"]]
    return all(_type_of(value) in types for value in values)


def _type_of(value: Any) -> str:
    return "null" if value is None else _OF_TYPE[type(value)]
