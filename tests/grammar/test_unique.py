"""`uniqueItems` over grammars that cannot say it: no item twice, and always a way on."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from grammar_routes import written
from random_pairs import Maker

from dovetail.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarLimits, GrammarSpec, Kind, Vocabulary
from dovetail.grammar.spec.route import GrammarRouter
from dovetail.grammar.spec.wire import spec_of
from dovetail.plugins import Registry, load, make_plan
from dovetail.sdk.masks import ids_of
from dovetail_grammar.unique.locations import unique_places
from dovetail_grammar.unique.matcher import UniqueGrammar
from dovetail_testing.conformance.grammar_samples import small_vocabulary

STRINGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
PAIR = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"const": "k"}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Bytes, and texts that end one item and begin another."""
    plain = small_vocabulary()
    more = [
        b'","',
        b'", "',
        b'"]',
        b'"}',
        b'"},{"',
        b"1,",
        b"a,b",
        b'a"',
        b'":',
        b'" :',
        b"1,1",
        b'b","a"',
        b" ",
        b"value ",
    ]
    tokens = [*plain.tokens, *more]
    return Vocabulary(
        tokens=tokens,
        size=len(tokens),
        eos_ids=plain.eos_ids,
        special_ids=plain.special_ids,
        fingerprint="unique",
    )


@pytest.fixture(scope="module")
def backend(vocabulary: Vocabulary) -> GrammarBackend:
    made: GrammarBackend = load(make_plan(Registry.scan(), grammar_backend="llguidance"), "compiler").get(
        "grammar_backend", "llguidance"
    )(vocabulary)
    return made


class Watched:
    """A schema's grammar as the engine makes it."""

    def __init__(self, given: Any, backend: GrammarBackend, vocabulary: Vocabulary) -> None:
        route = GrammarRouter({"llguidance": backend}).route(
            GrammarSpec(kind=Kind.JSON, source=json.dumps(given)), "json_schema"
        )
        way = route.options[0]
        self.enforcement, self.ignored = way.enforcement, way.ignored
        compiled = backend.compile(spec_of(way.grammar), GrammarLimits())
        self.grammar: CompiledGrammar = backend.load(compiled) if isinstance(compiled, bytes) else compiled
        self.vocabulary = vocabulary

    def accepts(self, text: str) -> bool:
        """Whether a text is complete and conforms."""
        matcher, ids = self.grammar.matcher(), list(text.encode())
        return matcher.accept(ids) == len(ids) and matcher.accepting

    def write(self, rng: random.Random, most: int = 300) -> str:
        """Follow the masks; ends soon after a while. There must always be a way on."""
        matcher = self.grammar.matcher()
        mask = np.zeros((1, self.vocabulary.mask_words), dtype=np.int32)
        text = b""
        for place in range(most):
            matcher.fill(mask, 0)
            ids = [i for i in ids_of(mask[0]) if i not in self.vocabulary.special_ids]
            if matcher.accepting and (not ids or rng.random() < 0.3):
                return text.decode()
            assert matcher.error is None, (text, matcher.error)
            assert ids, text
            closing = [i for i in ids if self.vocabulary.tokens[i][:1] in b'"]}']
            few = [i for i in ids if self.vocabulary.tokens[i][:1] in b'ab1",:{}[]k']
            token = rng.choice(closing if closing and place > 60 else few or ids)
            assert matcher.accept([token]) == 1, (text, self.vocabulary.tokens[token])
            text += self.vocabulary.tokens[token]
        return ""


