"""Random schemas and instances: what is called full accepts nothing invalid, in any spelling, alone or in a tool call.

`DOVETAIL_RANDOM_PAIRS=100000 pytest tests/grammar/test_random_pairs.py` is the whole run; other pairs with
`DOVETAIL_RANDOM_SEED=2`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import pytest
from grammar_routes import Enforced, backends_of
from random_pairs import Maker, is_valid

from dovetail.contracts.grammar import GrammarBackend, GrammarSpec, Kind, Vocabulary
from dovetail.grammar.pipeline import StructuredOutputs
from dovetail.grammar.spec.route import GrammarRouter
from dovetail.plugins import Registry, load, make_plan
from dovetail_testing.conformance.grammar_samples import small_vocabulary

NUM = int(os.environ.get("DOVETAIL_RANDOM_PAIRS", "1200"))
SEED = int(os.environ.get("DOVETAIL_RANDOM_SEED", "0"))
MANY = 10_000
PER_SCHEMA = 10
BEGIN, END = '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Every byte is a token."""
    return small_vocabulary()


@pytest.fixture(scope="module")
def backends(vocabulary: Vocabulary) -> dict[str, GrammarBackend]:
    return backends_of(vocabulary)


def enforced_alone(given: Any, backends: dict[str, GrammarBackend], vocabulary: Vocabulary) -> Enforced:
    spec = GrammarSpec(kind=Kind.JSON, source=json.dumps(given, ensure_ascii=False))
    return Enforced(GrammarRouter(backends).route(spec, "json_schema"), backends, vocabulary, full_only=NUM > MANY)


def enforced_in_a_call(given: Any, backends: dict[str, GrammarBackend], vocabulary: Vocabulary) -> Enforced:
    parser = load(make_plan(Registry.scan(), tool_parser="hermes"), "api").get("tool_parser", "hermes")()
    tools = [{"type": "function", "function": {"name": "f", "parameters": given}}]
    front = StructuredOutputs(backends)
    try:
        route = front.tools(parser, "hermes", tools, "required", parallel=False, param="tools")
    finally:
        front.close()
    return Enforced(route, backends, vocabulary, full_only=NUM > MANY)


@pytest.mark.parametrize("in_a_call", [False, True], ids=["alone", "in a tool call"])
def test_full_accepts_nothing_invalid(
    backends: dict[str, GrammarBackend], vocabulary: Vocabulary, in_a_call: bool
) -> None:
    """By the validators of the schemas' own drafts; most valid texts in the schema's order are accepted."""
    levels: Counter[str] = Counter()
    num_full = num_valid = num_rejected = 0
    for seed in range(NUM // PER_SCHEMA // 2):
        maker = Maker(seed + (1 << 20) * (1 + in_a_call) + (SEED << 22))
        given = maker.schema()
        if in_a_call:
            given = {
                "$schema": given["$schema"],
                "definitions": given["definitions"],
                "allOf": [{**given, "type": "object"}],
            }
            given["allOf"][0].pop("definitions")
        enforce = enforced_in_a_call if in_a_call else enforced_alone
        found = enforce(given, backends, vocabulary)
        levels[found.enforcement] += 1
        if found.enforcement != "full":
            if found.enforcement == "approximate":
                assert found.ignored
            continue
        for _ in range(PER_SCHEMA):
            value = maker.instance(given)
            text, expected = maker.text(value), is_valid({**given, "type": "object"} if in_a_call else given, value)
            accepted = found.accepts(BEGIN + text + END if in_a_call else text)
            assert expected or not accepted, (given, text)
            num_full += 1
            num_valid += expected
            num_rejected += expected and not accepted
    print(dict(levels), f"{num_full} pairs in full; {num_rejected} of {num_valid} valid texts rejected")
    assert levels["full"] > 0.3 * levels.total()
    assert num_rejected < 0.5 * num_valid


DRAFT = "https://json-schema.org/draft/2020-12/schema"
OPTIONS = [
    {"properties": {"a": {"enum": [1, 2]}}},
    {"type": "object", "properties": {"a": {"enum": ["b", 1]}, "b": {"enum": [{"a": 1}]}}, "required": ["a"]},
]
"""Of these a `oneOf` can be said only by allowing less: nothing but objects."""


@pytest.mark.parametrize(
    ("given", "invalid"),
    [
        ({"oneOf": [{"oneOf": OPTIONS}, {"type": "number"}]}, "0"),
        ({"oneOf": [{"$ref": "#/$defs/x"}, {"type": "number"}], "$defs": {"x": {"oneOf": OPTIONS}}}, "0"),
        (
            {
                "type": "object",
                "required": ["p"],
                "oneOf": [{"properties": {"p": {"oneOf": OPTIONS}}}, {"properties": {"p": {"type": "number"}}}],
            },
            '{"p":0}',
        ),
        ({"not": {"oneOf": OPTIONS}}, "0"),
    ],
    ids=["inside", "by reference", "of a property", "not"],
)
def test_what_allows_less_is_not_negated(
    backends: dict[str, GrammarBackend], vocabulary: Vocabulary, given: Any, invalid: str
) -> None:
    """To allow less within a `oneOf` or a `not` would allow more of the whole."""
    alone = enforced_alone({"oneOf": OPTIONS}, backends, vocabulary)
    assert (alone.enforcement, alone.accepts("0"), alone.accepts("{}")) == ("full", False, True)
    found = enforced_alone(given, backends, vocabulary)
    assert not is_valid({"$schema": DRAFT, **given}, json.loads(invalid))
    assert found.enforcement != "full" or not found.accepts(invalid)


@pytest.mark.parametrize("kinds", [["object", "null"], ["string", "object"]])
def test_arguments_are_an_object(backends: dict[str, GrammarBackend], vocabulary: Vocabulary, kinds: list[str]) -> None:
    """Whatever else a tool's schema allows: a client reads an object."""
    given = {"type": kinds, "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    found = enforced_in_a_call(given, backends, vocabulary)
    texts = ('{"a": 1}', "null", '"a"', "{}")
    assert [found.accepts(BEGIN + text + END) for text in texts] == [True, False, False, False]
