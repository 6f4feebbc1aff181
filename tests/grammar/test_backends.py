"""Each backend against instances of every JSON Schema keyword, against brute force, and against the others."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
from grammar_routes import resolved
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema.validators import validator_for
from schema_cases import CASES

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import (
    CompiledGrammar,
    GrammarBackend,
    GrammarLimits,
    GrammarMatcher,
    GrammarSpec,
    Kind,
    Support,
    SupportLevel,
    Vocabulary,
)
from dovetail.grammar.pipeline import StructuredOutputs, log_unserved
from dovetail.grammar.spec.route import Enforcement, GrammarRoute, GrammarRouter
from dovetail.grammar.spec.wire import spec_of
from dovetail.plugins import Registry, load, make_plan
from dovetail.sdk.masks import ids_of

NAMES = ("llguidance", "outlines", "xgrammar")
LIMITS = GrammarLimits()


@pytest.fixture(scope="module")
def backends(small: Vocabulary) -> Mapping[str, GrammarBackend]:
    """All built-in backends over the small vocabulary."""
    made: dict[str, GrammarBackend] = {}
    for name in NAMES:
        pytest.importorskip({"outlines": "outlines_core"}.get(name, name))
        plan = make_plan(Registry.scan(), grammar_backend=name)
        made[name] = load(plan, "compiler").get("grammar_backend", name)(small)
    return made


def compiled(backend: GrammarBackend, spec: GrammarSpec) -> CompiledGrammar:
    """Compile, through the form that travels where there is one."""
    result = backend.compile(spec, LIMITS)
    return backend.load(result) if isinstance(result, bytes) else result


def json_spec(schema: Any) -> GrammarSpec:
    return GrammarSpec(kind=Kind.JSON, source=json.dumps(schema, ensure_ascii=False))


def matches(grammar: CompiledGrammar, small: Vocabulary, text: str) -> bool:
    """Whether a text is in the grammar's language, fed byte by byte."""
    ids = [small.tokens.index(bytes([byte])) for byte in text.encode()]
    matcher = grammar.matcher()
    return matcher.accept(ids) == len(ids) and matcher.accepting


def is_valid(schema: Any, text: str) -> bool:
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator(schema).validate(json.loads(text))
    except jsonschema.ValidationError:
        return False
    return True


@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case[0])[:70])
def test_the_instances_are_what_they_say(case: tuple[Any, list[str], list[str]]) -> None:
    """jsonschema agrees with the table, format annotations aside."""
    schema, valid, invalid = case
    assert all(is_valid(schema, text) for text in valid)
    assert not any(is_valid(schema, text) for text in invalid)


@pytest.mark.parametrize("name", NAMES)
def test_full_support_lets_nothing_invalid_through(
    backends: Mapping[str, GrammarBackend], small: Vocabulary, name: str
) -> None:
    """What a backend calls FULL it enforces: no invalid instance is accepted; llguidance accepts the valid ones too."""
    backend = backends[name]
    num_full = 0
    for schema, valid, invalid in CASES:
        spec = json_spec(schema)
        if name != "llguidance" and "3000" in spec.source:
            continue  # automata of this size take minutes
        support = backend.supports(spec)
        if support.level is not SupportLevel.FULL:
            continue
        try:
            grammar = compiled(backend, support.to_compile(spec))
        except RequestError:
            continue  # an error is honest: the next way is tried
        num_full += 1
        assert not [text for text in invalid if matches(grammar, small, text)], schema
        if name == "llguidance":
            assert not [text for text in valid if not matches(grammar, small, text)], schema
    assert num_full >= {"llguidance": 60, "outlines": 20, "xgrammar": 45}[name]


def test_whatever_enforces_a_schema_says_so_truly(backends: Mapping[str, GrammarBackend], small: Vocabulary) -> None:
    """By the ladder every case is enforced somehow, and an invalid instance gets through only where it is judged."""
    router = GrammarRouter(backends)
    for schema, valid, invalid in CASES:
        route = router.route(json_spec(schema), "json_schema")
        enforcement, ignored, grammar = first_way(route, backends, small)
        leaks = [text for text in invalid if matches(grammar, small, text)]
        assert not leaks or enforcement != "full", schema
        if enforcement != "full":
            assert ignored
        assert any(matches(grammar, small, text) for text in valid), schema


def first_way(
    route: GrammarRoute, backends: Mapping[str, GrammarBackend], vocabulary: Vocabulary
) -> tuple[Enforcement, tuple[str, ...], CompiledGrammar]:
    """Do what the engine does: the first way that compiles."""
    for way in route.options:
        found = resolved(way, backends)
        if found is None:
            continue
        step, lost, _ = found
        try:
            grammar = compiled(backends[step.backend], spec_of(step))
            return *way.with_left_out(lost), grammar
        except RequestError:
            continue
    raise AssertionError("no way compiles")


