"""Tools as pydantic describes them, in formats of every kind: what is called full is enforced, and almost all is."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from grammar_routes import backends_of, written
from pydantic import BaseModel
from random_models import tool_of

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarBackend
from dovetail.grammar.pipeline import StructuredOutputs
from dovetail.plugins import Registry, load, make_plan
from dovetail.sdk.formats.presence import presences
from dovetail_testing.conformance.grammar_samples import small_vocabulary

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import pydantic_tools as bench

NAMES = [
    record.name for record in Registry.scan().of_kind("tool_parser") if record.builtin and record.name != "template"
]
SOME = ("qwen3-coder", "deepseek-v32", "gemma4", "minimax-m3", "olmo3")


@pytest.fixture(scope="module")
def tried() -> bench.Bench:
    return bench.Bench(num_walks=1)


@pytest.mark.parametrize(
    "name", [*SOME, *(pytest.param(n, marks=pytest.mark.full) for n in NAMES if n not in (*SOME, "template"))]
)
def test_what_is_called_full_is_enforced(name: str, tried: bench.Bench) -> None:
    """As `tests/benchmarks/pydantic_tools.py` tries it, with a few tools."""
    tools = [tool_of(random.Random(f"5 {number}"), "f") for number in range(20)]
    found = tried.run(name, tools, 5)
    assert not found.wrong
    assert not found.errors
    assert found.share >= 0.9
    assert found.finished > 12


class Place(BaseModel):
    """What an ordinary tool asks for."""

    city: str
    days: int | None = None
    unit: Literal["c", "f"] | None = None
    tags: list[str] = []


@pytest.fixture(scope="module")
def backends() -> dict[str, GrammarBackend]:
    return backends_of(small_vocabulary())


@pytest.fixture
def strict(backends: dict[str, GrammarBackend]) -> Iterator[StructuredOutputs]:
    made = StructuredOutputs(backends, strict_schema=True)
    yield made
    made.close()


def routed(front: StructuredOutputs, *tools: Any, name: str = "qwen3-coder") -> Any:
    parser = load(make_plan(Registry.scan(), tool_parser=name), "api").get("tool_parser", name)()
    return front.tools(parser, name, tools, "auto", parallel=True, param="tools").options[0]


def tool(name: str, parameters: Any) -> Any:
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}


@pytest.mark.parametrize("name", SOME)
def test_an_ordinary_tool_is_strict(name: str, strict: StructuredOutputs) -> None:
    """`--strict-schema` has nothing to say against it."""
    way = routed(strict, tool("f", Place.model_json_schema()), name=name)
    assert (way.enforcement, way.ignored) == ("full", ())


def test_what_is_lost_is_named_for_each_tool(strict: StructuredOutputs, backends: dict[str, GrammarBackend]) -> None:
    """Two tools may have the same parameter."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"^(.)\1$"}}}
    front = StructuredOutputs(backends)
    way = routed(front, tool("f", parameters), tool("g", parameters))
    front.close()
    assert way.ignored == tuple(f"/tools/{n}/function/parameters/properties/a/pattern" for n in (0, 1))
    with pytest.raises(RequestError, match="the tool 'f' is strict"):
        routed(strict, tool("f", parameters))


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("qwen3-coder", "a>b"),
        ("deepseek-v32", "<a>"),
        ("glm45", "a</arg_key>b"),
        ("gemma4", 'a"'),
        ("gemma4", "a:b"),
        ("minimax-m3", "a b"),
        ("minimax-m3", "<a>"),
        ("pythonic", "a b"),
    ],
)
def test_a_name_that_is_read_as_another_is_refused(
    name: str, parameter: str, backends: dict[str, GrammarBackend]
) -> None:
    """A call would be made without the parameter, and called valid."""
    front = StructuredOutputs(backends)
    with pytest.raises(RequestError, match=r"cannot name the parameter .* of 'f'; use letters"):
        routed(front, tool("f", {"type": "object", "properties": {parameter: {"type": "integer"}}}), name=name)
    front.close()


