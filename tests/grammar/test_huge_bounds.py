"""Bounds of numbers beyond what libraries count with."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from grammar_routes import backends_of, resolved
from jsonschema import Draft202012Validator

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarBackend, GrammarLimits, GrammarSpec, Kind, SupportLevel
from dovetail.grammar.spec.route import GrammarRouter
from dovetail.grammar.spec.wire import spec_of
from dovetail_testing.conformance.grammar_samples import small_vocabulary

NAMED = re.compile("imum$|/enum$|/const$")
HUGE_BOUNDS = [
    {"type": "integer", "exclusiveMinimum": -(46 * 10**20), "exclusiveMaximum": 1899998.0},
    {"type": "integer", "minimum": -3e60, "exclusiveMaximum": -6.2e19},
    {"type": "integer", "minimum": 9e20, "maximum": -420000000000000001},
    {"type": "integer", "minimum": 10**20, "maximum": 2 * 10**20},
    {"type": "number", "minimum": 1e20, "maximum": 2e20},
    {"type": "number", "minimum": 1e60},
    {"type": "integer", "exclusiveMinimum": 8.1e16},
    {"type": "number", "maximum": -8599999999999999.0},
    {"type": "integer", "minimum": -4.7e18, "maximum": -7899999999999999.0},
    {"type": ["integer", "number"], "enum": [-1e308, True]},
    {"const": 1e300},
    {"enum": [10**i for i in range(300)]},
    {"allOf": [{"type": "integer"}, {"minimum": -1e300}, {"exclusiveMaximum": 2**63}]},
]


@pytest.fixture(scope="module")
def backends() -> dict[str, GrammarBackend]:
    return backends_of(small_vocabulary())


@pytest.mark.parametrize("given", HUGE_BOUNDS, ids=str)
def test_huge_bounds_are_enforced_or_named(given: Any, backends: dict[str, GrammarBackend]) -> None:
    """Not taken for others: a library ended its process over two of them, another allowed numbers outside."""
    route = GrammarRouter(backends).route(GrammarSpec(kind=Kind.JSON, source=json.dumps(given)), "json_schema")
    near = [value for key, value in _bounds(given)]
    near += given.get("enum", [given.get("const", 0)])
    texts = {str(int(value) + more) for value in near for more in (-1, 0, 1)} | {str(2**63 - 1), str(10**18), "0"}
    num_ways = 0
    for way in route.options:
        found = resolved(way, backends)
        if way.enforcement != "full" or found is None or found[1]:
            continue
        num_ways += 1
        backend = backends[found[0].backend]
        made = backend.compile(spec_of(found[0]), GrammarLimits())
        grammar = backend.load(made) if isinstance(made, bytes) else made
        for text in texts:
            matcher, ids = grammar.matcher(), list(text.encode())
            if matcher.accept(ids) == len(ids) and matcher.accepting:
                assert Draft202012Validator(given).is_valid(json.loads(text)), text
    assert num_ways or any(NAMED.search(place) for place in route.options[0].ignored)


def _bounds(given: Any) -> list[tuple[str, float]]:
    parts = given.get("allOf", [given])
    return [(key, part[key]) for part in parts for key in part if "imum" in key]


def test_lark_with_a_schema_in_it_compiles_elsewhere(backends: dict[str, GrammarBackend]) -> None:
    """The library reads that schema as it stands."""
    spec = GrammarSpec(kind=Kind.LARK, source='start: %json {"type": "integer", "minimum": -1e20, "maximum": 5}')
    assert not backends["llguidance"].inline(spec)
    assert backends["llguidance"].inline(GrammarSpec(kind=Kind.LARK, source='start: "a" B\nB: /[0-9]/\n%ignore " "'))


@pytest.mark.parametrize("name", ["llguidance", "outlines", "xgrammar"])
@pytest.mark.parametrize(
    "given",
    [
        {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 0},
        {"type": "string", "minLength": 3, "maxLength": 1},
        {"type": "integer", "minimum": 5, "maximum": 1},
    ],
    ids=str,
)
def test_bounds_that_nothing_is_between_allow_nothing(
    name: str, given: Any, backends: dict[str, GrammarBackend]
) -> None:
    """One library takes the lower one for the upper one then."""
    backend, spec = backends[name], GrammarSpec(kind=Kind.JSON, source=json.dumps(given))
    if backend.supports(spec).level is SupportLevel.FULL:
        with pytest.raises(RequestError):
            backend.compile(spec, GrammarLimits())