def test_items_that_repeat_are_refused(backend: GrammarBackend, vocabulary: Vocabulary) -> None:
    """By value: in another order of keys, with other blanks, as another spelling of a number."""
    strings = Watched(STRINGS, backend, vocabulary)
    assert (strings.enforcement, strings.ignored) == ("full", ())
    assert strings.accepts('["a", "b", "ab"]')
    assert not strings.accepts('["a", "b", "a"]')
    anything = Watched({"type": "array", "uniqueItems": True}, backend, vocabulary)
    assert anything.enforcement == "full"
    for text in (
        '[{"a":1,"b":2},{"b":2,"a":1}]',
        "[1, 1.0]",
        "[100, 1e2]",
        "[0, -0]",
        "[[1, 2],[1,2 ]]",
        "[null,null]",
    ):
        assert not anything.accepts(text), text
    for text in ('[{"a":1,"b":2},{"b":1,"a":2}]', "[1, true]", "[0, false]", '["1", 1]', "[[1],[1,1]]", "[[1,1],[1]]"):
        assert anything.accepts(text), text


def test_a_zero_with_a_sign_is_led_to_only_where_there_is_a_way_on(
    backend: GrammarBackend, vocabulary: Vocabulary
) -> None:
    """`-0` is the 0 of an earlier item, of which no mask may be the beginning; `-0.5` is another number."""
    given: Any
    for given, text, may in (
        ({"type": "integer"}, "[0,-", False),
        ({"type": "integer"}, "[1,-", True),
        ({"type": "number"}, "[0,-", True),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, "[[0],[-", False),
    ):
        matcher = Watched({"type": "array", "items": given, "uniqueItems": True}, backend, vocabulary).grammar.matcher()
        ids = list(text.encode())
        assert matcher.accept(ids) == len(ids)
        mask = np.zeros((1, vocabulary.mask_words), dtype=np.int32)
        matcher.fill(mask, 0)
        assert (ord("0") in ids_of(mask[0])) is may, (given, text)


def test_arrays_in_arrays_differ_on_both_levels(backend: GrammarBackend, vocabulary: Vocabulary) -> None:
    """Also where the two that are equal have others between them, and a third level lies in between."""
    inner = {"type": "array", "uniqueItems": True}
    for items in (inner, {"type": "array", "maxItems": 3, "items": inner, "uniqueItems": True}):
        watched = Watched({"type": "array", "items": items, "uniqueItems": True}, backend, vocabulary)
        assert watched.enforcement == "full"
        for text in ("[[[1],[2]],[[1],[2]]]", "[[[1]],[[2]],[[1]]]", "[[[1],[1]]]", "[[[1,2]],[[1],[2],[1]]]"):
            assert not watched.accepts(text), text
        for text in ("[[[1],[2]],[[2],[1]]]", "[[[1]],[[1],[2]],[[1,2]]]", "[[[1,2],[2,1]]]"):
            assert watched.accepts(text), text


@pytest.mark.parametrize(
    "given",
    [
        {"properties": {"tags": STRINGS}},
        {"additionalProperties": STRINGS},
        {"patternProperties": {"^t": STRINGS}, "additionalProperties": False},
        {"patternProperties": {"^(t|u)[a-z]+$": STRINGS}, "additionalProperties": False},
        {"properties": {"tags": {"$ref": "#/$defs/t"}}, "$defs": {"t": STRINGS}},
        {"properties": {"tags": {"anyOf": [{"type": "string"}, STRINGS]}}},
        {"oneOf": [{"type": "array"}, {"properties": {"tags": STRINGS}, "type": "object"}]},
        {"allOf": [{"properties": {"tags": {"uniqueItems": True}}}, {"properties": {"tags": {"items": {}}}}]},
    ],
)
def test_arrays_are_found_wherever_they_stand(given: Any, backend: GrammarBackend, vocabulary: Vocabulary) -> None:
    """In properties, definitions and alternatives, and no other array is meant."""
    watched = Watched(given, backend, vocabulary)
    assert watched.enforcement == "full", watched.ignored
    assert not watched.accepts('{"tags": ["x", "x"]}')
    assert watched.accepts('{"tags": ["x", "y"]}')


