"""What a value may be that stands between tags as it is: a string without quotes, or else JSON.

A schema is resolved to options without references or alternatives. Strings, listed values and whatever else is one text
become one format, `json_schema` in the style `text`; other values are JSON, told from strings by how they begin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dovetail.sdk.formats.schema_types import CONTAINERS, STRING, resolve, type_name, types_of, value_text

Node = dict[str, Any]
Option = dict[str, Any]
MAX_OPTIONS = 256
DERIVED = " derived"
"""Ends the `$comment` of a schema that is not the declared one, but was made of it."""
_MAX_DEPTH = 16
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "nullable")
)
_HOLDERS = frozenset(("$defs", "definitions", "$schema", "$id", "discriminator"))
_OF_STRINGS = frozenset(("type", "pattern", "minLength", "maxLength", "format"))
_OF_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_OF_CONTAINERS = frozenset(
    [
        *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"),
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties"),
        *("maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
    ]
)
_NUMBERS = frozenset(("integer", "number"))
_TEXTS: Mapping[str, Node] = {
    "null": {"enum": ["null"]},
    "boolean": {"enum": ["true", "false"]},
    "integer": {"pattern": "^-?(0|[1-9][0-9]*)$"},
    "number": {"pattern": r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?$"},
}
"""Values of other types, as texts."""
_BLANK = r"[\s\x1c-\x1f\x85]*"
"""What Python strips."""
_QUOTED: Node = {"pattern": f'^{_BLANK}"[\\s\\S]*"{_BLANK}$'}
"""Strings of which the quotes are taken for JSON's."""
_NUMERALS: Node = {"pattern": f"^{_BLANK}-?[0-9][-+.eE0-9]*{_BLANK}$"}
_WORDS: Node = {"pattern": f"^{_BLANK}(true|True|false|False){_BLANK}$"}
_NUMBER_FIRST: Node = {"pattern": f"^{_BLANK}[-0-9]"}
_BRACKET_FIRST: Node = {"pattern": f"^{_BLANK}[\\[{{(]"}


@dataclass(frozen=True, slots=True)
class TaggedValue:
    """A value between tags.

    Attributes:
        string: The structural format of what is read as it stands; None where nothing is.
        others: Formats of other values, as JSON.
        is_full: Whether that says all that the schema does.
    """

    string: Node | None
    others: tuple[Node, ...]
    is_full: bool

    @property
    def is_string(self) -> bool:
        """Whether it may be a string."""
        return self.string is not None

    @property
    def node(self) -> Node:
        """All of it in one format."""
        nodes = [*([] if self.string is None else [self.string]), *self.others]
        return nodes[0] if len(nodes) == 1 else {"type": "or", "elements": nodes}


def tagged_value(
    declared: Any, root: Mapping[str, Any], excludes: Sequence[str] = (), *, is_quoted: bool = False
) -> TaggedValue:
    """Describe a value.

    Args:
        declared: Its schema.
        root: The schema that references in it are to.
        excludes: The tags around it, which no string holds.
        is_quoted: Strings, and nothing else, stand between marks of their own.
    """
    types = types_of(declared, root)
    if types and "string" not in types:
        return TaggedValue(None, (json_value(declared, root),), True)
    options = _options(declared, root, 0)
    if not options:
        return TaggedValue(_text_node([{}], {}, excludes), (), False)
    parts = _Parts(types, is_quoted=is_quoted)
    for option in options:
        parts.add(option)
    about = declared.get("$comment") if isinstance(declared, Mapping) else None
    note = {"$comment": about + DERIVED} if isinstance(about, str) else {}
    others = tuple(json_value({**other, **note}, root) for other in parts.json())
    texts = parts.texts(excludes)
    return TaggedValue(_text_node(texts, note, excludes) if texts else None, others, parts.is_full)


