"""Masks of equal states are computed once, and are what the library computes for each of them."""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from random_pairs import Maker

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarLimits, GrammarSpec, Kind, Vocabulary
from dovetail.grammar.compile.cache import Enforced
from dovetail.grammar.compile.service import GrammarService
from dovetail.grammar.matching.bitmask import fill_masks
from dovetail.grammar.matching.constraint import Constraint, TokenSets
from dovetail.grammar.pipeline import StructuredOutputs
from dovetail.grammar.spec.route import GrammarRouter
from dovetail.grammar.spec.wire import spec_of
from dovetail.messages import GrammarOption
from dovetail.plugins import Registry, load, make_plan
from dovetail.sdk.masks import ids_of
from dovetail_grammar import json_states, kept_masks, llguidance
from dovetail_grammar.llguidance import LlguidanceBackend, LlguidanceGrammar, LlguidanceMatcher
from dovetail_grammar.local_schemas import Schemas, is_local
from dovetail_grammar.unique.matcher import UniqueGrammar
from dovetail_testing.conformance.grammar_samples import small_vocabulary

ROW = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 9},
        "kind": {"enum": ["city", "river", "ci"]},
        "year": {"type": "integer"},
        "at": {"type": "number", "minimum": 3, "maximum": 17.5},
        "more": {"anyOf": [{"type": "string"}, {"type": "null"}, {"$ref": "#/$defs/pair"}]},
    },
    "required": ["name", "year"],
    "additionalProperties": False,
}
SCHEMAS: list[Any] = [
    {"type": "array", "items": ROW, "minItems": 3, "maxItems": 40, "$defs": {"pair": {"type": "array", "maxItems": 2}}},
    {"type": "array", "items": {"type": "number"}, "maxItems": 300},
    {"type": "array", "items": {"type": "string", "maxLength": 60}, "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}, {"enum": [1, 12, "x"]}]},
    {"type": "object", "patternProperties": {"^a": {"type": "string", "pattern": "^(ab)*$"}}, "minProperties": 1},
    {"type": "object", "additionalProperties": {"type": ["integer", "boolean", "null"]}, "maxProperties": 3},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "number"},
    {"enum": [1, 10, 100, "a", "ab", None, True]},
    {"type": "object"},
    {},
]
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 12}, "b": {"type": "array", "items": {"type": "integer"}}},
    "additionalProperties": False,
}
NAMES, ACROSS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]"), (b'": {"', b"}}", b'"}}\n', b"]}; {", b"} \n", b"1]}")


def with_calls() -> Vocabulary:
    """Tokens of bytes, tokens that reach over a call's ends, and tokens that are names."""
    made = small_vocabulary()
    first = made.size + len(ACROSS)
    tokens = [*made.tokens, *[b""] * (made.size - len(made.tokens)), *ACROSS]
    return replace(
        made,
        tokens=[*tokens, *[b""] * len(NAMES)],
        size=first + len(NAMES),
        added=dict(zip(NAMES, range(first, first + 3), strict=True)),
        special_ids=made.special_ids | set(range(first, first + len(NAMES))),
        fingerprint="with calls",
    )


NUM_RANDOM = 150


class Untouched:
    """A matcher of the library that computes nothing."""

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return False


def made(backend: LlguidanceBackend, schema: Any) -> LlguidanceGrammar | None:
    """Compile a schema as a request would have it; None where it is refused."""
    try:
        route = GrammarRouter({"llguidance": backend}).route(
            GrammarSpec(kind=Kind.JSON, source=json.dumps(schema)), "json"
        )
        found = backend.compile(spec_of(route.engine_options[0]), GrammarLimits())
        grammar = backend.load(found) if isinstance(found, bytes) else found
    except RequestError:
        return None
    grammar = grammar.inner if isinstance(grammar, UniqueGrammar) else grammar
    assert isinstance(grammar, LlguidanceGrammar)
    grammar.follow()
    return grammar


def walk(backend: LlguidanceBackend, grammar: LlguidanceGrammar, rng: random.Random, num: int, rows: int) -> int:
    """Follow random texts side by side and compare every mask with the library's; returns how many were told."""
    size, told = backend._vocabulary.mask_words, 0
    matchers = [grammar.matcher() for _ in range(rows)]
    mask, want = (np.zeros((rows, size), dtype=np.int32) for _ in range(2))
    for _ in range(num):
        told += sum(matcher.shared is not None for matcher in matchers)
        backend.fill_batch(matchers, mask, range(rows))
        for row, matcher in enumerate(matchers):
            matcher.fill(want, row)
            at = "".join(chr(b) for t in matcher._taken for b in backend._vocabulary.tokens[t])
            assert ids_of(mask[row]) == ids_of(want[row]), f"{at!r} {matcher._taken}"
        for row, matcher in enumerate(matchers):
            _go_on(matcher, ids_of(want[row]), rng, backend._vocabulary)
    return told


