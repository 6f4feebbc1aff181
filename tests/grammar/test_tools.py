"""Tool grammars of every built-in format: they compile, and what they allow is read back as calls."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from dovetail.contracts.grammar import GrammarLimits, GrammarMatcher, Vocabulary
from dovetail.contracts.reasoning import FormatSpec
from dovetail.grammar.bits import ids_of
from dovetail.grammar.limits import check_spec
from dovetail.grammar.vocabulary import make_vocabulary
from dovetail.plugins import Registry, load, make_plan
from dovetail.testing.vocabularies import byte_level
from dovetail.text.output import make_parser, parse_full
from dovetail.text.tokenizer import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["c", "f"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
                "required": ["unit", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("get_weather", "get-time.now")
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
NAMES = [record.name for record in Registry.scan().of_kind("tool_parser") if record.distribution == "dovetail"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return make_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def walk(matcher: GrammarMatcher, vocabulary: Vocabulary, rng: random.Random, most: int = 400) -> list[int] | None:
    """Random tokens to the end of the grammar; None where it gets long."""
    import numpy as np

    taken: list[int] = []
    row = np.zeros((1, vocabulary.mask_words), dtype=np.int32)
    for _ in range(most):
        matcher.fill(row, 0)
        allowed = ids_of(row[0])
        ends = vocabulary.eos_ids & set(allowed)
        if ends:
            return taken
        spaces = [t for t in allowed if not vocabulary.tokens[t].isspace()]
        token = rng.choice(spaces or allowed)
        assert matcher.accept([token]) == 1
        taken.append(token)
    return None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_what_a_tool_grammar_allows_is_read_back(
    name: str, choice: Any, tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    """Random texts of the grammar are calls of the tools allowed, with conforming arguments."""
    plan = make_plan(Registry.scan(), tool_parser=name, grammar_backend="llguidance")
    parser = load(plan, "api").get("tool_parser", name)()
    spec = parser.grammar(TOOLS, choice, True, False)
    if spec is None:
        pytest.skip(f"{name} has no grammar")
    check_spec(spec)
    backend = load(plan, "engine").get("grammar_backend", "llguidance")(vocabulary)
    grammar = backend.compile(spec, GrammarLimits())
    num_read = 0
    for seed in range(6):
        ids = walk(grammar.matcher(), vocabulary, random.Random(seed))
        if ids is None:
            continue
        folded = parse_full(make_parser(parser.extend(FormatSpec(), TOOLS), tokenizer), ids)
        [call] = folded.tool_calls
        assert call.name == "get_weather" or choice == "required"
        arguments = json.loads(call.arguments)
        assert arguments["unit"] in ("c", "f")
        assert 1 <= arguments["days"] <= 9
        num_read += 1
    assert num_read


@pytest.mark.parametrize("name", NAMES)
def test_free_text_may_hold_calls(name: str, vocabulary: Vocabulary) -> None:
    """With `auto` the grammar compiles and allows plain text."""
    plan = make_plan(Registry.scan(), tool_parser=name, grammar_backend="llguidance")
    spec = load(plan, "api").get("tool_parser", name)().grammar(TOOLS, "auto", True, True)
    if spec is None:
        pytest.skip(f"{name} has no grammar")
    check_spec(spec)
    backend = load(plan, "engine").get("grammar_backend", "llguidance")(vocabulary)
    matcher = backend.compile(spec, GrammarLimits()).matcher()
    ids = [vocabulary.tokens.index(bytes([byte])) for byte in b"Hello, no call"]
    assert matcher.accept(ids) == len(ids)
    assert matcher.accepting
