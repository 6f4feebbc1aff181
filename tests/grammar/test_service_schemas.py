"""Tools of well-known services: what conforms may be called, what does not may not, in formats of JSON and of tags."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from cloud_schemas import CLOUDS
from grammar_routes import Enforced, backends_of
from service_schemas import SERVICES

from dovetail.contracts.grammar import GrammarBackend, GrammarSpec, Kind, Vocabulary
from dovetail.contracts.tools import ToolParser
from dovetail.grammar.pipeline import StructuredOutputs
from dovetail.grammar.spec.route import GrammarRouter
from dovetail.plugins import Registry, load, make_plan
from dovetail_testing.conformance.grammar_samples import small_vocabulary

CASES = SERVICES | CLOUDS
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
TAGS = {
    "qwen3-coder": ("<tool_call>\n<function=f>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n</tool_call>")
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Every byte is a token."""
    return small_vocabulary()


@pytest.fixture(scope="module")
def backends(vocabulary: Vocabulary) -> dict[str, GrammarBackend]:
    return backends_of(vocabulary)


def tagged(name: str, value: dict[str, Any]) -> str:
    """A call as a model writes it: strings as they are, other values as JSON."""
    begin, part, end = TAGS[name]
    texts = {key: each if isinstance(each, str) else json.dumps(each) for key, each in value.items()}
    return begin + "".join(part.format(key, text) for key, text in texts.items()) + end


@pytest.mark.parametrize("name", CASES)
def test_values_are_judged_as_they_are_meant(name: str) -> None:
    """By a validator."""
    given, right, wrong = CASES[name]
    judge = jsonschema.Draft202012Validator(given, format_checker=CHECKER)
    assert [value for value in right if not judge.is_valid(value)] == []
    assert [value for value in wrong if judge.is_valid(value)] == []


@pytest.mark.parametrize("name", CASES)
def test_alone(backends: dict[str, GrammarBackend], vocabulary: Vocabulary, name: str) -> None:
    """As a response format, in full."""
    given, right, wrong = CASES[name]
    route = GrammarRouter(backends).route(GrammarSpec(kind=Kind.JSON, source=json.dumps(given)), "json_schema")
    found = Enforced(route, backends, vocabulary)
    assert (found.enforcement, found.ignored) == ("full", ())
    assert [value for value in right if not found.accepts(json.dumps(value))] == []
    assert [value for value in wrong if found.accepts(json.dumps(value))] == []


@pytest.mark.parametrize("format_name", TAGS)
@pytest.mark.parametrize("name", CASES)
def test_as_a_tool_in_tags(
    backends: dict[str, GrammarBackend], vocabulary: Vocabulary, name: str, format_name: str
) -> None:
    """Where the report says full, no call is outside of its schema; what conforms may always be called."""
    given, right, wrong = CASES[name]
    parser: ToolParser = load(make_plan(Registry.scan(), tool_parser=format_name), "api").get(
        "tool_parser", format_name
    )()
    front = StructuredOutputs(backends)
    tools = [{"type": "function", "function": {"name": "f", "parameters": given}}]
    try:
        found = Enforced(
            front.tools(parser, format_name, tools, "required", parallel=False, param="tools"), backends, vocabulary
        )
    finally:
        front.close()
    assert (found.enforcement, found.ignored) == ("full", ())
    assert [value for value in right if not found.accepts(tagged(format_name, value))] == []
    assert [value for value in wrong if found.accepts(tagged(format_name, value))] == []
