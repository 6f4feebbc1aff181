"""What a schema says of a string between tags, resolved as any schema is."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.text.tool_calls.tagged_values import tagged_value

ROOT = {"$defs": {"U": {"type": "string", "enum": ["red", "blue"], "title": "U"}}}
REF = {"$ref": "#/$defs/U"}


@pytest.mark.parametrize(
    ("declared", "texts"),
    [
        (REF, {"red", "blue"}),
        ({"anyOf": [REF, {"enum": [None]}], "default": None}, {"red", "blue", "null"}),
        ({"allOf": [REF], "description": "of pydantic"}, {"red", "blue"}),
        ({"allOf": [REF, {"enum": ["blue", "green"]}]}, {"blue"}),
        ({"const": "x"}, {"x"}),
        ({"enum": ["5", 5, "</p>", "y"]}, {"5", "y"}),
    ],
)
def test_listed_values_are_what_may_come(declared: Any, texts: set[str]) -> None:
    """None that would be read as another value, nor one that holds the tag behind it."""
    node = tagged_value(declared, ROOT, "</p>").node
    found = {part["value"] for part in node.get("elements", [node])}
    assert found == texts


@pytest.mark.parametrize(
    ("declared", "kind", "is_full"),
    [
        ({"type": "string"}, "any_text", True),
        ({"type": "string", "pattern": "^[a-z]{2}$"}, "regex", True),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, "or", True),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 9}]}, "any_text", False),
        ({"anyOf": [{"type": "string", "pattern": "^t"}, {"type": "boolean"}]}, "or", False),
        ({"type": "string", "format": "date"}, "any_text", False),
        ({"oneOf": [{"type": "string"}, {"enum": ["a"]}]}, "any_text", False),
    ],
)
def test_what_is_not_said_is_known(declared: Any, kind: str, is_full: bool) -> None:
    """Free text that would be read as a number out of bounds is not called full."""
    found = tagged_value(declared, ROOT, "</p>")
    assert (found.node["type"], found.is_full) == (kind, is_full)
