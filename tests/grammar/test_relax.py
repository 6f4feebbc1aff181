"""Leaving out what a backend refuses: each keyword at its place, no more than it must, named, and judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from grammar_routes import Enforced as Followed
from grammar_routes import backends_of
from served import Served

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarSpec, Kind, Vocabulary
from dovetail.grammar.compile.cache import Enforced
from dovetail.grammar.compile.service import GrammarService
from dovetail.grammar.pipeline import GrammarOutcome, StructuredOutputs
from dovetail.grammar.spec.relax import keywords_in, relax_schema
from dovetail.grammar.spec.route import GrammarRoute, GrammarRouter
from dovetail.plugins import Registry, load, make_plan
from dovetail.sdk.schemas.schema import leave_out
from dovetail_testing.conformance.grammar_samples import small_vocabulary

FOREVER = 1e12


def spec(schema: Any, kind: Kind = Kind.JSON) -> GrammarSpec:
    return GrammarSpec(kind=kind, source=json.dumps(schema))


def refusing(*places: str) -> Callable[[GrammarSpec], str]:
    """A compiler that refuses these keywords."""

    def compile_(given: GrammarSpec) -> str:
        found = {place for place, _ in keywords_in(given)}
        if found & set(places):
            raise RequestError("something here is not supported", code="unsupported_grammar")
        return given.source

    return compile_


def test_only_what_is_refused_is_left_out() -> None:
    """Two keywords of forty, wherever they stand; the source that compiled lacks nothing else."""
    schema = {"properties": {f"p{i}": {"type": "string", "minLength": i, "pattern": f"^{i}"} for i in range(20)}}
    places = ("/properties/p7/pattern", "/properties/p13/minLength")
    source, gone = relax_schema(spec(schema), refusing(*places), FOREVER)
    assert set(gone) == set(places)
    assert json.loads(source) == leave_out(schema, places)


def test_a_search_without_time_leaves_out_more_rather_than_failing() -> None:
    """With no time left, what was found to work is taken."""
    schema = {"properties": {f"p{i}": {"minLength": i} for i in range(20)}}
    source, gone = relax_schema(spec(schema), refusing("/properties/p3/minLength"), 0.0)
    assert "/properties/p3/minLength" in gone or "/properties" in gone
    assert json.loads(source) is not None


def test_what_no_keyword_is_to_blame_for_stays_an_error() -> None:
    """A grammar that nothing conforms to is not weakened into one that something does."""

    def unsatisfiable(_: GrammarSpec) -> str:
        raise RequestError("Unsatisfiable schema", code="invalid_grammar")

    def broken(_: GrammarSpec) -> str:
        raise RequestError("no", code="unsupported_grammar")

    for compile_ in (unsatisfiable, broken):
        with pytest.raises(RequestError):
            relax_schema(spec({"minimum": 3, "properties": {"a": {"minimum": 1}}}), compile_, FOREVER)


@pytest.mark.parametrize(
    ("schema", "place", "left"),
    [
        ({"oneOf": [{"const": 1}]}, "/oneOf", {"anyOf": [{"const": 1}]}),
        ({"oneOf": [{}], "anyOf": [{}]}, "/oneOf", {"anyOf": [{}], "allOf": [{"anyOf": [{}]}]}),
        ({"properties": {"a": {}}, "additionalProperties": False, "type": "object"}, "/properties", {"type": "object"}),
        ({"if": {}, "then": {}, "else": {}, "minItems": 1}, "/if", {"minItems": 1}),
        ({"properties": {"a/b": {"not": {}}}}, "/properties/a~1b/not", {"properties": {"a/b": {}}}),
    ],
)
def test_what_goes_with_a_keyword(schema: Any, place: str, left: Any) -> None:
    """What would forbid more without it goes, too; a `oneOf` becomes `anyOf`."""
    assert leave_out(schema, [place]) == left


@pytest.fixture(scope="module")
def router(small: Vocabulary) -> GrammarRouter:
    """All backends."""
    plan = make_plan(Registry.scan(), grammar_backend="auto")
    plugins = load(plan, "api")
    return GrammarRouter({planned.name: backend(small) for planned, backend in plugins.candidates("grammar_backend")})


def test_ties_go_to_the_backend_that_is_liked_most(router: GrammarRouter) -> None:
    """Of two that ignore one keyword, the fast one is tried first."""
    route = router.route(spec({"type": "array", "contains": {"type": "string"}}), "json_schema")
    first = route.options[0]
    assert (first.grammar.backend, first.enforcement, first.ignored) == ("llguidance", "approximate", ("/contains",))


@pytest.fixture
def service(small: Vocabulary) -> Any:
    plugins = load(make_plan(Registry.scan(), grammar_backend="llguidance"), "engine")
    made = GrammarService(plugins, lambda: small, timeout_s=60, cache_bytes=1 << 24)
    made._compiler.pool().wait_ready(60)  # an option is given up where the process takes long to start
    yield made
    made.close()


def settled(service: GrammarService, route: GrammarRoute) -> Enforced:
    future = service.request(route.engine_options)
    for _ in range(600):
        if future.is_ready:
            break
        service.wait(0.1)
    assert isinstance(future.outcome, Enforced), future.outcome
    return future.outcome


def test_what_only_the_compiler_refuses_is_found_and_named(service: GrammarService, small: Vocabulary) -> None:
    """Patterns that overlap pass the walk over the schema and fail in the compiler: one goes, the rest is enforced."""
    plugins = load(make_plan(Registry.scan(), grammar_backend="llguidance"), "api")
    router = GrammarRouter({"llguidance": plugins.get("grammar_backend", "llguidance")(small)})
    schema = {
        "definitions": {
            "x": {
                "type": "object",
                "patternProperties": {"^x": {"type": "integer"}, "y$": {"type": "string"}},
                "properties": {"n": {"type": "integer"}},
                "required": ["n"],
            }
        },
        "$ref": "#/definitions/x",
    }
    route = router.route(spec(schema), "json_schema")
    assert route.options[0].enforcement == "full"  # as far as is known before
    outcome = settled(service, route)
    enforcement, ignored = route.options[outcome.option].with_left_out(outcome.ignored)
    assert (enforcement, ignored) == ("approximate", ("/definitions/x/patternProperties",))
    matcher = outcome.compiled.matcher()
    wrong = [small.tokens.index(bytes([byte])) for byte in b'{"n":"']
    assert matcher.accept(wrong) < len(wrong)


def test_the_engine_asks_whom_nobody_has_asked(service: GrammarService, router: GrammarRouter) -> None:
    """A backend that does not enforce all is passed over, and where less is allowed says what it leaves out."""
    route = router.route(spec({"type": "array", "items": {"type": "integer"}, "minItems": 1}), "json_schema")
    assert any(way.grammar.unasked for way in route.options)
    source = json.dumps({"type": "string", "pattern": "a$", "contentEncoding": "base64"})
    mine = [
        replace(way, grammar=msgspec.structs.replace(way.grammar, source=source, backend="llguidance"))
        for way in route.options
    ]
    unasked = GrammarRoute(route.spec, tuple(way for way in mine if way.grammar.unasked), "json_schema")
    assert [way.grammar.relax_schema for way in unasked.options] == [False, False, True]
    outcome = settled(service, unasked)
    assert outcome.option == 2
    assert unasked.options[2].with_left_out(outcome.ignored) == ("approximate", ("/contentEncoding",))


def test_what_fails_at_its_first_texts_is_weakened(service: GrammarService, router: GrammarRouter) -> None:
    """Ten thousand optional properties compile and fail at the first key: found out before anybody is given it."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}
    route = router.route(spec(schema), "json_schema")
    only = GrammarRoute(
        route.spec, tuple(way for way in route.options if way.grammar.backend == "llguidance"), "json_schema"
    )
    outcome = settled(service, only)
    assert only.options[outcome.option].with_left_out(outcome.ignored)[0] != "full"


TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "tags": {
                    "type": "array",
                    "items": {"enum": list("abcdefgh")},
                    "contains": {"const": "a"},
                    "maxItems": 4,
                },
            },
            "required": ["city", "tags"],
            "additionalProperties": False,
        },
    },
}
PLACE = "/tools/0/function/parameters/properties/tags/contains"
BUILT_IN = [r.name for r in Registry.scan().of_kind("tool_parser") if r.builtin]
FORMATS = [name for name in BUILT_IN if name != "template"]
"""`template` has the format that a chat template writes, and none without one."""


@pytest.mark.parametrize("name", FORMATS)
def test_one_keyword_of_a_tool_costs_that_keyword_alone(name: str, router: GrammarRouter) -> None:
    """In every format of calls the rest of the schema is in the grammar, and the keyword is named at its place."""
    parser = load(make_plan(Registry.scan(), tool_parser=name), "api").get("tool_parser", name)()
    front = StructuredOutputs({"llguidance": dict(router.able(Kind.JSON, ""))["llguidance"]})
    route = front.tools(parser, name, [TOOL], "required", parallel=False, param="tool_choice")
    way = route.options[0]
    assert (way.enforcement, way.ignored) == ("approximate", (PLACE,))
    assert "contains" not in way.grammar.source
    assert "Rome" in way.grammar.source
    assert '"maxItems": 4' in way.grammar.source


