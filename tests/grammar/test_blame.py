"""Refusals say where in the schema the cause stands, and what to write instead."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from served import ASK, Served

from dovetail.contracts.grammar import GrammarSpec, Kind
from dovetail.errors import RequestError
from dovetail.grammar.advice import ADVICE
from dovetail.grammar.blame import explained
from dovetail.grammar.limits import check_spec
from dovetail.grammar.refusals import BUSY, TOO_COMPLEX
from dovetail.grammar.route import Route, ToolSchema


def route_of(given: Any, kind: Kind = Kind.JSON, tools: tuple[ToolSchema, ...] = ()) -> Route:
    return Route(GrammarSpec(kind=kind, source=json.dumps(given)), (), "response_format", tools)


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
    regex = Route(GrammarSpec(kind=Kind.REGEX, source="("), (), "regex")
    assert explained(regex, "invalid_grammar", "unclosed group") == "unclosed group"


def test_positions_are_told_where_there_are_no_places() -> None:
    """Of a NUL, and of what is nested too deeply."""
    with pytest.raises(RequestError, match="position 12"):
        check_spec(GrammarSpec(kind=Kind.JSON, source='{"const": "a\\u0000"}'))
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