def test_other_arrays_may_repeat(backend: GrammarBackend, vocabulary: Vocabulary) -> None:
    """Beside, around and within one whose items differ."""
    given = {
        "properties": {"a": {"type": "array"}, "tags": STRINGS, "b": {"type": "array", "items": STRINGS}},
        "additionalProperties": False,
    }
    watched = Watched(given, backend, vocabulary)
    assert watched.accepts('{"a": [1, 1], "tags": ["x"], "b": [["x"], ["x"]]}')
    given = {"patternProperties": {"^t": STRINGS}, "properties": {"a": {"items": {"type": "integer"}}}}
    assert Watched(given, backend, vocabulary).accepts('{"a": [1, 1], "tags": ["x"], "u": ["x", "x"]}')
    assert not watched.accepts('{"a": [1, 1], "tags": ["x"], "b": [["x", "x"]]}')


@pytest.mark.parametrize(
    "items",
    [
        {"type": "string", "maxLength": 1, "pattern": "^[ab]$"},
        {"type": "string", "pattern": "^(aa|ab|b)$"},
        {"enum": ["a", "ab", "aba", "b", 1, 11, 2, {"a": 1}]},
        {"type": "integer", "minimum": 0, "maximum": 11},
        {"type": "integer", "minimum": -1, "maximum": 1},
        {"type": "integer"},
        {"type": "object", "properties": {"k": {"type": "integer", "minimum": -1, "maximum": 0}}, "required": ["k"]},
        {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": "a"}]},
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False},
        PAIR,
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True},
        {"type": "string", "maxLength": 2},
        {"enum": [f"value {i}" for i in range(12)]},  # "value " is one token, which alone is allowed behind `"`
    ],
    ids=str,
)
def test_there_is_always_a_way_on(items: Any, backend: GrammarBackend, vocabulary: Vocabulary) -> None:
    """Masks lead to no item that could only repeat one, however few there are, and every text is whole."""
    watched = Watched({"type": "array", "items": items, "uniqueItems": True}, backend, vocabulary)
    assert watched.enforcement == "full"
    longest = 0
    for seed in range(40):
        text = watched.write(random.Random(seed))
        if text:
            values = [json.dumps(value, sort_keys=True) for value in json.loads(text)]
            assert len(set(values)) == len(values), text
            longest = max(longest, len(values))
    assert longest >= 2


def test_nothing_else_is_taken_away(backend: GrammarBackend, vocabulary: Vocabulary) -> None:
    """A token that the mask leaves out ends in a repeated item, whatever follows: all others are there."""
    watched = Watched(
        {"type": "array", "items": {"enum": ["a", "ab", "b", 1, 12]}, "uniqueItems": True}, backend, vocabulary
    )
    if not isinstance(watched.grammar, UniqueGrammar):
        given = {"type": "array", "items": {"enum": ["a", "ab", "b", 1, 12, "c", "d", "e"]}, "uniqueItems": True}
        watched = Watched(given, backend, vocabulary)
    matcher = watched.grammar.matcher()
    mask = np.zeros((1, vocabulary.mask_words), dtype=np.int32)
    assert matcher.accept(list(b'["a",')) == 5
    matcher.fill(mask, 0)
    assert {vocabulary.tokens[i] for i in ids_of(mask[0])} >= {b'"', b"1", b" "}
    assert matcher.accept(list(b'"a')) == 2
    matcher.fill(mask, 0)
    assert {vocabulary.tokens[i] for i in ids_of(mask[0])} == {b"b"}
    assert matcher.accept(list(b'"')) == 0
    assert matcher.error is None
    assert matcher.accept(list(b'b",1')) == 4
    matcher.fill(mask, 0)
    assert {vocabulary.tokens[i] for i in ids_of(mask[0])} >= {b",", b"]", b"2"}


def test_going_back_and_forking_keep_what_was_said(backend: GrammarBackend, vocabulary: Vocabulary) -> None:
    """Items that were taken back may come again; a fork's items are its own."""
    matcher = Watched(STRINGS, backend, vocabulary).grammar.matcher()
    assert matcher.accept(list(b'["a","b","c"')) == 12
    other = matcher.fork()
    matcher.rollback(8)
    assert matcher.accept(list(b',"c","b","d"')) == 12
    assert other.accept(list(b',"d"')) == 4
    assert matcher.accept(list(b',"c"')) == 3
    matcher.rollback(14)
    assert matcher.accept(list(b'"c","a"')) < 7
    other.rollback(40 - 24)
    assert other.accept(list(b'["a"')) == 4


