"""Tool grammars of every built-in format: they compile, and what they allow is read back as calls."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from dovetail.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarLimits, GrammarMatcher, Vocabulary
from dovetail.contracts.output import FormatSpec
from dovetail.contracts.tools import ToolParser
from dovetail.grammar.compile.vocabulary import make_vocabulary
from dovetail.grammar.spec.fields import check_spec
from dovetail.grammar.spec.tool_route import auto_grammar
from dovetail.plugins import Registry, load, make_plan
from dovetail.sdk.formats.output import make_parser, parse_full
from dovetail.sdk.masks import ids_of
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_parsers import inkling, muse
from dovetail_testing.vocabularies import byte_level

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
BUILT_IN = [r.name for r in Registry.scan().of_kind("tool_parser") if r.builtin]
NAMES = [name for name in BUILT_IN if name != "template"]
"""`template` has the format that a chat template writes, and none without one."""


MARKERS = (
    *muse.MARKS,
    *inkling.MARKS,
    *("<tool_call>", "</tool_call>", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
    *("<|return|>", "｜DSML｜", "[TOOL_CALLS]", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<seed:tool_call>"),
)
ANSWERS = {
    "beam": "<|channel|>final<|message|>",
    "functionary": "all\n",
    "hyperclova": "\n",
    "gpt-oss": "<|channel|>final<|message|>",
    "inkling": "<|content_text|>",
    "muse": " to=user<|message|>",
}
"""What begins an answer, in formats where something does."""
CALLS = {
    "beam": " to=get_weather<|channel|>analysis <|constrain|>xml<|message|>",
    "gpt-oss": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
    "hyperclova": " -> tool/function_call\n[",
}
"""What begins a call: random thoughts before it would hardly come to an end."""


@pytest.fixture(scope="module", params=["tokens", "text"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Markers are tokens, or text."""
    return byte_level(MARKERS) if request.param == "tokens" else byte_level()


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return make_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def walk(
    matcher: GrammarMatcher,
    vocabulary: Vocabulary,
    rng: random.Random,
    begin: Sequence[int] = (),
    most: int = 400,
    *,
    is_begun: bool = False,
) -> list[int] | None:
    """Random tokens to the end of the grammar, markers taken gladly; None where it gets long."""
    taken = [*begin]
    assert is_begun or matcher.accept(taken) == len(taken)
    row = np.zeros((1, vocabulary.mask_words), dtype=np.int32)
    for _ in range(most):
        matcher.fill(row, 0)
        allowed = ids_of(row[0])
        ends = vocabulary.eos_ids & set(allowed)
        if ends and (len(ends) == len(allowed) or rng.random() < 0.5):
            return taken
        marks = [t for t in allowed if t in vocabulary.special_ids]
        visible = [t for t in allowed if not vocabulary.tokens[t].isspace()]
        token = rng.choice(marks if marks and rng.random() < 0.5 else visible or allowed)
        assert matcher.accept([token]) == 1
        taken.append(token)
    return None


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_what_a_tool_grammar_allows_is_read_back(
    name: str, choice: Any, tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    """Random texts of the grammar are calls of the tools allowed, with conforming arguments."""
    parser, grammar = compiled(name, choice, vocabulary)
    num_read = 0
    begin = tokenizer.encode(CALLS.get(name, ""), add_special_tokens=False)
    for seed in range(3):
        ids = walk(grammar.matcher(), vocabulary, random.Random(seed), begin)
        if ids is None:
            continue
        folded = parse_full(make_parser(parser.extend(FormatSpec(), TOOLS), tokenizer), ids)
        [call] = folded.tool_calls
        assert call.name == "get_weather" or choice == "required"
        check_arguments(call.arguments)
        num_read += 1
    assert num_read


@cache
def parser_of(name: str) -> ToolParser:
    """Make a format's parser once, as a server does."""
    plan = make_plan(Registry.scan(), tool_parser=name)
    parser: ToolParser = load(plan, "api").get("tool_parser", name)()
    return parser


@cache
def backend() -> type[GrammarBackend]:
    """Load the backend that compiles."""
    plan = make_plan(Registry.scan(), grammar_backend="llguidance")
    found: type[GrammarBackend] = load(plan, "engine").get("grammar_backend", "llguidance")
    return found


def compiled(name: str, choice: Any, vocabulary: Vocabulary) -> tuple[ToolParser, CompiledGrammar]:
    """Return a format's parser, and the grammar of its calls."""
    parser = parser_of(name)
    spec = auto_grammar(parser, TOOLS, True, True) if choice == "auto" else parser.grammar(TOOLS, choice, True, False)
    assert spec is not None
    check_spec(spec)
    return parser, backend()(vocabulary).compile(spec, GrammarLimits())


def check_arguments(text: str) -> None:
    """Check that the arguments are what `TOOLS` wants."""
    arguments = json.loads(text)
    assert arguments["unit"] in ("c", "f")
    assert 1 <= arguments["days"] <= 9
    assert len(arguments) == 2


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
def test_free_text_may_hold_calls(name: str, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """With `auto` plain text is allowed, and what the format's parser reads as a call in random texts conforms."""
    if name == "hyperclova":
        return  # the marker behind its thinking is the end of the reply in this vocabulary
    parser, grammar = compiled(name, "auto", vocabulary)
    matcher = grammar.matcher()
    ids = tokenizer.encode(ANSWERS.get(name, "") + "Hello, no call", add_special_tokens=False)
    assert matcher.accept(ids) == len(ids)
    assert matcher.accepting
    for seed in range(2):
        taken = walk(grammar.matcher(), vocabulary, random.Random(seed))
        if taken is not None:
            folded = parse_full(make_parser(parser.extend(FormatSpec(), TOOLS), tokenizer), taken)
            for call in folded.tool_calls:
                check_arguments(call.arguments)


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
def test_a_strict_call_cannot_be_anything_else(name: str, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """With `auto`, a right call is allowed and one with a wrong argument is not, in every format."""
    _, required = compiled(name, NAMED, vocabulary)
    begin = tokenizer.encode(CALLS.get(name, ""), add_special_tokens=False)
    walks = (walk(required.matcher(), vocabulary, random.Random(seed), begin) for seed in range(30))
    ids = next(found for found in walks if found)
    right = compiled(name, "auto", vocabulary)[1].matcher()
    assert right.accept(ids) == len(ids)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    for unit in ("c", "f"):
        text = text.replace(f'"{unit}"', '"k"').replace(f">{unit}<", ">k<").replace(f">\n{unit}\n<", ">\nk\n<")
        text = text.replace(f">{unit}]<", ">k]<")
    wrong = tokenizer.encode(text, add_special_tokens=False)
    matcher = compiled(name, "auto", vocabulary)[1].matcher()
    assert matcher.accept(wrong) < len(wrong), text


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
def test_no_way_to_write_a_call_gets_past_strict(name: str, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """With `auto` a reply is plain content or calls that conform, however tolerant the format's parser is.

    Walks through the masks are led, as far as these allow it, to every text that opens a call for the parser, and to
    calls that do not conform behind it.
    """
    parser, grammar = compiled(name, "auto", vocabulary)
    spec = parser.extend(FormatSpec(), TOOLS)
    if spec.messages is not None and spec.messages.start not in tokenizer.added_tokens:
        return  # such a format's markers are tokens, or thinking cannot be told from calls
    texts = temptations(name, spec, tokenizer, vocabulary)
    num_calls = 0
    for seed in range(len(texts) + 2):
        rng = random.Random(seed)
        forced = texts[seed] if seed < len(texts) else "".join(rng.choices([*texts, "so ", "\n"], k=3))
        ids = tokenizer.encode(ANSWERS.get(name, "") * (seed % 2) + forced, add_special_tokens=False)
        matcher = grammar.matcher()
        taken = walk(matcher, vocabulary, rng, ids[: matcher.accept(ids)], is_begun=True)
        if taken is None:
            continue
        calls = parse_full(make_parser(spec, tokenizer), taken).tool_calls
        for call in calls:
            check_arguments(call.arguments)
        num_calls += len(calls)
    assert num_calls


def temptations(name: str, spec: FormatSpec, tokenizer: Tokenizer, vocabulary: Vocabulary) -> list[str]:
    """Return what opens a call, alone and with calls behind it, that conform and that do not."""
    required = compiled(name, NAMED, vocabulary)[1]
    begin = tokenizer.encode(CALLS.get(name, ""), add_special_tokens=False)
    walks = (walk(required.matcher(), vocabulary, random.Random(seed), begin) for seed in range(30))
    right = tokenizer.decode(next(found for found in walks if found), skip_special_tokens=False)
    wrong = re.sub(r'(["\'>\n])[cf](["\'<\n])', r"\1k\2", right)
    tools = spec.tools
    openers = [] if tools is None else [text for text in (tools.start, *tools.also, *tools.bare) if text]
    bodies = [part for text in openers for whole in (right, wrong) if (part := whole[whole.find(text) :]) != whole[-1:]]
    written = '{"name": "get_weather", "arguments": {"unit": "k", "days": 3}}'
    return [right, wrong, *openers, *bodies, *(text + body for text in openers for body in (written, f"[ {written}]"))]
