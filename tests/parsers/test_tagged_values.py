"""What a schema says of a value between tags, resolved as any schema is."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from typing import Any

import pytest

from dovetail.contracts.output import FormatSpec
from dovetail.sdk.formats.output import make_parser, parse_full
from dovetail.sdk.formats.tagged_values import tagged_value

ROOT = {"$defs": {"U": {"type": "string", "enum": ["red", "blue"], "title": "U"}}}
REF = {"$ref": "#/$defs/U"}


@pytest.mark.parametrize(
    ("declared", "texts"),
    [
        (REF, {"red", "blue"}),
        ({"anyOf": [REF, {"type": "null"}], "default": None}, {"red", "blue", "null"}),
        ({"allOf": [REF], "description": "of pydantic"}, {"red", "blue"}),
        ({"allOf": [REF, {"enum": ["blue", "green"]}]}, {"blue"}),
        ({"const": "x"}, {"x"}),
        ({"enum": ["5", 5, "</p>", "y", '"q"']}, {"5", "y"}),
    ],
)
def test_listed_values_are_what_may_come(declared: Any, texts: set[str]) -> None:
    """None that would be read as another value, nor one that holds the tag behind it."""
    node = tagged_value(declared, ROOT, ["</p>"]).node["json_schema"]
    assert {text for part in node.get("anyOf", [node]) for text in part["enum"]} == texts


@pytest.mark.parametrize(
    ("declared", "kinds", "is_full"),
    [
        ({"type": "string"}, ["any_text"], True),
        ({"type": ["string", "integer"]}, ["any_text"], True),
        ({"type": "string", "pattern": "^[a-z]{2}$"}, ["text"], True),
        ({"anyOf": [{"type": "string", "maxLength": 2000, "format": "date"}, {"type": "null"}]}, ["text"], True),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 9}]}, ["text", "json"], True),
        ({"anyOf": [{"type": "string", "pattern": "^t"}, {"type": "array", "items": {}}]}, ["text", "json"], True),
        ({"type": "integer"}, ["json"], True),
        ({"type": "string", "not": {"const": "a"}}, ["any_text"], False),
        ({"oneOf": [{"type": "string"}, {"enum": ["a"]}]}, ["any_text"], False),
    ],
)
def test_what_is_not_said_is_known(declared: Any, kinds: list[str], is_full: bool) -> None:
    """Of alternatives each is said that cannot be read as another; what is not said is not called full."""
    found = tagged_value(declared, ROOT, ["</p>"])
    nodes = found.node.get("elements", [found.node])
    shown = [node.get("style", "json") if node["type"] == "json_schema" else node["type"] for node in nodes]
    assert (shown, found.is_full) == (kinds, is_full)


@pytest.mark.parametrize("value", ["\n", " ", "\t\t", "", "a\n", "<![CDATA[a]]>"])
def test_blank_values_of_minicpm5_are_values(value: str) -> None:
    """A value of nothing but blanks is one; what stands in CDATA comes without it."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}}
    (entry,) = entry_points(group="dovetail.tool_parsers.v1", name="minicpm5")
    spec = entry.load()().extend(FormatSpec(), [tool])
    text = f'<function name="f"><param name="x">{value}</param></function>'
    (call,) = parse_full(make_parser(spec), text=text).tool_calls
    assert json.loads(call.arguments) == {"x": "a" if value.startswith("<!") else value}
    grammar = entry.load()().grammar([tool], "required", False, False)
    assert grammar is not None
    assert "<![CDATA[" in grammar.source, "no string holds it"
