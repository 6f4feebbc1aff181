"""The normal form of schemas means the same, in keywords of one draft, and its places are those of the given one."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import jsonschema
import pytest
from grammar_routes import written
from random_pairs import CHECKER, Maker, is_valid, meant

from dovetail.contracts.errors import RequestError
from dovetail.grammar.spec.normal import plain
from dovetail.sdk.schemas import schema
from dovetail.sdk.schemas.references import check_references
from dovetail_grammar.expressions import complement
from dovetail_grammar.rewriting import finder

NUM = int(os.environ.get("DOVETAIL_RANDOM_NORMAL", "600"))
DRAFT4, DRAFT7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"


def holds(form: Any, value: Any) -> bool:
    """Whether a value conforms to a schema of draft 2020-12."""
    return bool(jsonschema.Draft202012Validator(meant(form), format_checker=CHECKER).is_valid(value))


def test_random_schemas_mean_the_same() -> None:
    """On random instances, the draft's own validator judges a schema as 2020-12's judges its forms."""
    num_valid = num = 0
    for seed in range(NUM):
        maker = Maker(seed)
        given = maker.schema()
        judged, form = plain(given), written(given).schema
        for _ in range(12):
            value = maker.instance(given)
            expected = is_valid(given, value)
            assert holds(judged, value) == expected, (given, value)
            if "unevaluated" not in json.dumps(form):  # what is evaluated depends on how a schema is written
                assert holds(form, value) == expected, (given, form, value)
            num_valid += expected
            num += 1
    assert 0.1 * num < num_valid < 0.9 * num


EVALUATED: list[tuple[Any, Any]] = [
    ({"properties": {"a": {}}, "additionalProperties": True, "unevaluatedProperties": False}, {"a": 1, "b": 2}),
    ({"allOf": [{"additionalProperties": True}], "unevaluatedProperties": False}, {"b": 2}),
    ({"allOf": [{"unevaluatedProperties": True}], "unevaluatedProperties": False}, {"b": 2}),
    ({"prefixItems": [{"type": "string"}], "items": True, "unevaluatedItems": False}, ["a", 42]),
    ({"allOf": [{"items": True}], "unevaluatedItems": False}, [1]),
    ({"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "unevaluatedProperties": False}, {"a": 1}),
]
"""Schemas, and what they allow because what says nothing else says that everything is evaluated."""


@pytest.mark.parametrize(("given", "value"), EVALUATED)
def test_what_allows_everything_evaluates_it(given: Any, value: Any) -> None:
    """Finished texts are judged so, and no form of the schema forbids them."""
    assert is_valid({"$schema": "https://json-schema.org/draft/2020-12/schema", **given}, value)
    assert holds(plain(given), value)
    assert holds(written(given).schema, value)
    assert not holds(written({"properties": {"a": {}}, "unevaluatedProperties": False}).schema, {"b": 1})


ENFORCEABLE: dict[str, Any] = {
    "no-ops": {
        "uniqueItems": False, "not": False, "minItems": 0, "minProperties": 0, "additionalProperties": True,
        "contains": {"type": "null"}, "minContains": 0, "if": {"type": "null"}, "dependentRequired": {},
        "propertyNames": True, "allOf": [True, {}],
    },
    "not required": {"not": {"required": ["a"]}},
    "not of a named value": {
        "properties": {"a": {"enum": [1, 2]}}, "not": {"properties": {"a": {"const": 1}}, "required": ["a"]},
    },
    "if": {
        "properties": {"kind": {"enum": ["x", "y"]}, "n": {}},
        "if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]}, "then": {"required": ["n"]},
    },
    "oneOf of types": {
        "oneOf": [{"type": "string"}, {"type": "null"}, {"$ref": "#/$defs/o"}], "$defs": {"o": {"type": "object"}},
    },
    "oneOf told apart": {
        "oneOf": [{"type": "object", "properties": {"t": {"const": n}}, "required": ["t"]} for n in "ab"]
    },
    "oneOf required": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "dependencies": {"$schema": DRAFT7, "dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
    "propertyNames": {"propertyNames": {"pattern": "^[a-z]+$"}, "properties": {"A": {}, "b": {"type": "integer"}}},
    "one of some properties": {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1},
    "lists of items": {"$schema": DRAFT7, "items": [{"type": "integer"}], "additionalItems": False},
    "exclusive as in draft 4": {"$schema": DRAFT4, "minimum": 3, "exclusiveMinimum": True},
    "unevaluated": {"properties": {"a": {}}, "unevaluatedProperties": False},
    "unevaluated beside references": {
        "$ref": "#/$defs/x", "properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}],
        "anyOf": [{"required": ["a"]}],
        "unevaluatedProperties": False, "$defs": {"x": {"patternProperties": {"^x-": {"type": "integer"}}}},
    },
    "if, of open texts": {
        "if": {"properties": {"a": {"const": "x.y"}}, "required": ["a"]}, "then": {"required": ["b"]},
    },
    "if, of numbers": {
        "if": {"properties": {"a": {"enum": [1, 5]}}}, "then": {"required": ["b"]}, "else": {"maxProperties": 1},
    },
    "if, of what the schema around says": {
        "properties": {"on": {"type": "boolean"}},
        "allOf": [{"if": {"properties": {"on": {"const": True}}}, "then": {"required": ["b"]}}],
    },
    "not a pattern": {"not": {"pattern": "^(and|or)$"}},
    "not some texts": {"type": "string", "not": {"enum": ["a", "b+", "c.d"]}},
    "oneOf, a text or a pattern": {"oneOf": [{"enum": ["auto", "off"]}, {"type": "string", "pattern": "^[0-9]+$"}]},
    "oneOf of lengths": {"oneOf": [{"type": "string", "maxLength": 0}, {"type": "string", "minLength": 1}]},
    "oneOf of options": {
        "oneOf": [{"$ref": "#/$defs/s"}, {"type": "object"}],
        "$defs": {"s": {"anyOf": [{"type": "string"}, {"type": "array"}]}},
    },
    "oneOf told apart by parts": {
        "oneOf": [{"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"k": {"enum": [kind]}}}]} for kind in "ab"],
        "$defs": {"base": {"type": "object", "properties": {"k": {"enum": ["a", "b", "c"]}}, "required": ["k"]}},
    },
    "$recursiveRef without another": {"$recursiveAnchor": True, "properties": {"a": {"$recursiveRef": "#"}}},
}  # fmt: skip
REFUSED = {
    "uniqueItems", "not", "if", "then", "else", "oneOf", "dependencies", "dependentRequired", "dependentSchemas",
    "propertyNames", "contains", "unevaluatedProperties", "additionalItems",
}  # fmt: skip


@pytest.mark.parametrize("name", ENFORCEABLE)
def test_what_can_be_said_in_plain_keywords_is(name: str) -> None:
    """Nothing that backends refuse is left of these."""
    form = written(ENFORCEABLE[name]).schema
    used = {key for _, node in schema.every(form) if isinstance(node, dict) for key in node}
    assert not used & REFUSED, form


def test_an_expression_that_goes_back_for_ever_is_not_looked_for() -> None:
    """It would keep the process busy that routes requests: the keyword stays, and backends leave it out."""
    given = {"propertyNames": {"pattern": "^((a|aa)+b?)+$"}, "properties": {"a" * 60 + "!": {}}}
    assert "propertyNames" in written(given).schema
    given = {"oneOf": [{"const": "a" * 60 + "!"}, {"type": "string", "pattern": r"^((a|aa)+\1?)+$"}]}
    assert "oneOf" in written(given).schema


def test_where_going_back_takes_too_long_an_automaton_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever time is left by this thread's clock: options are told apart by work that is counted, the same each time.

    The library stops by the clock of all threads of the process, which runs ahead where others work too.
    """
    monkeypatch.setattr(finder.time, "thread_time", lambda: 0.0)
    searched = finder.Finder()
    with pytest.raises(ValueError, match="timed out"):
        searched.matches("^((a|aa)+b?)+$", "a" * 60 + "!")
    with pytest.raises(ValueError, match="takes too long"):
        searched.matches("a", "a")
    given = {"oneOf": [{"const": "a" * 60 + "!"}, {"type": "string", "pattern": "^((a|aa)+b?)+$"}]}
    forms = [written(given).schema for _ in range(2)]
    assert forms[0] == forms[1]
    assert "oneOf" not in forms[0]