def test_what_would_only_be_judged_may_be_refused(backends: Mapping[str, GrammarBackend]) -> None:
    """Then no way allows any JSON: not for a schema, and not for a tool."""
    spec = GrammarSpec(
        kind=Kind.JSON, source=json.dumps({"type": "array", "uniqueItems": True, "items": {"type": "string"}})
    )
    for refuses in (False, True):
        found = GrammarRouter(backends, enforced_only=refuses).route(spec, "response_format")
        assert ("validate_only" in [way.enforcement for way in found.options]) is not refuses
    parser = load(make_plan(Registry.scan(), tool_parser="hermes"), "api").get("tool_parser", "hermes")()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    for refuses in (False, True):
        front = StructuredOutputs(backends, enforced_only=refuses)
        found = front.tools(parser, "hermes", [tool], "required", parallel=True, param="tools")
        front.close()
        assert ("validate_only" in [way.enforcement for way in found.options]) is not refuses


def test_a_strict_schema_is_refused_rather_than_weakened(backends: Mapping[str, GrammarBackend]) -> None:
    """With `--strict-schema`, a strict schema gets an error that names the keyword, and no weaker way."""
    spec = GrammarSpec(kind=Kind.JSON, source='{"type": "integer", "not": {"multipleOf": 3}}', strict=True)
    with pytest.raises(RequestError, match="/not"):
        GrammarRouter(backends, strict_schema=True).route(spec, "response_format")
    assert GrammarRouter(backends).route(spec, "response_format").options


def test_kinds_that_no_backend_reads_are_told_at_the_start(
    backends: Mapping[str, GrammarBackend], caplog: pytest.LogCaptureFixture
) -> None:
    """One backend alone says what it leaves out; all together leave out nothing."""
    log_unserved(backends)
    log_unserved({})
    assert not caplog.messages
    log_unserved({"outlines": backends["outlines"]})
    [told] = caplog.messages
    assert told.startswith("--grammar-backend outlines does not serve json_object, ebnf, lark, structural:")