def test_random_texts_agree_with_a_plain_check(backend: GrammarBackend, vocabulary: Vocabulary) -> None:
    """Texts of random values in any spelling are taken exactly where no array in them repeats an item."""
    watched = Watched({"$ref": "#/$defs/x", "$defs": {"x": {
        "uniqueItems": True, "items": {"$ref": "#/$defs/x"}, "additionalProperties": {"$ref": "#/$defs/x"},
    }}}, backend, vocabulary)  # fmt: skip
    assert watched.enforcement == "full"
    plain = Watched({}, backend, vocabulary)
    num = 0
    for seed in range(240):
        maker = Maker(seed)
        text = maker.text([maker.rng.choice([[1, 1], {"a": [2]}, 1, "a", maker.instance({})]) for _ in range(3)])
        if plain.accepts(text):
            num += 1
            assert watched.accepts(text) == _differ(json.loads(text)), text
    assert num > 120


def _differ(value: Any) -> bool:
    """Whether no array in a value has two equal items."""
    if isinstance(value, dict):
        return all(map(_differ, value.values()))
    if not isinstance(value, list):
        return True
    texts = [json.dumps(_plain(item), sort_keys=True) for item in value]
    return len(set(texts)) == len(texts) and all(map(_differ, value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


@pytest.mark.parametrize(
    "given",
    [
        {"prefixItems": [{"enum": ["a", "b"]}, {"const": "a"}]},
        {"prefixItems": [{"type": "string"}, {"const": "a"}, {"enum": ["a", "b"]}]},
        {"prefixItems": [{"type": "string"}, {"enum": ["a", "b"]}], "minItems": 2},
        {"prefixItems": [{"const": 1}, {"enum": ["a", "b"]}, {"type": "boolean"}], "minItems": 3, "items": False},
        {
            "prefixItems": [{"type": "string", "maxLength": 1}] * 2,
            "items": {"enum": ["a", "b", "c", "d"]},
            "minItems": 4,
        },
        {
            "prefixItems": [{}, {"type": "integer", "minimum": 0, "maximum": 3}],
            "items": {"type": "boolean"},
            "minItems": 2,
        },
        {"prefixItems": [{"anyOf": [{"const": "a"}, {"enum": ["a", "b"]}]}, PAIR, {"type": "null"}], "minItems": 3},
    ],
    ids=str,
)
def test_first_items_that_are_described_one_by_one_differ(
    given: Any, backend: GrammarBackend, vocabulary: Vocabulary
) -> None:
    """Whatever the first ones are, those that must come have a way on, and no others begin that have none."""
    watched = Watched({"type": "array", "uniqueItems": True, **given}, backend, vocabulary)
    assert watched.enforcement == "full", watched.ignored
    lengths = set()
    for seed in range(20):
        text = watched.write(random.Random(seed))
        if text:
            assert len({json.dumps(_plain(item)) for item in json.loads(text)}) == len(json.loads(text)), text
            lengths.add(len(json.loads(text)))
    assert lengths
    assert min(lengths) >= given.get("minItems", 0)


def test_a_choice_that_can_leave_nothing_for_another_is_left_to_judging() -> None:
    """What the first may be depends on what is left for the second; only places that a text must fit count."""
    for given in (
        {"prefixItems": [{"enum": [1, 2]}, {"const": 1}], "minItems": 2},
        {"prefixItems": [{"const": 1}], "items": {"enum": [1, 2]}, "minItems": 3},
        {"prefixItems": [{"pattern": "^a?$", "type": "string"}] * 3, "minItems": 3},
    ):
        assert unique_places(written({**given, "uniqueItems": True}).schema) == (None, frozenset()), given
    assert unique_places(written({"not": {"items": {"items": {}, "uniqueItems": True}}}).schema)[1] == frozenset()
