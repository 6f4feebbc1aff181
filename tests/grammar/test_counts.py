"""Counts of properties: enforced where any keys may come, and no key has to be invented."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from grammar_routes import written

from dovetail.contracts.grammar import GrammarLimits, Vocabulary
from dovetail.grammar.spec.fields import json_spec
from dovetail.grammar.spec.route import GrammarRouter
from dovetail.grammar.spec.wire import spec_of
from dovetail.plugins import Registry, load, make_plan
from dovetail_grammar.rewriting.counts import MAX_SINGLE
from dovetail_testing.conformance.grammar_samples import small_vocabulary

COUNTS: list[dict[str, int]] = [
    {"minProperties": 1},
    {"minProperties": 2},
    {"maxProperties": 0},
    {"maxProperties": 2},
    {"minProperties": 1, "maxProperties": 1},
    {"minProperties": 2, "maxProperties": 3},
    {"minProperties": 3, "maxProperties": 3},
    {"minProperties": 2, "maxProperties": 1},
    {"minProperties": 9},
]
BESIDE: list[dict[str, Any]] = [
    {},
    {"required": ["a"]},
    {"required": ["z"]},
    {"patternProperties": {"^x": {}}},
    {"patternProperties": {"^x": {}}, "additionalProperties": False},
    {"additionalProperties": False},
    {"additionalProperties": {"type": "integer"}},
]
PARTS = {"a": {}, "b": {}, "c": {}}
OBJECTS = [
    dict.fromkeys(keys, 1) for size in range(6) for keys in itertools.combinations(["a", "b", "c", "xa", "z"], size)
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Every byte is a token."""
    return small_vocabulary()


@pytest.mark.sampled
@pytest.mark.parametrize("beside", BESIDE, ids=json.dumps)
@pytest.mark.parametrize("counts", COUNTS, ids=json.dumps)
def test_the_normal_form_means_the_same(counts: dict[str, int], beside: dict[str, Any]) -> None:
    """For all sets of declared and other keys."""
    given = {"type": "object", "properties": PARTS, **counts, **beside}
    made = written(given).schema
    for value in OBJECTS:
        expected = jsonschema.Draft202012Validator(given).is_valid(value)
        assert jsonschema.Draft202012Validator(made).is_valid(value) == expected, (value, made)


@pytest.mark.sampled
@pytest.mark.parametrize("beside", BESIDE[:2] + BESIDE[3:5], ids=json.dumps)
@pytest.mark.parametrize("counts", COUNTS[:2], ids=json.dumps)
def test_counts_of_open_objects_are_enforced(
    vocabulary: Vocabulary, counts: dict[str, int], beside: dict[str, Any]
) -> None:
    """By the first way, which rejects no conforming object. Two keys that are not declared may be the same one twice,
    which makes `minProperties` above one of them approximate."""
    given = {"type": "object", "properties": PARTS, **counts, **beside}
    plugins = load(make_plan(Registry.scan(), grammar_backend="llguidance"), "compiler")
    backend = plugins.get("grammar_backend", "llguidance")(vocabulary)
    way = GrammarRouter({"llguidance": backend}).route(json_spec(given, "x"), "x").options[0]
    assert way.enforcement == "full" or way.ignored == ("/minProperties",)
    assert way.enforcement == "full" or counts["minProperties"] > 1
    made = backend.compile(spec_of(way.grammar), GrammarLimits())
    matcher = (backend.load(made) if isinstance(made, bytes) else made).matcher()
    for value in OBJECTS:
        fresh, ids = matcher.fork(), list(json.dumps(value).encode())
        accepted = fresh.accept(ids) == len(ids) and fresh.accepting
        assert accepted == jsonschema.Draft202012Validator(given).is_valid(value), value


def test_many_properties_of_which_one_is_needed() -> None:
    """Up to a bound on alternatives; beyond it the count stays as it is."""
    for num, is_rewritten in ((MAX_SINGLE, True), (MAX_SINGLE + 2, False)):
        parts = {f"p{i}": {} for i in range(num)}
        made = written({"properties": parts, "additionalProperties": False, "minProperties": 1}).schema
        assert ("minProperties" not in made) == is_rewritten


def test_what_becomes_of_a_count_is_named_by_it() -> None:
    """Alternatives made of a count stood where the count stands."""
    form = written({"properties": {"n": {"properties": {"a": {}, "b": {}}, "minProperties": 1}}})
    assert form.place("/properties/n/anyOf") == "/properties/n/minProperties"
    assert form.place("/properties/n/anyOf/0/required") == "/properties/n/minProperties"


@pytest.mark.sampled
@pytest.mark.parametrize("count", [2**31, 2**40, 10**15, 2**64])
@pytest.mark.parametrize("more", [{}, {"additionalProperties": False}, {"additionalProperties": {"type": "string"}}])
def test_huge_counts_cost_nothing(count: int, more: dict[str, Any]) -> None:
    """A list as long as the count took all memory of the server's process."""
    given = {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}, "minProperties": count, **more}
    form = written(given).schema
    assert len(json.dumps(form)) < 1000
    written({**given, "maxProperties": count})
    written({**given, "minProperties": 1, "maxProperties": count})