class _Parts:
    """The options of a value, by how they are written."""

    def __init__(self, types: frozenset[str], *, is_quoted: bool) -> None:
        self._types, self._is_quoted = types, is_quoted
        self._strings: list[Node] = []
        self._others: list[Node] = []
        self._listed: list[Any] = []
        self.is_full = True

    def add(self, option: Option) -> None:
        """Take one."""
        values, kinds = _values_of(option), _kinds(option)
        if values is not None:
            self.is_full &= option.keys() <= {"type", "enum", "const"}
            self._listed += values
            return
        rest = kinds - STRING
        more = (_OF_NUMBERS if rest & _NUMBERS else frozenset(), _OF_CONTAINERS if rest & CONTAINERS else frozenset())
        self.is_full &= option.keys() <= _OF_STRINGS.union(*more)
        if not kinds or "string" in kinds:
            self._strings.append({key: value for key, value in option.items() if key in _OF_STRINGS - {"type"}})
        self._others += ({**option, "type": kind} for kind in sorted(rest))

    @property
    def _is_free(self) -> bool:
        return {} in self._strings

    def json(self) -> list[Node]:
        """Return what is written as JSON."""
        if not self._is_quoted:
            return [other for other in self._others if not self._is_text(other)]
        values = [value for value in self._listed if not isinstance(value, str)]
        return [*self._others, *([{"enum": values}] if values else [])]

    def _is_text(self, other: Node) -> bool:
        """Whether values are texts among the strings: those of which nothing is said, if it is known what they are."""
        if other["type"] in CONTAINERS:
            return other.keys() == {"type"} and self._is_free
        return other["type"] in _TEXTS and not other.keys() & _OF_NUMBERS

    def texts(self, excludes: Sequence[str]) -> list[Node]:
        """Return what is written as it stands, as schemas of texts."""
        if self._is_quoted:
            texts = [value for value in self._listed if isinstance(value, str)]
            folded, strings, taken = [], self._strings, []
        else:
            texts = [text for value in self._listed if (text := _text_of(value, self._types)) is not None]
            folded = [
                _TEXTS[other["type"]] for other in self._others if other["type"] in _TEXTS and self._is_text(other)
            ]
            taken = self._taken()
            strings = [{**each, "not": {"anyOf": [*taken, _QUOTED]}} for each in self._strings]
        if self._is_free and not taken:
            return [{}]
        listed = [text for text in texts if not any(tag in text for tag in excludes)]
        return [*([{"enum": listed}] if listed else []), *folded, *strings]

    def _taken(self) -> list[Node]:
        """Return strings that would be read as values that are not allowed, or begin as those that are JSON."""
        kinds = {other["type"] for other in self.json()}
        listed = {type_name(value) for value in self._listed}
        found = []
        if kinds & _NUMBERS:
            found.append(_NUMBER_FIRST)
        elif listed & _NUMBERS and not self._folds("number", *([] if "number" in listed else ["integer"])):
            found.append(_NUMERALS)
        if "boolean" in listed and not self._folds("boolean"):
            found.append(_WORDS)
        if (kinds | listed) & CONTAINERS:
            found.append(_BRACKET_FIRST)
        return found

    def _folds(self, *kinds: str) -> bool:
        return any(other["type"] in kinds and self._is_text(other) for other in self._others)


def _text_node(texts: list[Node], note: Mapping[str, Any], excludes: Sequence[str]) -> Node:
    """Describe texts by any of some schemas."""
    held = {"excludes": [*excludes]} if excludes else {}
    if texts == [{}]:
        return {"type": "any_text", **held}
    schema = {**(texts[0] if len(texts) == 1 else {"anyOf": texts}), **note}
    return {"type": "json_schema", "style": "text", "json_schema": schema, **held}


