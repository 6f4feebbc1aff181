"""Whitespace behind thinking: the template's newlines may come, are nobody's text, and nothing else stands there."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dovetail.contracts.grammar import GrammarLimits, GrammarSpec, Kind, Vocabulary
from dovetail.contracts.output import FormatSpec, Markers, State
from dovetail.grammar.matching.constraint import Constraint, TokenSets
from dovetail.grammar.matching.reasoning_gate import make_gate
from dovetail.messages import MarkedThinking, Marker
from dovetail.sdk.formats.output import make_parser, parse_full
from dovetail.sdk.masks import ids_of
from dovetail_grammar.llguidance import LlguidanceBackend

END = "</t>"


@pytest.mark.parametrize("after", ["", "\n", "\n\n"])
@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("yes|no", {"yes", "no"}),
        ("[0-9]", set("0123456789")),
        (" ?(a|b)", {"a", "b", " a", " b"}),
        (r"\n?x", {"x", "\nx"}),
    ],
)
def test_the_answer_is_what_the_grammar_says(pattern: str, wanted: set[str], after: str, small: Vocabulary) -> None:
    """Whatever is drawn, what the output parser gives out as the answer is one of the grammar's texts."""
    backend = LlguidanceBackend(small)
    compiled = backend.compile(GrammarSpec(kind=Kind.REGEX, source=pattern), GrammarLimits())
    assert not isinstance(compiled, bytes)
    end = Marker(END, tuple(small.tokens.index(bytes([b])) for b in END.encode()))
    thinking = MarkedThinking(state="in", start=Marker("<t>", ()), end=end, after=after, budget=0)
    format_ = FormatSpec(reasoning=Markers("<t>", END, after_end=after), initial=State.IN)
    sets, rng, spaced = TokenSets(small), random.Random(3), 0
    for _ in range(40):
        matcher = compiled.matcher()
        constraint = Constraint(sets, make_gate(thinking, small.tokens, constrained=True), matcher, backend)
        text = b""
        while not constraint.terminated:
            row = np.zeros(small.mask_words, dtype=np.int32)
            matched = constraint.matching is not None and matcher.fill(row[None], 0)
            ids = ids_of(row) if constraint.fill(row, matched) else range(small.size)
            token = rng.choice([*ids])
            assert constraint.accept(token) is None
            text += b"" if token in small.eos_ids else small.tokens[token]
        spaced += text.startswith(f"{END}\n".encode())
        assert parse_full(make_parser(format_), text=text.decode()).content in wanted
    assert spaced or not after