def test_a_schema_has_the_same_form_whatever_was_asked_before() -> None:
    """Answers about expressions that are kept count as much as they did when they were found."""
    patterns = [f"^[a-z]{{1,{size}}}$" for size in range(70, 100)]
    given = {"properties": {f"p{i}": {"not": {"type": "string", "pattern": one}} for i, one in enumerate(patterns)}}
    complement.cache_clear()
    began = time.thread_time()
    form = written(given).schema
    assert time.thread_time() - began < 2
    said = [name for name, part in form["properties"].items() if "not" not in part]
    assert 0 < len(said) < len(patterns)
    assert written(given).schema == form


def test_what_a_lost_reference_evaluates_is_not_guessed() -> None:
    """A reference out of the schema may evaluate any property and item: none is refused for it."""
    given = {"allOf": [{"$ref": "http://example.com/x.json"}], "properties": {"a": {}}, "unevaluatedProperties": False}
    form = written(given)
    assert not form.schema.keys() & {"additionalProperties", "unevaluatedProperties"}
    assert form.dropped == ("/allOf/0/$ref", "/unevaluatedProperties")
    items = written({"$ref": "http://example.com/x.json", "unevaluatedItems": False})
    assert items.schema == {}
    assert items.dropped == ("/$ref", "/unevaluatedItems")