REGEXES = ["[ab]{2,4}c", "[0-9]{2,4}(ab|cd)?", "(foo|bar)+", "é?[0-9]{1,3}(\\.[0-9])?", "a*", '"[^"]*"']
CHOICES = json.dumps(["yes", "no", "yes sir", "é\n", 'q"'])
SPECS = [
    *(GrammarSpec(kind=Kind.REGEX, source=source) for source in REGEXES),
    GrammarSpec(kind=Kind.CHOICE, source=CHOICES),
    json_spec(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    ),
    json_spec({"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 2}),
]


def allowed(matcher: GrammarMatcher, small: Vocabulary) -> set[int]:
    mask = np.full((2, small.mask_words), 0x55, dtype=np.int32)
    if not matcher.fill(mask, 1):
        return set(range(small.size))
    assert (mask[0] == 0x55).all()
    return set(ids_of(mask[1]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.source[:30])
def test_masks_equal_brute_force(
    backends: Mapping[str, GrammarBackend], small: Vocabulary, name: str, spec: GrammarSpec
) -> None:
    """On random walks the mask holds exactly the tokens that a copy of the matcher accepts, every end among them.

    One exception: see below.
    """
    matcher = compiled(backends[name], spec).matcher()
    rng = random.Random(1)
    for _ in range(12):
        mask = allowed(matcher, small)
        brute = {token for token in range(small.size) if matcher.fork().accept([token]) == 1}
        if name == "llguidance" and len(mask) == 1:
            # Where the text is forced, only the token is left that the tokenizer itself would make of it.
            [forced] = mask
            assert forced in brute
            assert all(small.tokens[forced].startswith(small.tokens[token]) or token == forced for token in brute)
        else:
            assert mask == brute
        assert (small.eos_ids <= mask) == matcher.accepting
        rest = sorted(mask - small.eos_ids)
        if not rest:
            break
        assert matcher.accept([rng.choice(rest)]) == 1
        assert matcher.error is None


@pytest.mark.parametrize("name", NAMES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_accept_rollback_and_fork_laws(
    backends: Mapping[str, GrammarBackend], small: Vocabulary, name: str, data: st.DataObject
) -> None:
    """Rolling back restores the mask, ends included; a fork goes its own way; what is refused changes nothing."""
    spec = data.draw(st.sampled_from(SPECS))
    matcher = compiled(backends[name], spec).matcher()
    masks = [allowed(matcher, small)]
    taken: list[int] = []
    for _ in range(data.draw(st.integers(0, 10))):
        if not masks[-1]:
            break
        token = data.draw(st.sampled_from(sorted(masks[-1])))
        assert matcher.accept([token]) == 1
        taken.append(token)
        masks.append(allowed(matcher, small) if not matcher.terminated else set())
    refused = next((t for t in range(small.size) if t not in masks[-1]), None)
    if refused is not None:
        assert matcher.accept([refused]) == 0
    fork = matcher.fork()
    back = data.draw(st.integers(0, len(taken)))
    fork.rollback(back)
    assert allowed(fork, small) == masks[len(taken) - back] or back == 0
    assert fork.accept(taken[len(taken) - back :]) == back
    assert fork.terminated == matcher.terminated
    if not matcher.terminated:
        assert allowed(matcher, small) == masks[-1]


PAIRS = [("llguidance", "xgrammar"), ("llguidance", "outlines")]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_backends_agree_where_both_are_full(
    backends: Mapping[str, GrammarBackend], small: Vocabulary, pair: tuple[str, str]
) -> None:
    """Random texts of one backend are accepted by the other, for regular expressions, choices and plain schemas."""
    rng = random.Random(3)
    for spec in SPECS[1:]:
        first, second = (backends[name] for name in pair)
        if any(b.supports(spec).level is not SupportLevel.FULL for b in (first, second)):
            continue
        other = compiled(first, spec)
        for _ in range(3):
            text = random_text(compiled(second, spec).matcher(), small, rng)
            if text is not None:
                assert matches(other, small, text), (spec.source, text)


def random_text(matcher: GrammarMatcher, small: Vocabulary, rng: random.Random) -> str | None:
    """A random text of a grammar; None where it gets long."""
    text = b""
    for _ in range(60):
        tokens = sorted(allowed(matcher, small))
        token = rng.choice(tokens)
        if small.eos_ids & set(tokens) and rng.random() < 0.3:
            return text.decode(errors="replace")
        if token in small.eos_ids:
            return text.decode(errors="replace")
        matcher.accept([token])
        text += small.tokens[token]
    return None


def test_schemas_within_structural_grammars_are_walked(backends: Mapping[str, GrammarBackend]) -> None:
    """What is not enforced of a schema between tags is named, or the grammar is not taken."""

    def support(schema: Any) -> Support:
        tag = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
        node = {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag]}
        source = json.dumps({"type": "structural_tag", "format": node})
        return backends["llguidance"].supports(GrammarSpec(kind=Kind.STRUCTURAL, source=source))

    assert support({"type": "integer"}).level is SupportLevel.FULL
    assert support({"type": "string", "pattern": '^[^"]*$'}).level is SupportLevel.FULL
    differ = support({"type": "array", "items": {"type": "string"}, "uniqueItems": True})
    assert (differ.level, differ.alone) == (
        SupportLevel.FULL,
        ("/format/tags/0/content/json_schema/uniqueItems",),
    )
    assert support({"type": "array", "contains": {"type": "string"}}).level is not SupportLevel.FULL
    refused = support({"not": {"type": "integer"}})
    assert refused.ignored == ("/format/tags/0/content/json_schema/not",)
    assert refused.source is not None
    assert "not" not in refused.source


def test_text_before_a_trigger_is_free_and_what_follows_is_not(
    backends: Mapping[str, GrammarBackend], small: Vocabulary
) -> None:
    """In a structural grammar a trigger can only be followed by its tag."""
    tag = {"begin": "<f=x>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</f>"}
    node = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag]}
    source = json.dumps({"type": "structural_tag", "format": node})
    grammar = compiled(backends["llguidance"], GrammarSpec(kind=Kind.STRUCTURAL, source=source))
    for text in ("", "plain < text <g>", "a<f=x>12</f>b", "<f=x>1</f><f=x>2</f>"):
        assert matches(grammar, small, text), text
    for text in ("a<f=y>1</f>", "<f=x>no</f>", "<f=x>1", "x<f=x>1</g>"):
        assert not matches(grammar, small, text), text


@pytest.mark.parametrize("num_rows", [7, 40])
def test_rows_filled_together_equal_rows_filled_alone(
    backends: Mapping[str, GrammarBackend], small: Vocabulary, num_rows: int
) -> None:
    """`fill_batch` writes the rows it is given and no others, in threads or not, ended matchers among them."""
    backend = cast("Any", backends["llguidance"])
    grammars = [compiled(backend, spec) for spec in SPECS]
    rng = random.Random(num_rows)
    matchers = [rng.choice(grammars).matcher() for _ in range(num_rows)]
    for matcher in matchers:
        for _ in range(rng.randrange(8)):
            matcher.accept([rng.choice(sorted(allowed(matcher, small)))])
    mask = np.full((num_rows + 3, small.mask_words), 0x55, dtype=np.int32)
    rows = rng.sample(range(num_rows + 3), num_rows)
    before, backend._num_threads = backend._num_threads, 2
    try:
        assert backend.fill_batch(matchers, mask, rows) == [True] * num_rows
    finally:
        backend._num_threads = before
    for matcher, row in zip(matchers, rows, strict=True):
        assert set(ids_of(mask[row])) == allowed(matcher, small)
    assert all((mask[row] == 0x55).all() for row in set(range(num_rows + 3)) - set(rows))


def test_a_prepared_grammar_is_the_same(backends: Mapping[str, GrammarBackend], small: Vocabulary) -> None:
    """Warming a grammar up changes none of its masks."""
    for spec in SPECS:
        fresh, warm = compiled(backends["llguidance"], spec), compiled(backends["llguidance"], spec)
        backends["llguidance"].warm_up(warm, 0.5)
        one, other = fresh.matcher(), warm.matcher()
        rng = random.Random(2)
        for _ in range(10):
            tokens = allowed(one, small)
            assert tokens == allowed(other, small)
            token = rng.choice(sorted(tokens))
            assert one.accept([token]) == other.accept([token]) == 1
            if one.terminated:
                break
