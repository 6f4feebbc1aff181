"""What schemas of real configuration files say, enforced in full: right texts pass, wrong ones do not."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import pytest
from grammar_routes import backends_of, resolved

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarLimits, GrammarSpec, Kind
from dovetail.grammar.spec.relax import relax_schema
from dovetail.grammar.spec.route import EnforcementOption, GrammarRouter
from dovetail.grammar.spec.wire import spec_of
from dovetail_testing.conformance.grammar_samples import small_vocabulary


@pytest.fixture(scope="module")
def backends() -> dict[str, GrammarBackend]:
    """Every byte is a token."""
    return backends_of(small_vocabulary())


def closed(*names: str, **more: Any) -> dict[str, Any]:
    """An object of some properties and no others."""
    return {"properties": {key: {"type": "integer"} for key in names}, "additionalProperties": False, **more}


def lists(value: str) -> dict[str, Any]:
    return {"type": "array", "items": {"const": value}}


def text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "closed objects": (
        {"type": "object", "oneOf": [closed("a"), closed("b"), closed("c", "d")]},
        ['{"a":1}', '{"b":1}', '{"c":1,"d":2}', '{"d":2}'],
        ["{}", '{"a":1,"b":1}', '{"e":1}', "[]"],
    ),
    "closed objects with names in common": (
        {"type": "object", "oneOf": [closed("a", "b"), closed("a", "c")]},
        ['{"b":1}', '{"a":1,"b":1}', '{"a":1,"c":1}'],
        ["{}", '{"a":1}', '{"b":1,"c":1}'],
    ),
    "a closed object that must have what another may": (
        {"type": "object", "oneOf": [closed("a", "b", required=["a"]), closed("a", "b", "c", required=["b"])]},
        ['{"a":1}', '{"b":1}', '{"b":1,"c":1}', '{"a":1,"b":1,"c":1}'],
        ['{"a":1,"b":1}', "{}", '{"c":1}'],
    ),
    "names by pattern beside listed ones": (
        {
            "type": "object",
            "properties": {"a.b": {"type": "string"}, "c": {"type": "null"}, "D": {}},
            "propertyNames": {"pattern": "^[a-z.]+$", "maxLength": 4},
            "additionalProperties": {"type": "integer"},
        },
        ['{"a.b":"x","c":null}', '{"axb":1}', '{"abcd":1}', "{}"],
        ['{"a.b":1}', '{"c":1}', '{"D":1}', '{"abcde":1}', '{"e":"x"}', '{"1":1}'],
    ),
    "names by pattern beside values by pattern": (
        {
            "type": "object",
            "properties": {"ab": {"type": "string"}, "B": {}},
            "patternProperties": {"^a": {"maxLength": 2}, "^b.*c$": {"type": ["null", "string"]}},
            "propertyNames": {"pattern": "^[a-z]+$"},
            "additionalProperties": {"type": "integer"},
        },
        ['{"ab":"x","a":"xy","bc":null}', '{"d":1}', '{"a":1}'],
        ['{"B":1}', '{"ab":"xyz"}', '{"a":"xyz"}', '{"bc":1}', '{"d":"x"}', '{"d1":1}'],
    ),
    "objects told apart by what they must have": (
        {
            "type": "object",
            "properties": {"kind": {"type": "string"}},
            "oneOf": [
                {"properties": {"run": {"type": "string"}, "env": {"items": {"type": "string"}}}, "required": ["run"]},
                {"properties": {"image": {"minLength": 2, "type": "string"}}, "required": ["image", "kind"]},
                {"allOf": [{"required": ["file"]}, {"properties": {"file": {"type": "integer", "multipleOf": 3}}}]},
            ],
        },
        ['{"run":"x"}', '{"kind":"k","run":"x","env":["y"]}', '{"kind":"k","image":"ab"}', '{"file":3}'],
        [
            "{}",
            '{"run":"x","kind":"k","image":"ab"}',
            '{"image":"ab"}',
            '{"run":"x","file":3}',
            '{"file":4}',
        ],
    ),
    "arrays": ({"oneOf": [lists("x"), lists("y")]}, ['["x"]', '["y","y"]'], ["[]", '["x","y"]', '"x"']),
    "texts with other beginnings": (
        {"oneOf": [text("^in/[a-z]$"), text("^out/[a-z]$"), {"enum": ["x"]}]},
        ['"in/a"', '"out/b"', '"x"'],
        ['"in/ab"', '"on/a"'],
    ),
    "texts whose beginnings may be nothing": ({"oneOf": [text("^ab?$"), text("^ac?$")]}, ['"ab"', '"ac"'], ['"a"']),
    "a name of a definition": (
        {"items": {"$ref": "#/$defs/a b"}, "type": "array", "$defs": {"a b": {"type": "null"}}},
        ["[null]"],
        ["[1]"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_enforced_is_what_conforms(backends: dict[str, GrammarBackend], name: str) -> None:
    """By a validator; what cannot be said is left out and named, and a text that conforms always passes."""
    given, right, wrong = CASES[name]
    level, accepts = enforced(given, backends)
    judge = jsonschema.Draft202012Validator(given)
    assert all(judge.is_valid(json.loads(each)) for each in right)
    assert not any(judge.is_valid(json.loads(each)) for each in wrong)
    assert [each for each in right if not accepts(each)] == []
    assert (level, [each for each in wrong if accepts(each)]) == ("full", [])


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("^(?<major>[0-9])\\.(?<minor>[0-9])$", ["1.2"], ["12"]),
        ("^[^!{}[\\]~]+$", ["ab", "a&&b"], ["a[b", "]", "~"]),
        ("^[a-z&&[p]+$", ["a&[p"], ["A", "]"]),
        ("^[+~~*]{2}$", ["+~", "~~"], ["a~"]),
    ],
)
@pytest.mark.parametrize("as_name", [False, True])
def test_patterns_mean_what_ecmascript_reads(
    backends: dict[str, GrammarBackend], pattern: str, right: list[str], wrong: list[str], as_name: bool
) -> None:
    """Names of groups, and characters of classes that other dialects take for operators."""
    given = {"type": "string", "pattern": pattern}
    if as_name:
        given = {"type": "object", "patternProperties": {pattern: {"const": 1}}, "additionalProperties": False}
    level, accepts = enforced(given, backends)
    assert level == "full"
    for texts, expected in ((right, True), (wrong, False)):
        for each in texts:
            assert accepts(f'{{"{each}":1}}' if as_name else f'"{each}"') is expected, each


def enforced(given: Any, backends: dict[str, GrammarBackend]) -> tuple[str, Any]:
    """Return how the first way enforces a schema, and whether it accepts a text."""
    route = GrammarRouter(backends).route(GrammarSpec(kind=Kind.JSON, source=json.dumps(given)), "json_schema")
    grammar, level = next(found for way in route.options if (found := compiled(way, backends)) is not None)

    def accepts(each: str) -> bool:
        matcher, ids = grammar.matcher(), list(each.encode())
        return matcher.accept(ids) == len(ids) and matcher.accepting

    return level, accepts


def compiled(way: EnforcementOption, backends: dict[str, GrammarBackend]) -> tuple[CompiledGrammar, str] | None:
    """Compile a way as the engine does; None where the next one is tried."""
    found = resolved(way, backends)
    if found is None:
        return None
    step, lost, place = found
    backend = backends[step.backend]

    def made(spec: GrammarSpec) -> CompiledGrammar:
        result = backend.compile(spec, GrammarLimits())
        return backend.load(result) if isinstance(result, bytes) else result

    try:
        spec = spec_of(step)
        grammar, left_out = relax_schema(spec, made, time.monotonic() + 60) if step.relax_schema else (made(spec), ())
    except RequestError:
        return None
    return grammar, way.with_left_out((*lost, *map(place, left_out)))[0]