def _go_on(matcher: LlguidanceMatcher, allowed: list[int], rng: random.Random, vocabulary: Vocabulary) -> None:
    """Take an allowed token, seldom whitespace; go back now and then."""
    drawn = [token for token in rng.sample(allowed, min(3, len(allowed))) if token not in vocabulary.eos_ids]
    drawn.sort(key=lambda token: vocabulary.tokens[token].isspace())
    if matcher.terminated or not drawn:
        return
    assert matcher.accept(drawn[:1]) == 1
    if rng.random() < 0.05:
        matcher.rollback(rng.randint(1, min(4, len(matcher._taken))))


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_texts_that_the_library_has_not_heard_of_have_its_masks(schema: Any, small: Vocabulary) -> None:
    """Matchers follow texts by kept masks, whitespace of every kind in them; beside each, one of the library alone."""
    backend, alone = LlguidanceBackend(small), LlguidanceBackend(small)
    grammar, other = made(backend, schema), made(alone, schema)
    assert grammar is not None
    assert other is not None
    other.states = None
    for seed in range(4):
        rng = random.Random(seed)
        matchers, twins = [grammar.matcher() for _ in range(6)], [other.matcher() for _ in range(6)]
        mask, want = (np.zeros((6, small.mask_words), dtype=np.int32) for _ in range(2))
        for _ in range(60):
            backend.fill_batch(matchers, mask, range(6))
            alone.fill_batch(twins, want, range(6))
            for row, (matcher, twin) in enumerate(zip(matchers, twins, strict=True)):
                assert ids_of(mask[row]) == ids_of(want[row]), twin._taken
                if rng.random() < 0.1:
                    assert matcher.forced() == twin.forced()
                allowed = [token for token in ids_of(want[row]) if token not in small.eos_ids]
                spaces = [token for token in allowed if small.tokens[token].isspace()]
                if allowed and not matcher.terminated:
                    token = rng.choice(spaces if spaces and rng.random() < 0.3 else allowed)
                    assert matcher.accept([token]) == twin.accept([token]) == 1
                if matcher._taken and rng.random() < 0.05:
                    num = rng.randint(1, min(4, len(matcher._taken)))
                    matcher.rollback(num)
                    twin.rollback(num)
                assert matcher.error is twin.error is None
                assert 0 <= len(matcher._taken) - matcher._num_consumed <= llguidance.MAX_UNTOLD
        assert [matcher.accepting for matcher in matchers] == [twin.accepting for twin in twins]


def test_what_a_kept_mask_forbids_is_refused(small: Vocabulary) -> None:
    """By a matcher whose library is some tokens behind: nothing of it is taken, and the text goes on."""
    backend = LlguidanceBackend(small)
    grammar = made(backend, {"type": "array", "items": {"type": "integer"}})
    assert grammar is not None
    assert small.encode is not None
    mask = np.zeros((1, small.mask_words), dtype=np.int32)
    for _ in range(2):
        matcher = grammar.matcher()
        for token in small.encode("[1,2"):
            backend.fill_batch([matcher], mask, [0])
            assert matcher.accept([token]) == 1
        backend.fill_batch([matcher], mask, [0])
    assert matcher._num_consumed < len(matcher._taken)
    assert matcher.accept(small.encode("x")) == 0
    assert matcher.error is None
    assert matcher.accept(small.encode(",3]")) == 3
    assert matcher.accepting


