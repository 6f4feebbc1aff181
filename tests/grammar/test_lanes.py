"""Matchers of one grammar that are used at the same time do not all share what the library derives."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
from test_structural import VOCABULARY

from dovetail.contracts.grammar import GrammarLimits, GrammarSpec, Kind
from dovetail.grammar.compile.memory import allocated_bytes
from dovetail_grammar import llguidance as module
from dovetail_grammar.json_states import STATE_BYTES
from dovetail_grammar.llguidance import MAX_BASES, PER_BASE, LlguidanceBackend, LlguidanceGrammar

SPEC = GrammarSpec(kind=Kind.JSON, source=json.dumps({"type": "array", "items": {"type": "integer"}}))


def compiled(backend: LlguidanceBackend) -> LlguidanceGrammar:
    """A small grammar."""
    found = backend.compile(SPEC, GrammarLimits())
    grammar = backend.load(found) if isinstance(found, bytes) else found
    assert isinstance(grammar, LlguidanceGrammar)
    return grammar


def test_every_few_requests_get_a_matcher_to_copy() -> None:
    """As many as are used at once need, and no more; who has left makes room; masks are the same."""
    grammar = compiled(LlguidanceBackend(VOCABULARY))
    lanes = grammar._lanes
    matchers = [grammar.matcher() for _ in range(PER_BASE)]
    assert len(lanes) == 1
    matchers += [grammar.matcher() for _ in range(PER_BASE + 1)]
    assert len(lanes) == 3
    mask = np.zeros((len(matchers), VOCABULARY.mask_words), dtype=np.int32)
    for row, matcher in enumerate(matchers):
        assert matcher.accept(VOCABULARY.encode("[1")) if VOCABULARY.encode else True
        matcher.fill(mask, row)
    assert (mask == mask[0]).all()
    assert mask[0].any()
    del matchers[:], matcher
    gc.collect()
    for _ in range(3 * PER_BASE):
        grammar.matcher()
    assert len(lanes) == 3
    kept = [grammar.matcher() for _ in range(2 * MAX_BASES * PER_BASE)]
    assert len(lanes) == MAX_BASES
    assert kept


def test_a_grammar_says_what_it_takes() -> None:
    """Once texts have followed it: the library's matcher by what the allocator says, and its states as they come."""
    if not allocated_bytes():
        pytest.skip("the allocator does not say")
    backend, encode = LlguidanceBackend(VOCABULARY), VOCABULARY.encode
    assert encode is not None
    mask = np.zeros((1, VOCABULARY.mask_words), dtype=np.int32)

    def used(number: int) -> LlguidanceGrammar:
        keys = [f"k{number}{index}" for index in range(8)]
        schema = {"type": "object", "properties": {key: {"type": "string"} for key in keys}, "required": keys}
        spec = GrammarSpec(kind=Kind.JSON, source=json.dumps(schema))
        found = backend.compile(spec, GrammarLimits())
        grammar = backend.load(found) if isinstance(found, bytes) else found
        assert isinstance(grammar, LlguidanceGrammar)
        matcher = grammar.matcher()
        for token_id in encode(json.dumps(dict.fromkeys(keys, "some text"))):
            backend.fill_batch([matcher], mask, [0])
            assert matcher.accept([token_id]) == 1
        return grammar

    used(0)
    before = allocated_bytes()
    kept = [used(number) for number in range(1, 31)]
    gc.collect()
    taken, said = allocated_bytes() - before, sum(grammar.num_bytes for grammar in kept)
    assert 0.5 * taken < said < 2 * taken
    grammar = kept[0]
    alone = grammar.num_bytes
    grammar.follow()
    assert grammar.states is not None
    state = grammar.states.start
    for token_id in encode('{"k10": "'):
        state, _ = grammar.states.after(state, token_id)
    assert grammar.num_bytes > alone + 3 * STATE_BYTES


def test_what_is_costly_to_build_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has no time to build it again."""
    monkeypatch.setattr(module, "MAX_BUILD_S", -1.0)
    grammar = compiled(LlguidanceBackend(VOCABULARY))
    kept = [grammar.matcher() for _ in range(3 * PER_BASE)]
    assert len(grammar._lanes) == 1
    assert kept