@pytest.mark.parametrize("name", ["qwen3-coder", "deepseek-v32", "glm45", "gemma4", "minimax-m3", "pythonic", "olmo3"])
def test_names_of_other_tools_are_read(name: str, tried: bench.Bench) -> None:
    """Hyphens and dots, as of headers and options."""
    named = {"Content-Type": {"const": 1}, "a.b": {"const": 2}, "\u00e9": {"const": 3}}
    given = tool("f", {"type": "object", "properties": named, "required": [*named], "additionalProperties": False})
    found = tried.run(name, [given], 1)
    assert (found.finished, found.wrong, found.levels["full"]) == (1, [], 1)


ARGUMENTS: dict[str, Any] = {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "boolean"}}
NEEDED: tuple[dict[str, Any], ...] = (
    {"anyOf": [{"required": ["a"]}, {"required": ["b", "c"]}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"minProperties": 1},
    {"minProperties": 2, "required": ["c"]},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"], "not": {"required": ["c"]}}}},
    {"not": {"required": ["a", "b"]}},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}},
    {"allOf": [{"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"required": ["c"]}]},
    {"propertyNames": {"pattern": "^[ab]$"}},
    {"properties": {**ARGUMENTS, "c": False}},
)
"""What schemas say of arguments that stand together, or do not."""


def needing(said: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": ARGUMENTS, "additionalProperties": False, **said}


@pytest.mark.sampled
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("said", NEEDED, ids=lambda said: " ".join(said))
def test_which_arguments_stand_together_is_enforced(name: str, said: dict[str, Any], tried: bench.Bench) -> None:
    """At the root of a tool's parameters, in formats that write each argument by itself."""
    tool = {"type": "function", "function": {"name": "f", "parameters": needing(said)}}
    found = tried.run(name, [tool] * 4, 3)
    assert (found.wrong, found.errors, dict(found.levels)) == ([], [], {"full": 4})
    assert found.finished


def test_the_ways_are_those_of_a_validator() -> None:
    """Of random schemas, for every set of arguments, where all that is said is held."""
    rng = random.Random(41)
    values = {"a": "", "b": 0, "c": True}
    sets = [dict(some) for size in range(4) for some in combinations(values.items(), size)]
    held = 0
    for _ in range(600):
        rules = [{key: rule[key]} for rule in rng.sample(NEEDED[:-1], 2) for key in rule]
        schema = needing(rng.choice([{"allOf": rules}, {"anyOf": rules}, {"oneOf": rules}, {"not": rules[0]}]))
        form = written(json.loads(json.dumps(schema)), is_split=True).schema
        if form is False:  # nothing is valid
            continue
        options, places = presences(form)
        allowed = [
            some for some in sets if any(way.required <= some.keys() - way.absent == some.keys() for way in options)
        ]
        valid = [some for some in sets if jsonschema.Draft202012Validator(schema).is_valid(some)]
        said = {f"/allOf/{at}" for at in range(len(form.get("allOf", ())))} | {f"/{key}" for key in form} - {"/allOf"}
        if said <= places | {"/type", "/properties", "/required", "/additionalProperties", "/$defs"}:
            held += 1
            assert allowed == valid, schema
    assert held > 100


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ({"anyOf": [{"properties": {"a": {"const": "x"}}, "required": ["a"]}, {"required": ["b"]}]}, "/anyOf"),
        ({"patternProperties": {"^a": {"maxLength": 2}}}, "/patternProperties"),
        ({"required": ["z"], "additionalProperties": True}, "/required"),
        ({"dependentSchemas": {"a": {"properties": {"b": {"minimum": 3}}}}}, "/dependentSchemas"),
        ({"const": {"a": "x"}}, "/const"),
    ],
)
def test_what_is_lost_of_a_tool_is_named(said: dict[str, Any], lost: str, tried: bench.Bench) -> None:
    """Where it stands in the tool's schema as it came."""
    tool = {"type": "function", "function": {"name": "f", "parameters": needing(said)}}
    parser = load(make_plan(Registry.scan(), tool_parser="qwen3-coder"), "api").get("tool_parser", "qwen3-coder")()
    front = StructuredOutputs(tried.backends)
    try:
        options = front.tools(parser, "qwen3-coder", [tool], "required", parallel=False, param="tools").options
    finally:
        front.close()
    assert options[0].enforcement == "approximate"
    assert all(place.startswith(f"/tools/0/function/parameters{lost}") for place in options[0].ignored)
