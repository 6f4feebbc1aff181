"""Most schemas are in the normal form as they came, and one backend's answer is enough: that changes nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from grammar_routes import backends_of, resolved
from random_pairs import Maker, is_valid

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarBackend, GrammarLimits, GrammarSpec, Kind, Support, Vocabulary
from dovetail.grammar.spec.normal import Normal, is_normal, normalize
from dovetail.grammar.spec.route import EnforcementOption, GrammarRouter, asked
from dovetail.grammar.spec.wire import spec_of
from dovetail.messages import GrammarOption
from dovetail.sdk.schemas import keywords, schema
from dovetail_server.bench.grammar_schemas import schemas
from dovetail_testing.conformance.grammar_samples import small_vocabulary

NUM = int(os.environ.get("DOVETAIL_RANDOM_PLAIN", "200"))
NEWEST = "https://json-schema.org/draft/2020-12/schema"
SAID = frozenset(("title", "description", "default", "examples"))


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return small_vocabulary()


@pytest.fixture(scope="module")
def backends(vocabulary: Vocabulary) -> Mapping[str, GrammarBackend]:
    return backends_of(vocabulary)


def candidates(num: int, seed: int) -> Iterator[Any]:
    """Yield random schemas: of the benchmark, of the random pairs without a draft, and such with a word taken away."""
    yield from schemas(num, seed)
    for number in range(num):
        given = Maker(seed + number).schema()
        given.pop("$schema")
        if not given.get("definitions"):
            given.pop("definitions", None)
        yield given
        for _, node in schema.every(given):
            if isinstance(node, dict) and isinstance(node.get("properties"), dict):
                yield from node["properties"].values()


def without_words(node: Any) -> Any:
    """Copy a schema in the normal form without what says nothing to a validator."""
    if isinstance(node, list):
        return [without_words(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: value for key, value in node.items() if key not in SAID}
    for key in made.keys() & {"properties", "$defs"}:
        made[key] = {name: without_words(part) for name, part in made[key].items()}
    return {key: without_words(part) if key in keywords.ONE | keywords.LISTS else part for key, part in made.items()}


def test_what_is_kept_as_it_came_is_what_would_have_been_written() -> None:
    """But for descriptions, and definitions that nothing refers to."""
    kept = seen = 0
    for given in candidates(NUM, seed=1):
        if not isinstance(given, dict):
            continue
        text = json.dumps(given, ensure_ascii=False)
        before, form = normalize(given), normalize(given, text)
        seen += 1
        if form.text is None:
            assert form.schema == before.schema
            continue
        kept += 1
        assert (form.source, form.dropped) == (text, ())
        expected, found = before.schema, without_words(given)
        if "$defs" in found:
            referred = expected.get("$defs", {})
            assert referred == {name: found["$defs"][name] for name in referred}, given
            found.pop("$defs")
            expected = {key: value for key, value in expected.items() if key != "$defs"}
        assert found == expected, given
    print(f"{kept} of {seen} kept as they came")
    assert 0.2 * seen < kept < seen


CHANGED: list[Any] = [
    {"minItems": 0}, {"minLength": 2.0}, {"maxLength": True}, {"exclusiveMinimum": True},
    {"additionalProperties": True}, {"additionalProperties": {}}, {"items": {}}, {"items": [{}]}, {"pattern": ".*"},
    {"required": []}, {"uniqueItems": False}, {"$ref": "#/definitions/a"}, {"$ref": "#"}, {"$ref": "#/$defs/none"},
    {"$defs": {"a": True}, "$ref": "#/$defs/a"}, {"$defs": {"a": {}}, "$ref": "#/$defs/a"},
    {"$defs": {"a": {"type": "null"}}, "$ref": "#/$defs/a", "minimum": 1},
    {"$id": "x", "$defs": {"a": {"type": "null"}}, "$ref": "#/$defs/a"},
    {"$defs": {"a": {"$id": "x", "type": "null"}}, "$ref": "#/$defs/a"},
    {"properties": {"a": {"$defs": {"b": {"type": "null"}}}}}, {"anyOf": [True, {"type": "null"}]},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "null"}, {"x-guidance": {}}, {"unknown": 1},
]  # fmt: skip


@pytest.mark.parametrize("given", CHANGED, ids=json.dumps)
def test_what_the_form_changes_is_not_kept(given: Any) -> None:
    """Values that say nothing or are of another draft, and references that lead elsewhere."""
    assert not is_normal(given)
    assert normalize(given, json.dumps(given)).text is None


def test_a_long_schema_is_written_without_its_descriptions() -> None:
    """They would count as what has to be compiled."""
    given: Any = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    text = json.dumps(given)
    assert normalize(given, text).text == text
    given["properties"]["p0"]["title"] = "P"
    assert "title" not in normalize(given, json.dumps(given)).source


def said(way: EnforcementOption, backends: Mapping[str, GrammarBackend]) -> tuple[Any, ...] | None:
    """Return what a way means once its backend was asked; None where that does not take it."""
    found = resolved(way, backends)
    return None if found is None else (found[0].backend, *way.with_left_out(found[1]))


def test_one_answer_routes_as_all_answers_do(backends: Mapping[str, GrammarBackend]) -> None:
    """The first way is the same, and so are the backends that enforce all of it; the last way is, too."""
    router, unasked = GrammarRouter(backends), 0
    for given in candidates(NUM // 4, seed=2):
        source = json.dumps(given, ensure_ascii=False)
        spec = GrammarSpec(kind=Kind.JSON, source=source)
        try:
            every = router.route(spec, "x", asks_all=True).options
        except RequestError:
            continue
        options = router.route(spec, "x").options
        assert not any(way.grammar.unasked for way in every)
        assert said(options[0], backends) == said(every[0], backends)
        assert options[0].enforcement == every[0].enforcement
        assert options[-1] == every[-1]
        found = {name for way in options if (name := full(way, backends)) is not None}
        expected = {name for way in every if (name := full(way, backends)) is not None}
        assert found == expected, given
        unasked += any(way.grammar.unasked for way in options)
    assert unasked > NUM // 8


def full(way: EnforcementOption, backends: Mapping[str, GrammarBackend]) -> str | None:
    """Return the name of a way's backend, where it enforces all."""
    found = said(way, backends)
    return found[0] if found is not None and found[1] == "full" else None


