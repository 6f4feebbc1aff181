"""Refusals say where in the schema the cause stands, and what to write instead."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from served import ASK, Served

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarSpec, Kind
from dovetail.grammar.spec.advice import ADVICE
from dovetail.grammar.spec.diagnostics import explained
from dovetail.grammar.spec.fields import check_spec
from dovetail.grammar.spec.refusals import BUSY, TOO_COMPLEX
from dovetail.grammar.spec.route import GrammarRoute, ToolSchema


def route_of(given: Any, kind: Kind = Kind.JSON, tools: tuple[ToolSchema, ...] = ()) -> GrammarRoute:
    return GrammarRoute(GrammarSpec(kind=kind, source=json.dumps(given)), (), "response_format", tools)


INNER: Any = {"properties": {"deep": {"items": {"type": "integer", "multipleOf": 5_000_011}}, "free": {"maxLength": 9}}}
MANY: dict[str, Any] = {f"p{i}": {} for i in range(3000)}


@pytest.mark.parametrize(
    ("given", "code", "message", "place"),
    [
        (INNER, TOO_COMPLEX, "the grammar took too long", "/properties/deep/items/multipleOf"),
        ({"a": 1, "properties": MANY}, TOO_COMPLEX, "it took too long", "/properties"),
        ({"items": {"enum": list(range(900))}}, TOO_COMPLEX, "it took too long", "/items/enum"),
        ({"items": {"pattern": "^((a{1,90}){1,90})$"}}, TOO_COMPLEX, "it took too long", "/items/pattern"),
        (
            {"properties": {"parts": False}, "required": ["parts"]},
            "invalid_grammar",
            "Unsatisfiable schema: required property 'parts' is unsatisfiable",
            "/properties/parts",
        ),
        ({"items": {"minimum": 3, "maximum": 2}}, "invalid_grammar", "Unsatisfiable schema", "/items/minimum"),
        ({"items": {"enum": [1], "type": "string"}}, "invalid_grammar", "Unsatisfiable schema", "/items/enum"),
        ({"const": 1.5, "type": "integer"}, "invalid_grammar", "Unsatisfiable schema", "/const"),
        (
            {"properties": {"x": {"allOf": [{"type": "string"}, {"type": "integer"}]}}},
            "invalid_grammar",
            "Unsatisfiable schema: incompatible types",
            "/properties/x/allOf",
        ),
        (
            {"items": {"required": ["a"], "properties": {"b": {}}, "additionalProperties": False}},
            "invalid_grammar",
            "Unsatisfiable schema: required property 'a' is unsatisfiable",
            "/items/required",
        ),
        (False, "invalid_grammar", "Unsatisfiable schema: schema is false", "/"),
        ({"items": {"pattern": "a(b"}}, "invalid_grammar", "regex parse error: a(b", "/items/pattern"),
        ({"items": {"oneOf": [{}]}}, "unsupported_grammar", "oneOf constraints are not supported", "/items/oneOf"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_place_is_found(given: Any, code: str, message: str, place: str) -> None:
    """By cost where it took too long, else by what the message speaks of; with advice."""
    said = explained(route_of(given), code, message)
    assert said.startswith(f"{message}; see {place} (")


def test_places_in_tools_and_tags_point_into_the_request() -> None:
    """Behind the place of the tool's parameters, or of the schema in the structural grammar."""
    tool = ToolSchema("f", json.dumps(INNER), "/tools/2/function/parameters")
    said = explained(route_of({}, Kind.STRUCTURAL, (tool,)), TOO_COMPLEX, "slow")
    assert "/tools/2/function/parameters/properties/deep/items/multipleOf (use a smaller divisor" in said
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": INNER}}
    assert "/format/json_schema/properties/deep" in explained(route_of(tag, Kind.STRUCTURAL), TOO_COMPLEX, "slow")


