"""References in a tool's parameters, in formats that take them apart: to all of the schema, and by other names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammar_routes import Enforced, backends_of

from dovetail.contracts.grammar import GrammarBackend, GrammarSpec, Kind, Vocabulary
from dovetail.contracts.output import FormatSpec
from dovetail.contracts.tools import ToolParser
from dovetail.grammar.pipeline import StructuredOutputs
from dovetail.grammar.spec.normal import normalize
from dovetail.grammar.spec.route import GrammarRouter
from dovetail.plugins import Registry, load, make_plan
from dovetail.sdk.formats.output import make_parser, parse_full
from dovetail_testing.conformance.grammar_samples import small_vocabulary

TEXT = {"type": "string", "maxLength": 2}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"v": TEXT, "kids": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["v"],
    "additionalProperties": False,
}
NODE: dict[str, Any] = {**TREE, "properties": {"v": TEXT, "kids": {"type": "array", "items": {"$ref": "#/$defs/N"}}}}
ROOTS = {
    "itself": TREE,
    "a definition": {"$defs": {"N": NODE}, "$ref": "#/$defs/N"},
    "all of one": {"$defs": {"N": NODE}, "allOf": [{"$ref": "#/$defs/N"}], "title": "N"},
}
NAMED = {
    "anchor": {"$defs": {"S": {"$anchor": "s", **TEXT}}, "properties": {"v": {"$ref": "#s"}}},
    "dynamic": {"$defs": {"S": {"$dynamicAnchor": "s", **TEXT}}, "properties": {"v": {"$dynamicRef": "#s"}}},
    "escapes": {"$defs": {"a b%": TEXT}, "properties": {"v": {"$ref": "#/$defs/a%20b%25"}}},
    "list": {"$defs": {"S": {"anyOf": [TEXT, {}]}}, "properties": {"v": {"$ref": "#/$defs/S/anyOf/0"}}},
    "beside": {"$defs": {"S": {"type": ["string", "integer"]}}, "properties": {"v": {"$ref": "#/$defs/S", **TEXT}}},
    "all": {"properties": {"v": {"allOf": [{"type": ["integer", "string"]}, TEXT]}}},
}
"""A property that is a string of two characters at most."""
CALLS = {
    "qwen3-coder": "<tool_call>\n<function=f>\n{}</function>\n</tool_call>",
    "pythonic": "[f({})]",
    "gemma4": "<|tool_call>call:f{{{}}}<tool_call|>",
}
ARGUMENTS = {
    "qwen3-coder": "<parameter=v>\n{v}\n</parameter>\n<parameter=kids>\n{kids}\n</parameter>\n",
    "pythonic": 'v="{v}", kids={kids}',
    "gemma4": 'v:<|"|>{v}<|"|>,kids:{kids}',
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return small_vocabulary()


@pytest.fixture(scope="module")
def backends(vocabulary: Vocabulary) -> dict[str, GrammarBackend]:
    return backends_of(vocabulary)


def parser_of(name: str) -> ToolParser:
    return load(make_plan(Registry.scan(), tool_parser=name), "api").get("tool_parser", name)()


def enforced(name: str, schema: Any, backends: dict[str, GrammarBackend], vocabulary: Vocabulary) -> Enforced:
    front = StructuredOutputs(backends)
    try:
        route = front.tools(parser_of(name), name, [tool(schema)], "required", parallel=False, param="tools")
    finally:
        front.close()
    return Enforced(route, backends, vocabulary)


def tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("name", CALLS)
def test_what_refers_to_the_whole_is_enforced(
    name: str, root: str, backends: dict[str, GrammarBackend], vocabulary: Vocabulary
) -> None:
    """In full, and a string that looks like a number is read as one."""
    found = enforced(name, ROOTS[root], backends, vocabulary)
    assert found.enforcement == "full"
    for kids, is_valid in (("[]", True), ('[{"v": "ab"}]', True), ("[[]]", False), ('[{"v": "abc"}]', False)):
        text = CALLS[name].format(ARGUMENTS[name].format(v="5", kids=kids))
        assert found.accepts(text) == is_valid, text
        if is_valid:
            spec = parser_of(name).extend(FormatSpec(), [tool(ROOTS[root])])
            (call,) = parse_full(make_parser(spec), text=text).tool_calls
            assert json.loads(call.arguments) == {"v": "5", "kids": json.loads(kids)}


@pytest.mark.parametrize("given", NAMED)
def test_a_property_is_read_as_it_is_enforced(
    given: str, backends: dict[str, GrammarBackend], vocabulary: Vocabulary
) -> None:
    """By whatever name it refers to its type."""
    schema = {"type": "object", "required": ["v"], **NAMED[given]}
    found = enforced("qwen3-coder", schema, backends, vocabulary)
    assert found.enforcement == "full"
    text = CALLS["qwen3-coder"].format("<parameter=v>\n5\n</parameter>\n")
    assert found.accepts(text)
    (call,) = parse_full(
        make_parser(parser_of("qwen3-coder").extend(FormatSpec(), [tool(schema)])), text=text
    ).tool_calls
    assert json.loads(call.arguments) == {"v": "5"}


def test_a_type_that_the_reader_does_not_see_is_named(
    backends: dict[str, GrammarBackend], vocabulary: Vocabulary
) -> None:
    """It would read a number where the schema says, in a way of its own, that there is a string."""
    schema = {"type": "object", "properties": {"v": {"if": {"type": "string"}, "else": False}}, "required": ["v"]}
    found = enforced("qwen3-coder", schema, backends, vocabulary)
    assert (found.enforcement, found.ignored) == ("approximate", ("/tools/0/function/parameters/properties/v",))


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}])
def test_a_circle_ends(schema: dict[str, Any]) -> None:
    """A schema that names itself has no properties."""
    assert "properties" not in normalize({"type": "object", **schema}, is_split=True).schema


def test_places_are_those_of_the_schema_as_it_came() -> None:
    """Also of a definition that became the whole."""
    normal = normalize({"type": "object", **ROOTS["a definition"]}, is_split=True)
    assert normal.place("/properties/v/maxLength") == "/$defs/N/properties/v/maxLength"


def test_styles_of_structural_tags_refer_to_the_whole(
    backends: dict[str, GrammarBackend], vocabulary: Vocabulary
) -> None:
    """Not to the value that the reference stands in."""
    inner = {"type": "object", "properties": {"v": {"type": "integer"}, "b": {"$ref": "#/properties/v"}}}
    for schema, tag, good, bad in (
        (TREE, "kids", '[{"v":"a"}]', "[[]]"),
        ({"type": "object", "properties": {"v": {"enum": ["q"]}, "o": inner}}, "o", '{"b":"q"}', '{"b":3}'),
    ):
        content = {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}
        source = json.dumps({"type": "structural_tag", "format": content})
        route = GrammarRouter(backends).route(GrammarSpec(kind=Kind.STRUCTURAL, source=source), "structural_tag")
        found = Enforced(route, backends, vocabulary)
        lead = "<parameter=v>q</parameter>"
        assert found.enforcement == "full"
        assert found.accepts(f"{lead}<parameter={tag}>{good}</parameter>")
        assert not found.accepts(f"{lead}<parameter={tag}>{bad}</parameter>")
