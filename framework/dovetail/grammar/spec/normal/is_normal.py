"""Whether a schema is in the normal form as it was given: most that requests bring are, and need no second copy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_TEXT = 16 * 1024
"""Characters of a schema that is kept with its descriptions: a longer one is written without."""
_SAID = ("title", "description", "default", "examples")
_SILENT_PATTERNS = ("", ".*", "^.*")
_SCHEMA = frozenset(("items", "additionalProperties"))
_LISTED = frozenset(("properties", "anyOf"))
_NAME = re.compile(r"#/\$defs/([A-Za-z0-9_]+)")
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
        if not isinstance(named, dict) or _defines_elsewhere(root):
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


def _defines_elsewhere(root: Mapping[str, Any]) -> bool:
    """Whether the definitions are not those of a document of today's draft."""
    return any(key in root for key in ("$id", "id", "$schema", "$anchor"))


def _leads_to_one(reference: str, named: Mapping[str, Any]) -> bool:
    found = _NAME.fullmatch(reference)
    return found is not None and bool(named.get(found[1]))


def _anything(_: Any) -> bool:
    return True


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_most(value: Any) -> bool:
    return type(value) is int


def _is_bound(value: Any) -> bool:
    return not isinstance(value, bool)


def _is_schema(value: Any) -> bool:
    """Whether it is a schema that says something."""
    return isinstance(value, dict) and bool(value)


_PLAIN: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("title", "description", "default", "examples"), _anything),
    **dict.fromkeys(
        ("type", "enum", "const", "format", "multipleOf", "properties", "anyOf", "$ref", "$defs"), _anything
    ),
    **dict.fromkeys(("minItems", "minLength"), _is_count),
    **dict.fromkeys(("maxItems", "maxLength"), _is_most),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_bound),
    "required": bool,
    "items": _is_schema,
    "additionalProperties": lambda value: value is False or _is_schema(value),
    "pattern": lambda value: value not in _SILENT_PATTERNS,
}
"""Keywords that stay as they are, with a value that stays, too."""
_BARE = {key: passes for key, passes in _PLAIN.items() if key not in _SAID}
"""The same without descriptions."""