def test_what_is_not_the_grammars_fault_stays_as_it_is() -> None:
    """A busy server, an error without a code, a grammar without schemas."""
    assert explained(route_of(INNER), BUSY, "busy") == "busy"
    assert explained(route_of(INNER), None, "gone") == "gone"
    assert explained(None, TOO_COMPLEX, "slow") == "slow"
    regex = GrammarRoute(GrammarSpec(kind=Kind.REGEX, source="("), (), "regex")
    assert explained(regex, "invalid_grammar", "nobody knows why") == "nobody knows why"


def test_positions_are_told_where_there_are_no_places() -> None:
    """Of a NUL, and of what is nested too deeply."""
    with pytest.raises(RequestError, match="position 1"):
        check_spec(GrammarSpec(kind=Kind.REGEX, source="a\0"))
    with pytest.raises(RequestError, match="position 64"):
        check_spec(GrammarSpec(kind=Kind.JSON, source="[" * 70 + "]" * 70))


def test_there_is_advice_for_what_is_often_too_costly() -> None:
    """Not only for what backends do not know."""
    for keyword in ("enum", "properties", "anyOf", "allOf", "multipleOf", "pattern", "maxLength", "maxItems"):
        assert ADVICE[keyword]


def refused(served: Served, schema: Any) -> requests.Response:
    return served.post("/v1/chat/completions", messages=ASK, max_tokens=5, json_schema=schema, stream=False)


def test_a_refusal_over_http_names_the_place(served: Served) -> None:
    """What no text conforms to is found by the engine; the reply says where."""
    reply = refused(
        served,
        {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["n"]},
    )
    assert reply.status_code == 400
    assert "/properties/n" in reply.json()["error"]["message"]


def said_of(served: Served, **grammar: Any) -> str:
    """Return the message of a grammar's refusal."""
    reply = served.post("/v1/chat/completions", messages=ASK, max_tokens=5, stream=False, **grammar)
    assert reply.status_code == 400, reply.text
    message: str = reply.json()["error"]["message"]
    return message


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("grammar", "parts"),
    [
        ({"regex": "ab(c"}, ['the regex "ab(c" cannot be read at character 3 ("(")', "close it"]),
        ({"regex": "x[z-a]"}, ['at character 3 ("z-a")', "the smaller character first"]),
        ({"regex": "a{5,2}"}, ['character 2 ("{5,2}")', "the smaller number first"]),
        ({"regex": "(a)\\1"}, ["backreferences", "write the texts out"]),
        ({"regex": "(?m)^a$"}, ["a line anchor", "write the line breaks out"]),
        ({"regex": "a^"}, ["matches no text", "look for an anchor"]),
        ({"ebnf": "root ::= x"}, ["the rule 'x' is not defined", "define it"]),
        ({"ebnf": 'root ::= "a'}, ["line 1, column 10", "a quote"]),
        ({"ebnf": 'foo ::= "a"'}, ["no rule `root`", "begins with root"]),
        ({"ebnf": 'root ::= root "a"'}, ["allows no text", "does not lead back to it"]),
        ({"structured_outputs": {"grammar": "start: x"}}, ["line 1, column 8", "unknown name", "define it"]),
        ({"json_schema": {"type": "integer", "enum": ["a"]}}, ["Unsatisfiable", "/enum (none of its values"]),
    ],
    ids=str,
)
def test_a_refusal_over_http_says_where_and_what_instead(served: Served, grammar: Any, parts: list[str]) -> None:
    """In expressions and rules, too; nothing of how the grammar is written for a library is in it."""
    said = said_of(served, **grammar)
    assert all(part in said for part in parts), said
    assert " | start" not in said


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ({"type": "regex", "pattern": "a("}, "/format/elements/0/pattern (close it"),
        ({"type": "grammar", "grammar": "root ::= x"}, "/format/elements/0/grammar (define it"),
        (
            {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 5, "maximum": 1}},
            "/json_schema/minimum",
        ),
    ],
    ids=str,
)
def test_a_refusal_of_a_structural_tag_names_the_part(served: Served, content: Any, place: str) -> None:
    """By its place in the tag."""
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [content]}}
    said = said_of(served, response_format=tag)
    assert place in said, said
    assert "%json" not in said