def test_references_become_local() -> None:
    """By `$id`, relative URI, anchor, pointer with escapes, and to a draft's metaschema."""
    given = {
        "$id": "http://example.com/root.json",
        "properties": {
            "a": {"$ref": "item.json"},
            "b": {"$ref": "#named"},
            "c": {"$ref": "#/$defs/x~1y"},
            "d": {"$ref": "http://example.com/item.json#/properties/n"},
            "e": {"$ref": DRAFT7},
            "f": {"$ref": "#"},
        },
        "$defs": {
            "i": {"$id": "item.json", "type": "object", "properties": {"n": {"type": "integer"}}},
            "n": {"$anchor": "named", "const": 1},
            "x/y": {"const": 2},
        },
    }
    schema.check(given)
    check_references(given)
    form = written(given)
    assert not form.dropped
    for value in ({"a": {"n": 1}, "b": 1, "c": 2, "d": 5, "e": {"type": "string"}, "f": {"b": 1}}, {}):
        assert holds(form.schema, value)
    for value in ({"a": {"n": "x"}}, {"b": 2}, {"c": 1}, {"d": "x"}, {"e": {"type": "strange"}}, {"f": {"b": 2}}):
        assert not holds(form.schema, value)


def test_a_reference_out_of_the_schema_is_named() -> None:
    """It is left out at its place; where it is all that there is, or leads nowhere within, the schema is refused."""
    given = {"properties": {"a": {"$ref": "http://example.com/x.json"}, "b": {"type": "integer"}}}
    check_references(given)
    assert written(given).dropped == ("/properties/a/$ref",)
    for wrong in ({"$ref": "http://example.com/x.json"}, {"items": {"$ref": "#/$defs/none"}}):
        with pytest.raises(RequestError, match="nothing"):
            check_references(wrong)


def test_places_are_those_of_the_given_schema() -> None:
    """Keywords of the form are traced back through renaming, moved definitions and rewriting."""
    given = {
        "$schema": DRAFT7,
        "properties": {
            "a": {"$ref": "#/definitions/x"},
            "b": {"oneOf": [{"uniqueItems": True}, {"uniqueItems": True}]},
        },
        "definitions": {"x": {"items": [{"pattern": "a"}], "dependencies": {"q": {"uniqueItems": True}}}},
    }
    form = written(given)
    found = {
        form.place(f"{pointer}/{key}")
        for pointer, node in schema.every(form.schema)
        if isinstance(node, dict)
        for key in node
    }
    assert {
        "/definitions/x/items/0/pattern",
        "/definitions/x/dependencies/q/uniqueItems",
        "/properties/b/oneOf/1/uniqueItems",
    } <= found


def test_counts_are_whole_numbers() -> None:
    """A whole number as a float is one; a bound near the largest float, and a NUL in a pattern, are no faults."""
    form = written({"maximum": 1.797e308, "minLength": 2.0, "pattern": "^[^\\u0000]*$"}).schema
    assert (form["maximum"], form["minLength"]) == (1.797e308, 2)
    assert isinstance(form["minLength"], int)


def test_counts_that_cannot_be_reached_allow_nothing() -> None:
    """More properties than an object may have: no list of types without a type."""
    form = written(
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False, "minProperties": 3}
    ).schema
    schema.check(form)
    assert not holds(form, {"a": 1})


def test_large_schemas_are_normal_in_linear_time() -> None:
    """Ten thousand properties, and a thousand options, grow no worse than they are."""
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10_000)}, "minProperties": 1}
    assert len(written(many).source) < 3 * len(json.dumps(many))
    options = {"oneOf": [{"properties": {"t": {"const": i}}, "required": ["t"]} for i in range(1000)]}
    assert len(written(options).source) < 3 * len(json.dumps(options))
