"""Masks that devices keep: what the host names is what it would have sent."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.contracts.grammar import GrammarLimits, GrammarSpec, Kind, Vocabulary
from dovetail.grammar.matching.bitmask import FREE, MAX_LOOKED, MAX_NEW, KeptLines, fill_masks, kept_number
from dovetail.grammar.matching.constraint import Constraint, TokenSets
from dovetail.grammar.matching.reasoning_gate import make_gate
from dovetail.messages import MarkedThinking, Marker
from dovetail.runtime.sampling.masks import MaskBuffer, num_kept
from dovetail.sdk.masks import draw_ids, new_row, the_only
from dovetail_grammar.llguidance import LlguidanceBackend, LlguidanceGrammar, LlguidanceMatcher

TOKENS = (*(bytes([i]) for i in range(256)), b'"}', b'{"', b"true", b"ab", b"<think>", b"</think>", b"")
EOS = len(TOKENS) - 1
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 4}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Bytes, and a few longer tokens."""
    return Vocabulary(
        tokens=TOKENS, size=len(TOKENS), eos_ids=frozenset({EOS}), special_ids=frozenset({EOS - 2, EOS - 1, EOS}),
        fingerprint="kept", added={"<think>": EOS - 2, "</think>": EOS - 1},
    )  # fmt: skip


@pytest.fixture(scope="module")
def backend(vocabulary: Vocabulary) -> LlguidanceBackend:
    """Makes the library's tokenizer once."""
    return LlguidanceBackend(vocabulary)