def test_what_is_kept_as_it_came_accepts_nothing_invalid(
    backends: Mapping[str, GrammarBackend], vocabulary: Vocabulary
) -> None:
    """Of random pairs of such schemas, descriptions in them, none gets through; valid ones do."""
    backend = backends["llguidance"]
    num = num_valid = rejected = 0
    for seed in range(NUM):
        maker = Maker(seed + (1 << 22))
        given = maker.schema()
        given.pop("$schema")
        given.pop("definitions")
        given = {"title": "A", "description": 'what {is} "said"', "default": [1], **given}
        if normalize(given, json.dumps(given)).text is None:
            continue
        route = GrammarRouter({"llguidance": backend}).route(GrammarSpec(kind=Kind.JSON, source=json.dumps(given)), "x")
        if route.options[0].enforcement != "full":
            continue
        try:
            made = backend.compile(spec_of(route.options[0].grammar), GrammarLimits())
            grammar = backend.load(made) if isinstance(made, bytes) else made
        except RequestError:
            continue
        for _ in range(8):
            value = maker.instance(given)
            text, expected = maker.text(value), is_valid({"$schema": NEWEST, **given}, value)
            matcher, ids = grammar.matcher(), list(text.encode())
            accepted = matcher.accept(ids) == len(ids) and matcher.accepting
            assert expected or not accepted, (given, text)
            num, num_valid, rejected = num + 1, num_valid + expected, rejected + (expected and not accepted)
    print(f"{num} pairs, {rejected} of {num_valid} valid ones rejected")
    assert num > NUM // 4
    assert rejected < 0.5 * num_valid


class RequestedGrammar(GrammarBackend):
    """Counts how often it is asked; refuses to enforce one keyword."""

    kinds = frozenset((Kind.JSON,))

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.asked = 0

    def supports(self, spec: GrammarSpec) -> Support:
        """All but `pattern`."""
        self.asked += 1
        if "pattern" not in spec.source:
            return Support.full()
        return Support.approximate(["/pattern"], json.dumps({"type": "string"}))

    def compile(self, spec: GrammarSpec, limits: GrammarLimits) -> bytes:
        """Never asked for."""
        raise RequestError("no")


def test_a_backend_behind_one_that_enforces_all_is_not_asked(backends: Mapping[str, GrammarBackend]) -> None:
    """Only the last way's answer is asked for once; what the engine finds out comes back as left out."""
    other = RequestedGrammar(small_vocabulary())
    router = GrammarRouter({"llguidance": backends["llguidance"], "asked": other})
    sources = [json.dumps({"type": "string", "pattern": f"^{letter}"}) for letter in "abc"]
    routes = [router.route(GrammarSpec(kind=Kind.JSON, source=source), "x") for source in sources]
    assert other.asked == 0
    options = [way for way in routes[0].options if way.grammar.backend == "asked"]
    assert [(way.grammar.unasked, way.grammar.relax_schema) for way in options] == [(True, False), (True, True)]
    assert resolved(options[0], {"asked": other}) is None  # not all of it
    found = resolved(options[1], {"asked": other})
    assert found is not None
    step, lost, _ = found
    assert (json.loads(step.source), step.unasked) == ({"type": "string"}, False)
    assert options[1].with_left_out(lost) == ("approximate", ("/pattern",))


def test_places_of_what_came_are_its_own() -> None:
    """A keyword stands where the form says."""
    given = {"type": "object", "properties": {"a/b": {"type": "string", "minLength": 1}}}
    form = normalize(given, json.dumps(given))
    assert isinstance(form, Normal)
    assert form.place("/properties/a~1b/minLength") == "/properties/a~1b/minLength"


def test_places_of_a_rewritten_source_lead_back(backends: Mapping[str, GrammarBackend]) -> None:
    """What a backend leaves out while it compiles is named where it stands in the schema that it was asked about."""
    given = json.dumps({"oneOf": [{"type": "string", "minLength": 1}, {"type": "integer"}]})
    option = GrammarOption(backend="llguidance", kind="json", source=given, unasked=True)
    found = asked(backends["llguidance"], option)
    assert found is not None
    made, ignored, place = found
    assert "oneOf" not in json.loads(made.source)
    assert ignored == ()
    assert place("/anyOf/0/minLength") == "/oneOf/0/minLength"
    kept = msgspec.structs.replace(option, source=json.dumps({"type": "string", "minLength": 1}))
    unchanged = asked(backends["llguidance"], kept)
    assert unchanged is not None
    assert (unchanged[0].source, unchanged[2]("/minLength")) == (kept.source, "/minLength")
