"""What a value may be that stands between tags as it is: a string without quotes, or else JSON.

A schema is resolved to options without references or alternatives: texts where values are listed, expressions where
strings have a pattern or a length, JSON for any other type, and free text where nothing more is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from dovetail.text.tool_calls.schema_types import STRING, resolve, type_name, types_of, value_text

Node = dict[str, Any]
Option = dict[str, Any]
FREE: Node = {"type": "any_text"}
ABOUT = "about"
"""Key of an expression that looks around: the schema of which it says a string's pattern and length."""
MAX_OPTIONS = 256
_MAX_DEPTH = 16
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "nullable")
)
_HOLDERS = frozenset(("$defs", "definitions", "$schema", "$id"))
_OF_STRINGS = frozenset(("type", "pattern", "minLength", "maxLength"))


@dataclass(frozen=True, slots=True)
class TaggedValue:
    """A value between tags.

    Attributes:
        is_string: Whether it may be a string.
        node: The structural format of what stands there.
        is_full: Whether that says all that the schema does.
    """

    is_string: bool
    node: Node
    is_full: bool


def tagged_value(declared: Any, root: Mapping[str, Any], end: str | None = None) -> TaggedValue:
    """Describe a value.

    Args:
        declared: Its schema.
        root: The schema that references in it are to.
        end: The tag behind it, which no string holds.
    """
    types = types_of(declared, root)
    if types and "string" not in types:
        return TaggedValue(False, json_value(declared, root), True)
    options = _options(declared, root, 0)
    if options is None:
        return TaggedValue(True, FREE, False)
    nodes: list[Node] = []
    is_free, is_full, has_pattern = False, True, False
    for option in options:
        if (values := _values_of(option)) is not None:
            nodes += [_text(text) for value in values if (text := _text_of(value, types, end)) is not None]
            is_full = is_full and option.keys() <= {"type", "enum", "const"}
            continue
        kinds = _kinds(option)
        others = kinds - STRING
        if others:
            nodes.append(json_value({**option, "type": sorted(others)}, root))
            is_full = is_full and (others <= {"null"} or option.keys() <= {"type"} or "string" not in kinds)
        if not kinds or "string" in kinds:
            said = option.keys() - {"type"}
            pattern = _expression(option, end) if said and said <= _OF_STRINGS and kinds <= {"string", "null"} else None
            is_free, has_pattern = is_free or pattern is None, has_pattern or pattern is not None
            is_full = is_full and (not said or pattern is not None)
            about = json.dumps(declared, sort_keys=True)
            nodes.append(FREE if pattern is None else {"type": "regex", "pattern": pattern, ABOUT: about})
    others_too = bool(types - {"string", "null"})
    if is_free:
        constrained = any(_kinds(option) - {"string", "null"} and option.keys() - {"type"} for option in options)
        return TaggedValue(True, FREE, is_full and not (others_too and constrained))
    if not nodes:
        return TaggedValue(True, FREE, False)
    node = nodes[0] if len(nodes) == 1 else {"type": "or", "elements": nodes}
    return TaggedValue(True, node, is_full and not (has_pattern and others_too))


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


def _text_of(value: Any, types: frozenset[str], end: str | None) -> str | None:
    """Return how a value is written; None where it would be read as another, or holds the tag behind it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    read = json.loads(value_text(text, types)) if types != STRING else text
    is_read = type(read) is type(value) and read == value
    return text if is_read and not (end is not None and end in text) else None


def _expression(option: Option, end: str | None) -> str | None:
    """Return an expression for a string's pattern and length; None: it is none."""
    least, most = option.get("minLength", 0), option.get("maxLength")
    try:
        re.compile(option.get("pattern", ""))
    except re.error:
        return None
    ahead = '(?!\\s*")'  # which would be read as JSON
    ahead += f"(?![\\s\\S]*{re.escape(end)})" if end else ""
    if least or most is not None:
        ahead += f"(?=[\\s\\S]{{{int(least)},{'' if most is None else int(most)}}}$)"
    if "pattern" in option:
        ahead += f"(?=[\\s\\S]*(?:{option['pattern']}))"
    return f"^{ahead}[\\s\\S]*$"


def _text(value: str) -> Node:
    return {"type": "const_string", "value": value}