class Rows:
    """Requests of one schema, every third of which thinks first, and the device that keeps their masks, or none."""

    def __init__(self, vocabulary: Vocabulary, backend: LlguidanceBackend, num_slots: int) -> None:
        grammar: Any = backend.compile(GrammarSpec(kind=Kind.JSON, source=json.dumps(SCHEMA)), GrammarLimits())
        assert isinstance(grammar, LlguidanceGrammar)
        grammar.follow()
        sets = TokenSets(vocabulary)
        marks = MarkedThinking(state="in", start=Marker("<think>", (EOS - 2,)), end=Marker("</think>", (EOS - 1,)))
        gates = [make_gate(marks, TOKENS, constrained=True) if i % 3 == 0 else None for i in range(9)]
        self.constraints = [Constraint(sets, gate, grammar.matcher(), backend) for gate in gates]
        self.buffer = MaskBuffer(vocabulary.mask_words, DEVICE, 9, num_slots)
        self.kept = KeptLines(num_slots) if num_slots else None
        self.num_named = 0

    def step(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The masks of all rows, as graphs read them and as they are sent otherwise."""
        mask_of, _ = fill_masks(self.constraints, [False] * 9, self.buffer.lend, kept=self.kept)
        assert (mask_of != FREE).all()
        if self.kept is not None:
            self.buffer.keep(self.kept.new)
        self.buffer.send(int((mask_of >= 0).sum()))
        self.num_named += int((mask_of < FREE).sum())
        found = self.buffer.mask_of(mask_of)
        assert found is not None
        assert found.rows.tolist() == list(range(9))
        return self.buffer.sent.cpu().numpy()[self.buffer.lines_of(mask_of)], found.words.cpu().numpy().copy()


@pytest.mark.parametrize("num_slots", [1, 4, 64])
def test_a_kept_mask_is_the_mask_that_would_be_sent(
    num_slots: int, vocabulary: Vocabulary, backend: LlguidanceBackend
) -> None:
    """Rows that walk beside others without a table, with too few slots and with enough, in thinking and behind it."""
    rng = random.Random(num_slots)
    rows, plain = Rows(vocabulary, backend, num_slots), Rows(vocabulary, backend, 0)
    done = [False] * 9
    for step in range(60):
        (by_graph, sent), (_, want) = rows.step(), plain.step()
        assert (by_graph == want).all()
        assert (sent == want).all()
        for i in range(9):
            drawn = draw_ids(want[i], 6, rng)
            token = min(drawn, key=lambda t: (TOKENS[t].isspace(), rng.random()))
            gate = plain.constraints[i].gate
            if gate is not None and gate.free and step >= 5:
                token = EOS - 1
            if not done[i]:
                assert rows.constraints[i].accept(token) == plain.constraints[i].accept(token) is None
                assert rows.constraints[i].was_forced == plain.constraints[i].was_forced
                done[i] = rows.constraints[i].terminated
    assert rows.num_named > 10


def test_a_state_that_several_share_is_computed_once(
    vocabulary: Vocabulary, backend: LlguidanceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get a copy, and so does whoever comes to it later."""
    grammar: Any = backend.compile(GrammarSpec(kind=Kind.JSON, source=json.dumps(SCHEMA)), GrammarLimits())
    grammar.follow()
    computed: list[int] = []
    fill = LlguidanceMatcher.fill

    def counted(self: LlguidanceMatcher, mask: Any, row: int) -> None:
        computed.append(row)
        fill(self, mask, row)

    monkeypatch.setattr(LlguidanceMatcher, "fill", counted)
    masks = [np.zeros((4, vocabulary.mask_words), dtype=np.int32) for _ in range(2)]
    for mask in masks:
        assert backend.fill_batch([grammar.matcher() for _ in range(4)], mask, range(4)) == [True] * 4
    assert computed == [0]
    assert masks[0].any()
    assert all((mask == masks[0][0]).all() for mask in masks)


def _slot(kept: KeptLines, key: str) -> int | None:
    """Where a mask is kept."""
    found = kept.find(key)
    return None if found is None else found.slot


def test_what_a_step_draws_by_is_not_given_to_others() -> None:
    """The mask that nobody asked for longest goes; where all are in use, a new one is not kept."""
    kept = KeptLines(2)
    kept.begin()
    kept.keep("a", 0)
    kept.keep("b", 1)
    kept.keep("a", 2)
    assert kept.new.tolist() == [[0, 0], [1, 1]]
    kept.begin()
    assert _slot(kept, "a") == 0
    kept.keep("c", 0)
    kept.keep("d", 1)
    assert kept.new.tolist() == [[0, 1]]
    assert _slot(kept, "b") is None
    assert _slot(kept, "c") == 1
    kept.forget()
    assert _slot(kept, "a") is None
    assert kept.new.shape == (0, 2)


def test_masks_that_are_asked_for_outlive_those_that_are_not() -> None:
    """Three that every step draws by stay through a hundred that come and go; a mask's slot is never another's."""
    kept, slots = KeptLines(8), {}
    for step in range(100):
        kept.begin()
        for key in ("a", "b", "c") if step else ():
            assert _slot(kept, key) == slots[key]
        for key in ("a", "b", "c", str(step)):
            kept.keep(key, 0)
            slots[key] = _slot(kept, key)
        assert len({slot for key, slot in slots.items() if _slot(kept, key) is not None}) == min(8, 4 + step)


def test_where_all_that_are_looked_at_are_in_use_a_mask_is_not_kept() -> None:
    """And the next step finds one that is not."""
    kept = KeptLines(2 * MAX_LOOKED)
    for start in range(0, 2 * MAX_LOOKED, MAX_NEW):
        kept.begin()
        for key in range(start, start + MAX_NEW):
            kept.keep(key, key)
    kept.begin()
    for key in range(2 * MAX_LOOKED):
        assert kept.find(key) is not None
    kept.keep("new", 0)
    assert kept.find("new") is None
    for _ in range(3):
        kept.begin()
        kept.keep("new", 0)
    assert kept.find("new") is not None


@pytest.mark.parametrize("size", [31, 32, 63, 100, 2000])
def test_the_only_token_of_a_mask_is_known(size: int) -> None:
    """The highest bit of a word, too; and of none or two there is no only one."""
    for token in {0, 30, size - 1, size // 2}:
        assert the_only(new_row(size, [token])) == token
    assert the_only(new_row(size)) == -1
    assert the_only(new_row(size, [0, 1])) == the_only(new_row(size, [0, size - 1])) == -1


def test_a_step_has_few_masks_kept() -> None:
    """Each is a copy of its own; the next step goes on."""
    kept = KeptLines(100)
    for most in (MAX_NEW, 2 * MAX_NEW):
        kept.begin()
        for key in range(20):
            kept.keep(key, key)
        assert len(kept.new) == MAX_NEW
        assert kept.new[-1, 1] == most - 1


def test_kept_masks_are_numbered_below_free_ones() -> None:
    """And stand behind those of a step; as many as 16 MB hold."""
    buffer = MaskBuffer(1, torch.device("cpu"), 5, 3)
    named = np.array([0, FREE, kept_number(0), kept_number(2)], dtype=np.int32)
    assert buffer.lines_of(named).tolist() == [0, FREE, 5, 7]
    assert num_kept(4748) == 883


def test_equal_keys_of_two_backends_are_two_masks(vocabulary: Vocabulary, backend: LlguidanceBackend) -> None:
    """What one backend means by a key is nothing to another one."""

    class Numbers:
        """A backend that has numbers for keys, and one mask."""

        def __init__(self, mask: int) -> None:
            self.words = np.full(vocabulary.mask_words, mask, dtype=np.int32)

        def known(self, matcher: Any) -> Any:
            return 5, self.words

    sets, matchers = TokenSets(vocabulary), [object(), object()]
    backends: list[Any] = [Numbers(1), Numbers(2)]
    constraints = [Constraint(sets, None, matcher, of) for matcher, of in zip(matchers, backends, strict=True)]  # type: ignore[arg-type]
    found = [constraint.known() for constraint in constraints]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0][0] != found[1][0]
    assert found[0][0] == (backends[0], 5)
