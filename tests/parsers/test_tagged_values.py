"""What a schema says of a value between tags, resolved as any schema is."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from typing import Any

import pytest

from dovetail.contracts.output import ContentDelta, FormatSpec
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


@pytest.mark.parametrize("value", ["\n", " ", "\t\t", "", "a\n", "<![CDATA[a]]>", "\n<![CDATA[a]]>\n"])
def test_blank_values_of_minicpm5_are_values(value: str) -> None:
    """A value of nothing but blanks is one; what stands in CDATA comes without it."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}}
    (entry,) = entry_points(group="dovetail.tool_parsers.v1", name="minicpm5")
    spec = entry.load()().extend(FormatSpec(), [tool])
    text = f'<function name="f"><param name="x">{value}</param></function>'
    (call,) = parse_full(make_parser(spec), text=text).tool_calls
    assert json.loads(call.arguments) == {"x": "a" if "CDATA" in value else value}
    grammar = entry.load()().grammar([tool], "required", False, False)
    assert grammar is not None
    assert "<![CDATA[" in grammar.source, "no string holds it"


def test_quotes_that_nothing_closes_lose_no_call() -> None:
    """A list with a quotation mark too many is read on to the reply's end, where another call is begun and breaks."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "array"}}}}}
    (entry,) = entry_points(group="dovetail.tool_parsers.v1", name="qwen3-coder")
    open_value = (
        '<tool_call>\n<function=f>\n<parameter=x>\n["a", "</parameter>"]"\n</parameter>\n</function>\n</tool_call>'
    )
    broken = "<tool_call>\n<function=f>\n<parameter=x>\nP</tool_call>"
    text = f"{open_value}it\n{broken}\n<tool_call>\n<function=f>\n</function>\n</tool_call>"
    parser = make_parser(entry.load()().extend(FormatSpec(), [tool]))
    events = [*parser.feed((), text), *parser.finish("stop")]
    kinds = [type(event).__name__ for event in events if type(event).__name__.startswith("Tool")]
    assert kinds.count("ToolStart") == kinds.count("ToolEnd") == 2
    assert kinds[-1] == "ToolEnd"
    assert [kinds[at + 1] for at, kind in enumerate(kinds[:-1]) if kind == "ToolEnd"] == ["ToolStart"]


def test_what_stands_behind_a_call_in_doubt_is_kept_wherever_it_is_cut() -> None:
    """A value that holds the section's end has been read apart from the rest; what follows the call is content."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}
    (entry,) = entry_points(group="dovetail.tool_parsers.v1", name="seed-oss")
    spec = entry.load()().extend(FormatSpec(), [tool])
    text = "<function=f>\n<parameter=x>\n[1]\n</seed:tool_call>2\n</parameter>\n</function><｜b c｜>\nd"
    for at in range(len(text) + 1):
        parser = make_parser(spec)
        events = [*parser.feed((), text[:at]), *parser.feed((), text[at:]), *parser.finish("stop")]
        assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == "<｜b c｜>\nd", at