def json_value(declared: Any, root: Mapping[str, Any]) -> Node:
    """Describe a JSON value; local references keep what they refer to."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    schema = {**declared, **shared} if isinstance(declared, Mapping) else True
    return {"type": "json_schema", "json_schema": schema}


def _options(schema: Any, root: Mapping[str, Any], depth: int) -> list[Option] | None:
    """Return schemas of which a value fits one, without references and alternatives; None: they are not known."""
    if schema is True or schema == {}:
        return [{}]
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    own = {key: value for key, value in schema.items() if key not in _ANNOTATIONS | _HOLDERS}
    groups: list[list[Option] | None] = []
    if "$ref" in own:
        target = own.pop("$ref")
        groups.append(_options(resolve(target, root), root, depth + 1) if isinstance(target, str) else None)
    for part in own.pop("allOf", ()):
        groups.append(_options(part, root, depth + 1))
    for key in ("anyOf", "oneOf"):
        if key in own:
            groups.append(_either_of(own.pop(key), root, depth, is_one=key == "oneOf"))
    found: list[list[Option]] = [[own]]
    for group in groups:
        if group is None or len(group) * len(found) > MAX_OPTIONS:
            return None
        found = [[*parts, option] for parts, option in product(found, group)]
    merged = [_merged(parts) for parts in found]
    return [option for option in merged if option is not None] if False not in map(_is_sure, found) else None


def _either_of(parts: Any, root: Mapping[str, Any], depth: int, *, is_one: bool) -> list[Option] | None:
    """Return the options of alternatives; of those of which one alone may fit, only if they are told apart by type."""
    found: list[Option] = []
    seen: set[str] = set()
    for part in parts:
        options = _options(part, root, depth + 1)
        if options is None:
            return None
        kinds = set().union(*(_kinds(option) or {"any"} for option in options))
        if is_one and (kinds & seen or "any" in kinds | seen):
            return None
        seen |= kinds
        found += options
    return found


def _is_sure(parts: list[Option]) -> bool:
    """Whether schemas can be joined: what more than one of them says is the same, or types and listed values."""
    said: dict[str, set[str]] = {}
    for key, value in (pair for part in parts for pair in part.items()):
        said.setdefault(key, set()).add(json.dumps(value, sort_keys=True))
    return all(key in ("type", "enum", "const") or len(values) == 1 for key, values in said.items())


def _merged(parts: list[Option]) -> Option | None:
    """Return what schemas say together; None: nothing fits them all."""
    made: Option = {key: value for part in parts for key, value in part.items()}
    types = [{part["type"]} if isinstance(part["type"], str) else {*part["type"]} for part in parts if "type" in part]
    if types:
        left = set.intersection(*types)
        if not left:
            return None
        made["type"] = sorted(left)
    listed = [values for part in parts if (values := _listed(part)) is not None]
    if listed:
        made.pop("const", None)
        rest = [{json.dumps(value, sort_keys=True) for value in values} for values in listed[1:]]
        made["enum"] = [value for value in listed[0] if all(json.dumps(value, sort_keys=True) in more for more in rest)]
    return made


def _listed(option: Option) -> list[Any] | None:
    if "const" in option:
        return [option["const"]]
    values = option.get("enum")
    return values if isinstance(values, list) else None


def _values_of(option: Option) -> list[Any] | None:
    """Return the listed values of an option's types."""
    values, kinds = _listed(option), _kinds(option, is_given=True)
    if values is None:
        return None
    return [value for value in values if not kinds or type_name(value) in kinds or _is_number(value, kinds)]


def _is_number(value: Any, kinds: set[str]) -> bool:
    return type_name(value) in ("integer", "number") and "number" in kinds


def _kinds(option: Option, *, is_given: bool = False) -> set[str]:
    if not is_given and (values := _values_of(option)) is not None:
        return {type_name(value) for value in values}
    given = option.get("type", ())
    return {given} if isinstance(given, str) else {*given}


def _text_of(value: Any, types: frozenset[str]) -> str | None:
    """Return how a value is written; None where it would be read as another."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    read = json.loads(value_text(text, types or frozenset((type_name(value),))))
    return text if type(read) is type(value) and read == value else None