def test_rows_that_go_along_together_are_not_told_of_in_one_step(
    small: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 texts that are equal: the library hears of a few of them in each step, and of none later than it must."""
    backend = LlguidanceBackend(small)
    grammar = made(backend, {"type": "string"})
    assert grammar is not None
    matchers = [grammar.matcher() for _ in range(64)]
    mask = np.zeros((64, small.mask_words), dtype=np.int32)
    told: list[int] = []
    tell = LlguidanceMatcher._consume

    def counted(matcher: LlguidanceMatcher) -> None:
        told[-1] += 1
        assert len(matcher._taken) - matcher._num_consumed <= llguidance.MAX_UNTOLD
        tell(matcher)

    monkeypatch.setattr(LlguidanceMatcher, "_consume", counted)
    for place in range(200):
        told.append(0)
        if place < 3:
            backend.fill_batch(matchers, mask, range(64))
        assert place < 3 or all(backend.known(matcher) is not None for matcher in matchers)
        assert {matcher.accept([small.tokens.index(b"a" if place else b'"')]) for matcher in matchers} == {1}
    assert 0 < max(told[3:]) <= 12


def test_a_matcher_that_has_failed_or_ended_has_no_kept_mask(small: Vocabulary) -> None:
    """Though its state has one: what it says of its error comes first."""
    backend = LlguidanceBackend(small)
    grammar = made(backend, {"type": "integer"})
    assert grammar is not None
    matcher, failed = grammar.matcher(), grammar.matcher()
    mask = np.zeros((2, small.mask_words), dtype=np.int32)
    backend.fill_batch([matcher, failed], mask, [0, 1])
    assert backend.known(matcher) is not None
    assert backend.known(failed) is not None
    failed._refused = "the grammar refuses a text that its masks had allowed"
    assert backend.known(failed) is None
    failed._refused, failed._failure = "", "the library's own error, which somebody has looked at already"
    assert backend.known(failed) is None
    for byte in b"12":
        backend.fill_batch([matcher], mask, [0])
        assert matcher.accept([small.tokens.index(bytes([byte]))]) == 1
    backend.fill_batch([matcher], mask, [0])
    assert matcher.accept([next(iter(small.eos_ids))]) == 1
    assert matcher.terminated
    assert backend.known(matcher) is None
    matcher.rollback(1)
    assert backend.known(matcher) is not None


def test_items_and_whitespace_are_counted_beside_a_state(small: Vocabulary) -> None:
    """Of two arrays, the longer one's texts lead through the same states, and the bound still holds."""
    backend = LlguidanceBackend(small)
    grammar = made(backend, {"type": "array", "items": {"type": "array", "maxItems": 3}, "maxItems": 300})
    assert grammar is not None
    assert small.encode is not None
    assert grammar.states is not None
    first, second = grammar.matcher(), grammar.matcher()
    for matcher, text in ((first, "[[1],\n [2, "), (second, "[[1],\t\n[2],\r\n[3],\t [2,\t")):
        ids = small.encode(text)
        assert matcher.accept(ids) == len(ids)
        assert matcher.shared is not None
    assert second.shared is first.shared
    assert second._places[-1][0] is first._places[-1][0]
    assert second.accept(small.encode("1,1")) == 3
    mask = np.zeros((1, small.mask_words), dtype=np.int32)
    backend.fill_batch([second], mask, [0])
    [comma] = small.encode(",")
    assert comma not in ids_of(mask[0])


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_masks_of_equal_states_are_the_librarys(schema: Any, small: Vocabulary) -> None:
    """For texts of every kind of schema, at counts near and far from their bounds."""
    backend = LlguidanceBackend(small)
    grammar = made(backend, schema)
    assert grammar is not None
    assert grammar.states is not None
    assert walk(backend, grammar, random.Random(1), 60, 12) > 12 * 30


def test_masks_of_random_schemas_are_the_librarys(small: Vocabulary) -> None:
    """Over every keyword, draft and format; a good part of them can be told."""
    backend, told, num = LlguidanceBackend(small), 0, 0
    for seed in range(NUM_RANDOM):
        grammar = made(backend, Maker(seed).schema())
        if grammar is not None:
            num += 1
            told += walk(backend, grammar, random.Random(seed), 12, 4) > 0
    assert told > 0.2 * num


def test_keys_count_though_the_last_is_the_same(small: Vocabulary) -> None:
    """An object with as many keys as it may have gets no other."""
    backend = LlguidanceBackend(small)
    grammar = made(backend, {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2})
    assert grammar is not None
    matchers = [grammar.matcher(), grammar.matcher()]
    assert small.encode is not None
    for matcher, text in zip(matchers, ('{"a":1', '{"b":1,"a":1'), strict=True):
        ids = small.encode(text)
        assert matcher.accept(ids) == len(ids)
    mask = np.zeros((2, small.mask_words), dtype=np.int32)
    backend.fill_batch(matchers, mask, range(2))
    [comma] = small.encode(",")
    assert [comma in ids_of(line) for line in mask] == [True, False]


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("parallel", [True, False])
def test_masks_of_calls_are_the_librarys(name: str, parallel: bool) -> None:
    """For two tools, called once or one call behind the other, with a token around them or without."""
    backend = LlguidanceBackend(with_calls())
    parser = load(make_plan(Registry.scan(), tool_parser=name), "api").get("tool_parser", name)()
    tools = [
        {"type": "function", "function": {"name": tool, "parameters": {**OBJECT, "required": required}}}
        for tool, required in (("put", ["a"]), ("putter", []))
    ]
    front = StructuredOutputs({"llguidance": backend})
    try:
        route = front.tools(parser, name, tools, "required", parallel=parallel, param="tools")
    finally:
        front.close()
    found = backend.compile(spec_of(route.engine_options[0]), GrammarLimits())
    grammar = backend.load(found) if isinstance(found, bytes) else found
    grammar = grammar.inner if isinstance(grammar, UniqueGrammar) else grammar
    assert isinstance(grammar, LlguidanceGrammar)
    grammar.follow()
    assert grammar.states is not None
    assert walk(backend, grammar, random.Random(1), 160, 8) > 8 * 100


def test_a_full_memory_gives_up_masks_that_nobody_asked_for(small: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for a few masks and states: right all the same."""
    monkeypatch.setattr(kept_masks, "MAX_BYTES", 5 * (4 * small.mask_words + kept_masks.OWNER_BYTES))
    monkeypatch.setattr(json_states, "MAX_STATES", 7)
    backend = LlguidanceBackend(small)
    grammar = made(backend, SCHEMAS[0])
    assert grammar is not None
    walk(backend, grammar, random.Random(1), 60, 12)
    assert backend._kept is not None
    assert len(backend._kept._owners) == 5
    assert [owner.slot for owner in backend._kept._owners] == list(range(5))
    assert len({shared.slot for owner in backend._kept._owners if (shared := owner()) is not None}) == 5


def test_ever_new_grammars_take_no_more_memory(small: Vocabulary) -> None:
    """What is kept of a grammar goes with it, masks and states, and not with a round of the garbage collector."""
    backend = LlguidanceBackend(small)
    gc.collect()
    gc.disable()
    parts = (json_states.SharedMask, json_states.TextState, Schemas)
    others = Counter(type(found) for found in gc.get_objects())  # of other tests of this process
    try:
        numbers = []
        for _ in range(4):
            for schema in SCHEMAS:
                grammar = made(backend, schema)
                assert grammar is not None
                walk(backend, grammar, random.Random(1), 40, 4)
                del grammar
            assert backend._kept is not None
            numbers.append(len(backend._kept._owners))
            assert not [owner for owner in backend._kept._owners if owner() is not None]
            kinds = Counter(type(found) for found in gc.get_objects())
            assert [kinds[part] for part in parts] == [others[part] for part in parts]
    finally:
        gc.enable()
    assert numbers == numbers[:1] * 4


@pytest.mark.parametrize("schema", SCHEMAS[:4])
def test_the_first_mask_is_not_computed_again(small: Vocabulary, schema: Any) -> None:
    """Compiling has computed it; a text that was taken back to its beginning has it, too."""
    backend = LlguidanceBackend(small)
    grammar = made(backend, schema)
    assert grammar is not None
    masks = np.zeros((3, small.mask_words), dtype=np.int32)
    matcher = grammar.matcher()
    matcher.inner.unsafe_compute_mask_ptr(masks[0].ctypes.data, masks[0].nbytes)
    assert masks[0].any()
    token_id = ids_of(masks[0])[0]
    assert matcher.accept([token_id]) == 1
    matcher.fill(masks, 1)
    assert (masks[1] != masks[0]).any()
    matcher.rollback(1)
    matcher.fill(masks, 1)
    fresh = grammar.matcher()
    fresh._inner = Untouched()
    fresh.fill(masks, 2)
    assert (masks[1:] == masks[0]).all()


def test_a_slot_that_was_freed_late_is_not_given_twice(small: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may call back once the slot has another owner."""
    monkeypatch.setattr(kept_masks, "MAX_BYTES", 2 * (4 * small.mask_words + kept_masks.OWNER_BYTES))
    kept = kept_masks.KeptMasks(small.mask_words)
    line = np.zeros(small.mask_words, dtype=np.int32)
    owners = [json_states.SharedMask() for _ in range(2)]
    for shared in owners:
        kept.keep(shared, line)
    kept._free += [1, 0, 1]
    late = [json_states.SharedMask() for _ in range(2)]
    for shared in late:
        kept.keep(shared, line)
    assert [shared.slot for shared in (*owners, *late)] == [-1, -1, 0, 1]


def test_a_mask_is_computed_once_for_rows_in_one_state(small: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four rows that say other things of the same length, far from bounds, need one mask, and then none."""
    backend = LlguidanceBackend(small)
    grammar = made(backend, SCHEMAS[2])
    assert grammar is not None
    assert small.encode is not None
    matchers = []
    for row in range(64):
        matchers.append(grammar.matcher())
        ids = small.encode("[" + '"abcd",' * (row % 3 + 3) + f'"{chr(97 + row % 26)}')
        assert matchers[-1].accept(ids) == len(ids)
    asked: list[int] = []
    compute = backend._compute

    def counted(going: Any, mask: Any) -> set[int]:
        asked.append(len(going))
        return compute(going, mask)

    monkeypatch.setattr(backend, "_compute", counted)
    mask = np.zeros((64, small.mask_words), dtype=np.int32)
    backend.fill_batch(matchers, mask, range(64))
    backend.fill_batch(matchers, mask, range(64))
    assert asked == [1, 0]
    assert (mask == mask[0]).all()


def test_the_service_has_states_told_once_a_grammar_is_in_force(small: Vocabulary) -> None:
    """Nobody waits for it; then rows of a step have their masks copied."""
    plugins = load(make_plan(Registry.scan(), grammar_backend="llguidance"), "engine")
    service = GrammarService(plugins, lambda: small, timeout_s=30, cache_bytes=1 << 20)
    try:
        option = GrammarOption(backend="llguidance", kind="json", source=json.dumps(SCHEMAS[2]))
        future = service.request((option,))
        until = time.monotonic() + 60
        while not future.is_ready and time.monotonic() < until:
            service.wait(0.01)
        enforced = future.outcome
        assert isinstance(enforced, Enforced)
        grammar, backend = enforced.compiled, enforced.backend
        assert isinstance(grammar, LlguidanceGrammar)
        assert isinstance(backend, LlguidanceBackend)
        while grammar.states is None and time.monotonic() < until:
            time.sleep(0.01)
        sets = TokenSets(small)
        constraints = [Constraint(sets, None, grammar.matcher(), backend) for _ in range(3)]
        lines = np.zeros((3, small.mask_words), dtype=np.int32)
        mask_of, _ = fill_masks(constraints, [False] * 3, lambda num: lines[:num])
        assert mask_of.tolist() == [0, 1, 2]
        assert (lines == lines[0]).all()
        assert lines.any()
        assert backend._kept is not None
        assert len(backend._kept._owners) == 1
    finally:
        service.close()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"const": 1}},
        {"enum": [{"a": 1}, {"a": 2}]},
        {"const": [1, 2]},
        {"if": {"required": ["a"]}, "then": False},
        {"not": {"required": ["a"]}},
        {"anyOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"type": ["object", "null"]}], "$defs": {"a": {"type": "object"}}},
        {"items": [{"type": "integer"}]},
        {"$ref": "#/$defs/missing"},
        {"$ref": "elsewhere"},
        {"type": "object", "properties": {"a": {"dependentRequired": {"a": ["b"]}}}},
        {"anyOf": [{"properties": {"a": {"const": 1}}}, {"minItems": 1}]},
    ],
)
def test_what_one_value_says_of_another_is_not_told(schema: Any) -> None:
    """Such schemas are left to the library alone."""
    assert not is_local(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "object"}, {"type": "array"}, {"type": "string"}, {"enum": [1, None]}]},
        {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "object"}}},
        {"allOf": [{"required": ["a"]}, {"properties": {"a": {"minLength": 2}}}]},
        {"$ref": "#"},
    ],
)
def test_alternatives_that_begin_differently_are_told(schema: Any) -> None:
    """What stands open says which one holds."""
    assert is_local(schema)


@pytest.mark.parametrize("key", ["anyOf", "oneOf", "allOf"])
@pytest.mark.parametrize("last", [{"type": "string"}, {"type": "object"}, {"$ref": "#/$defs/d0"}])
def test_references_that_multiply_are_followed_once(key: str, last: Any) -> None:
    """Ten ways to each of 25 definitions, the last one of which may lead back to the first: 10^25 ways in all."""
    parts = {f"d{i}": {key: [{"$ref": f"#/$defs/d{i + 1}"} for _ in range(10)]} for i in range(25)}
    schema = {"anyOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}], "$defs": {**parts, "d25": last}}
    count = 0

    def noted(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"
        assert count < 20_000

    sys.setprofile(noted)
    try:
        assert is_local(schema) is (key == "allOf" or last == {"type": "string"})
    finally:
        sys.setprofile(None)


def test_anchors_are_not_looked_for() -> None:
    """Each would be looked for in the whole document."""
    assert not is_local({"$ref": "#a", "$defs": {"x": {"$anchor": "a"}}})