def test_arguments_are_judged_and_reported_for_each_tool(router: GrammarRouter) -> None:
    """A call that breaks what was ignored is not valid; a tool that was not called has no verdict."""
    parser = load(make_plan(Registry.scan(), tool_parser="hermes"), "api").get("tool_parser", "hermes")()
    other = {"type": "function", "function": {"name": "plain", "parameters": {"type": "object", "properties": {}}}}
    front = StructuredOutputs(dict(router.able(Kind.JSON, "")))
    try:
        route = front.tools(parser, "hermes", [TOOL, other], "required", parallel=True, param="tool_choice")
        call = {"city": "Rome", "tags": ["b", "c"]}
        calls = [("note", json.dumps(call)), ("plain", "{}")]
        report = front.report(route, GrammarOutcome(option=0, calls=calls, ended=True))
        found = {tool.name: (tool.enforcement, tool.ignored, tool.valid) for tool in report.tools}
        assert found == {"note": ("approximate", (PLACE,), False), "plain": ("full", (), True)}
        assert report.valid is False
        call["tags"] = ["a", "b"]
        report = front.report(route, GrammarOutcome(option=0, calls=[("note", json.dumps(call))], ended=True))
        assert (report.valid, report.tools[1].valid) == (True, None)
    finally:
        front.close()


@pytest.mark.parametrize("most", [3, 3000])
def test_a_length_between_tags_is_enforced(most: int, router: GrammarRouter) -> None:
    """However long the string may be."""
    parser = load(make_plan(Registry.scan(), tool_parser="qwen3-coder"), "api").get("tool_parser", "qwen3-coder")()
    parameters = {
        "type": "object",
        "properties": {"s": {"type": "string", "maxLength": most}, "n": {"type": "integer"}},
        "required": ["s"],
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    front = StructuredOutputs(dict(router.able(Kind.JSON, "")))
    route = front.tools(parser, "qwen3-coder", [tool], "required", parallel=False, param="tool_choice")
    front.close()
    assert route.options[0].ignored == ()
    vocabulary = small_vocabulary()
    found = Followed(route, backends_of(vocabulary), vocabulary)
    text = "<tool_call>\n<function=f>\n<parameter=s>\n%s\n</parameter>\n</function>\n</tool_call>"
    assert found.accepts(text % ("é" * most))
    assert not found.accepts(text % ("é" * (most + 1)))


def test_a_tool_is_told_of_over_http(served: Served) -> None:
    """`tool_choice: required` with an unsupported keyword: the call conforms but for it, and the reply says so."""
    choice = served.chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=400)
    [call] = choice["message"]["tool_calls"]
    report = choice["structured_output"]
    assert (report["enforcement"], report["ignored"]) == ("approximate", [PLACE])
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Paris", "Rome")
    assert report["tools"][0]["valid"] is ("a" in arguments["tags"])
    assert report["valid"] is report["tools"][0]["valid"]
