"""What reading and routing a schema costs grows as the schema does, in whatever direction it grows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from dovetail.contracts.grammar import GrammarSpec, Kind, Vocabulary
from dovetail.grammar.spec.fields import check_spec
from dovetail.grammar.spec.route import GrammarRouter
from dovetail.plugins import Registry, load, make_plan
from dovetail.sdk.schemas import schema
from dovetail_grammar.expressions import complement, plainly
from dovetail_grammar.rewriting.form import form_of
from dovetail_grammar.schema_backend import divided

FEW, MANY = 60, 240
MOST = 1.6
"""How much more than in proportion the number of calls may grow."""


def chain(num: int) -> Any:
    parts = {f"d{i}": {"type": "object", "properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{num}": {}}}


def differing(num: int) -> Any:
    given = chain(num)
    given["$defs"][f"d{num}"] = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    return given


def same_names(num: int) -> Any:
    parts = {f"d{i}": {"properties": {"x": {"type": "string"}}} for i in range(num)}
    return {"properties": {f"p{i}": {"$ref": f"#/$defs/d{i}/properties/x"} for i in range(num)}, "$defs": parts}


def anchors(num: int) -> Any:
    parts = {f"d{i}": {"$anchor": f"a{i}", "type": "integer"} for i in range(num)}
    return {"properties": {f"p{i}": {"$ref": f"#a{i}"} for i in range(num)}, "$defs": parts}


def ids(num: int) -> Any:
    parts = {f"d{i}": {"$id": f"https://x.org/{i}", "type": "integer"} for i in range(num)}
    return {"properties": {f"p{i}": {"$ref": f"https://x.org/{i}"} for i in range(num)}, "$defs": parts}


def options(key: str) -> Callable[[int], Any]:
    def made(num: int) -> Any:
        part = {"type": "object", "properties": {"v": {"type": "string"}}, "required": ["k"]}
        return {key: [{**part, "properties": {"k": {"const": i}}} for i in range(num)]}

    return made


def same(key: str, value: Any) -> Callable[[int], Any]:
    """Properties with the same keyword."""
    return lambda num: {"type": "object", "properties": {f"p{i}": {key: value} for i in range(num)}}


SHAPES: dict[str, Callable[[int], Any]] = {
    "properties": same("type", "string"),
    "patterns": same("pattern", '^(?!aws:)[^"]+$'),
    "negations": same("not", {"enum": [1, 2]}),
    "conditions": lambda num: {"allOf": [{"if": {"required": [f"a{i}"]}, "then": {}} for i in range(num)]},
    "conditions on texts": lambda num: {
        "properties": {"k": {"type": "string"}},
        "allOf": [{"if": {"properties": {"k": {"const": f"v{i}"}}}, "then": {"required": ["a"]}} for i in range(num)],
    },
    "unevaluated": lambda num: {
        "allOf": [{"properties": {f"p{i}": {}}} for i in range(num)],
        "unevaluatedProperties": False,
    },
    "differing items behind references": differing,
    "unique": lambda num: {"items": {"enum": list(range(num))}, "uniqueItems": True},
    "counts": lambda num: {"properties": {f"p{i}": {} for i in range(num)}, "minProperties": 1, "maxProperties": num},
    "dependents": lambda num: {"dependentRequired": {f"p{i}": [f"p{i + 1}"] for i in range(num)}},
    "enum": lambda num: {"enum": [f"v{i}" for i in range(num)]},
    "required": lambda num: {"required": [f"p{i}" for i in range(num)]},
    "chain of references": chain,
    "references to the same name": same_names,
    "anchors": anchors,
    "ids": ids,
    "anyOf": options("anyOf"),
    "allOf": options("allOf"),
}


@pytest.fixture(scope="module")
def router(small: Vocabulary) -> GrammarRouter:
    plugins = load(make_plan(Registry.scan(), grammar_backend="auto"), "api")
    return GrammarRouter({planned.name: backend(small) for planned, backend in plugins.candidates("grammar_backend")})


def num_calls(router: GrammarRouter, given: Any) -> int:
    """Calls of Python's and C's functions, which is what the time goes to; no clock is asked."""
    spec = GrammarSpec(kind=Kind.JSON, source=json.dumps(given))
    count = 0

    def noted(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for kept in (schema.parse, schema.nodes, complement, plainly, divided, form_of):
        kept.cache_clear()
    sys.setprofile(noted)
    try:
        check_spec(spec)
        router.route(spec, "json_schema")
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("shape", SHAPES)
def test_cost_grows_in_proportion(router: GrammarRouter, shape: str) -> None:
    """Four times as large, at most a little more than four times as many calls."""
    num_calls(router, SHAPES[shape](FEW))  # what is loaded once
    few, many = (num_calls(router, SHAPES[shape](num)) for num in (FEW, MANY))
    assert many < MOST * MANY / FEW * few
