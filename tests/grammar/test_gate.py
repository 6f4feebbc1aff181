"""The gate: it agrees with the output parser at every token, lets grammars hold for the answer alone, keeps budgets."""

from __future__ import annotations

import pickle
import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np
import pytest

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarBackend, GrammarLimits, GrammarSpec, Kind, Vocabulary
from dovetail.contracts.output import FormatSpec, Markers, ToolFormat
from dovetail.contracts.reasoning import ParserRequest
from dovetail.grammar.compile.vocabulary import make_vocabulary
from dovetail.grammar.matching.constraint import Constraint, TokenSets
from dovetail.grammar.matching.reasoning_gate import MAX_ROLLBACK, ReasoningGate, make_gate
from dovetail.plugins import Registry, load, make_plan
from dovetail.processing.constraints import ReasoningOptions, thinking_of
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail.sdk.formats.output import Folded, make_parser, parse_full
from dovetail.sdk.masks import ids_of
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_parsers import inkling, muse
from dovetail_parsers.harmony import MARKS, MESSAGES, MESSAGES_AND_CALLS, HarmonyParser
from dovetail_parsers.inkling import InklingParser, InklingTools
from dovetail_parsers.muse import SPARK, MuseParser, MuseTools, SparkParser
from dovetail_testing.operations import operations
from dovetail_testing.parsers import BytesTokenizer, PlainTemplate
from dovetail_testing.vocabularies import byte_fallback, byte_level

FULL = FormatSpec(
    reasoning=Markers("<think>", "</think>", ended_by_tools=True),
    tools=ToolFormat("<tool_call>", "</tool_call>", JsonCalls),
)
HARMONY = FormatSpec(machine=HarmonyParser, messages=MESSAGES)
MUSE = FormatSpec(machine=MuseParser, messages=muse.MESSAGES)
CALLING = replace(HARMONY, messages=MESSAGES_AND_CALLS, tools=FULL.tools)
SPECS = {
    "full": FULL,
    "not ended by tools": replace(FULL, reasoning=Markers("<think>", "</think>")),
    "reasoning": replace(FULL, tools=None),
    "ended by what begins a call": FormatSpec(reasoning=Markers("<think>", "</think>", ended_by=("<tool_call>",))),
    "ended by an answer": FormatSpec(
        reasoning=Markers("<think>", "</think>", ended_by_answer=True), answer=Markers("<tool_call>", "</tool_call>")
    ),
    "text markers": FormatSpec(reasoning=Markers("◁think▷", "◁/think▷")),
    "plain": FormatSpec(),
    "harmony": HARMONY,
    "harmony with tools": CALLING,
    "muse": MUSE,
    "muse with tools": MuseTools().extend(FormatSpec(), []),
    "spark": replace(MUSE, machine=SparkParser, messages=SPARK),
    "inkling": FormatSpec(machine=InklingParser, messages=inkling.MESSAGES),
    "inkling with tools": InklingTools().extend(FormatSpec(), []),
}
TAILS = [
    "",
    "<|a|><think>\n",
    "<|a|></think>",
    "<|start|>assistant",
    "◁think▷",
    "<|start|>assistant<|channel|>analysis",
]
MARKED = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "◁think▷",
    "◁/think▷",
    "\n",
    " ",
    "a",
    "why 🎉",
    "<",
    "◁",
    *("`", '"', "```\n", "> ", "“", "”", ". ", "好", "    ", "<code>", "'s"),
]
HEADED = [
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>"),
    *("<|channel|>commentary to=functions.f<|message|>", '{"name": "f"}', "<|call|>", "<|return|>", "<|constrain|>"),
    *("<|message|>", "analysis", "final", "commentary", " to=analysis", " json", "so", "\n", "assistant", "Hm, "),
    *("<|channel|>analysis to=functions.f <|constrain|>json<|message|>", "<|channel|>commentary<|message|>"),
]
SOUPS = {
    "<|start|>": HEADED,
    "<|message_model|>": [
        *inkling.MARKS,
        *("<|message_model|><|content_thinking|>", "<|message_model|><|content_text|>", "<|end_message|>", "why", "\n"),
        *("now", '<|content_invoke_tool_json|>{"name": "now", "args": {"q": "x"}}', "so"),
    ],
    "muse": [
        *muse.MARKS,
        *(" to=self<|message|>", " to=user<|message|>", "<|eom|><|start|>assistant", " to=f<|message|>", " to=self"),
        *('<atem:invoke name="f">', "</atem:invoke>", "why", " to", "=", "\n", "so", " to=user", "commentary"),
    ],
}
ANSWER = GrammarSpec(kind=Kind.REGEX, source="[A-F]{2}[0-9]{2}")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """With the markers of both families."""
    return byte_level(("<think>", "</think>", "<tool_call>", "</tool_call>", *MARKS, *muse.MARKS, *inkling.MARKS))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    ends = (*tokenizer.eos_token_ids, *(tokenizer.added_tokens[m] for m in ("<|return|>", "<|call|>")))
    return make_vocabulary(tokenizer, tokenizer.vocab_size, ends)


@pytest.fixture(scope="module")
def backend(vocabulary: Vocabulary) -> GrammarBackend:
    plan = make_plan(Registry.scan(), grammar_backend="llguidance")
    made: GrammarBackend = load(plan, "engine").get("grammar_backend", "llguidance")(vocabulary)
    return made


def gate_of(
    spec: FormatSpec,
    tokenizer: Tokenizer,
    tail: str,
    *,
    budget: int | None = None,
    constrained: bool = False,
    **use: Any,
) -> ReasoningGate | None:
    thinking = thinking_of(spec, tokenizer, tail, ReasoningOptions(budget=budget, **use))
    if thinking is None:
        return None
    return make_gate(thinking, tokens_of(tokenizer), constrained=constrained)


def thinks(gate: ReasoningGate) -> bool:
    """Whether the next token is thinking."""
    return getattr(gate, "state", "") == "in" or getattr(gate, "phase", "") == "think"


def followed(spec: FormatSpec) -> FormatSpec:
    """Return a format as the server reads it where the engine follows thinking."""
    marks = spec.reasoning
    return spec if marks is None else replace(spec, reasoning=replace(marks, ends_quoted=True))


@lru_cache
def tokens_of(tokenizer: Tokenizer) -> list[bytes]:
    return [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]


def cases(tokenizer: Tokenizer, count: int, seed: int) -> list[tuple[FormatSpec, str, list[int]]]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        spec = rng.choice([*SPECS.values()])
        soup = MARKED if spec.messages is None else SOUPS["muse" if spec.messages.bare else spec.messages.start]
        text = "".join(rng.choices(soup, k=rng.randrange(14)))
        found.append((spec, rng.choice(TAILS), tokenizer.encode(text, add_special_tokens=False)))
    return found


def signs(gate: ReasoningGate) -> tuple[object, ...]:
    return gate.reasoning_tokens, thinks(gate), gate.free, gate.forced_ids, gate.extra_id, gate.forbidden_id


def test_gate_and_parser_agree_after_every_token(tokenizer: Tokenizer) -> None:
    """Over random outputs of every kind of format whose markers are tokens, up to a call within thinking.

    The gate takes it for one, while the parser waits for what follows.
    """
    num_seen = 0
    for spec, tail, ids in cases(tokenizer, 1500, 5):
        if spec is SPECS["text markers"]:
            continue  # parsers hold text back that may become a marker: see test_masks
        gate, parser = gate_of(spec, tokenizer, tail), make_parser(followed(spec), tokenizer)
        parser.prime(tail)
        if gate is None:
            continue
        repeated = 0
        for token_id in ids:
            if thinks(gate) and spec.messages is None and token_id == tokenizer.added_tokens["<tool_call>"]:
                break
            repeated += token_id == tokenizer.added_tokens["<think>"]
            gate.accept(token_id)
            parser.feed([token_id])
            text = tail, tokenizer.decode(ids, skip_special_tokens=False)
            assert thinks(gate) == parser.in_reasoning, text
            assert 0 <= gate.reasoning_tokens - parser.reasoning_tokens <= repeated, text
        num_seen += 1
    assert num_seen > 600


THINKERS = [entry for entry in entry_points(group="dovetail.reasoning_parsers.v1") if "dovetail_parsers" in entry.value]
"""The built-in reasoning parsers; `template` declares nothing without a template."""


@pytest.mark.parametrize("entry", THINKERS, ids=lambda entry: str(entry.name))
def test_gate_and_parser_agree_in_every_format(entry: EntryPoint) -> None:
    """Also beside calls, with the format's own markers as tokens, repeated, in any order, behind any prompt."""
    spec = entry.load()().spec(BytesTokenizer(), PlainTemplate(), ParserRequest())
    if spec.messages is not None or spec.reasoning is None:
        return  # messages: the soups above; Functionary does not think
    spec = replace(spec, tools=FULL.tools)
    marks = spec.reasoning
    others = () if spec.answer is None else (spec.answer.start, spec.answer.end)
    tokenizer = byte_level((marks.start, marks.end, *others, *spec.dropped, "<tool_call>", "</tool_call>"))
    opened = marks.start + marks.after_start
    tails = ["<|a|>", f"<|a|>{opened}", f"<|a|>{opened}{marks.before_end}{marks.end}", f"<|a|>{marks.end}"]
    soup = [marks.start, marks.end, *others, "<tool_call>", "</tool_call>", "\n", " ", "why 🎉", "{}", "<"]
    soup += ["`", '"', "> ", "``` ", "“", ". ", "。"]
    rng = random.Random(entry.name)
    for _ in range(200):
        tail = rng.choice(tails)
        ids = tokenizer.encode("".join(rng.choices(soup, k=rng.randrange(12))), add_special_tokens=False)
        gate, parser = gate_of(spec, tokenizer, tail), make_parser(followed(spec), tokenizer)
        parser.prime(tail)
        for token_id in ids if gate is not None else ():
            assert gate is not None
            if thinks(gate) and token_id == tokenizer.added_tokens["<tool_call>"]:
                break
            gate.accept(token_id)
            parser.feed([token_id])
            assert thinks(gate) == parser.in_reasoning, (tail, tokenizer.decode(ids, skip_special_tokens=False))


def test_rollback_restores_what_was(tokenizer: Tokenizer) -> None:
    """Tokens taken back and others taken instead leave the gate as if the first had never come."""
    rng = random.Random(7)
    for spec, tail, ids in cases(tokenizer, 400, 9):
        if spec is SPECS["plain"]:
            continue
        use: dict[str, Any] = {"budget": rng.choice((None, 3)), "constrained": rng.random() < 0.5}
        gate, straight = (gate_of(spec, tokenizer, tail, **use) for _ in range(2))
        if gate is None or straight is None:
            continue
        trail = [signs(gate)]
        for token_id in ids:
            for detour in rng.sample(range(tokenizer.vocab_size), rng.randrange(3)):
                gate.accept(detour)
                gate.rollback(1)
                assert signs(gate) == trail[-1]
            gate.accept(token_id)
            straight.accept(token_id)
            trail.append(signs(gate))
            assert trail[-1] == signs(straight)
        back = rng.randrange(len(ids) + 1)
        gate.rollback(back)
        assert signs(gate) == trail[len(ids) - back]


@pytest.mark.parametrize("opening", ["`", '"', "> ", "```\n", "\n    ", "<code>", "„"])
def test_rollback_restores_what_quotes(opening: str, tokenizer: Tokenizer) -> None:
    """A marker is named behind what is taken back, and opens thinking without it; and the other way round."""
    think = tokenizer.added_tokens["<think>"]
    said, quoted = (tokenizer.encode(text, add_special_tokens=False) for text in ("So.\n\n", opening))
    gate = gate_of(FULL, tokenizer, "<|a|>")
    assert gate is not None
    for token_id in said:
        gate.accept(token_id)
    for _ in range(3):
        for token_id in (*quoted, think):
            gate.accept(token_id)
        assert not thinks(gate)
        gate.rollback(len(quoted) + 1)
        gate.accept(think)
        assert thinks(gate)
        gate.rollback(1)


def test_a_budget_leaves_an_answer_that_names_the_markers(tokenizer: Tokenizer) -> None:
    """The start marker is no thinking there, may come with a budget of nothing, and no end is forced."""
    text = "Put it between `<think>` and `</think>`.\n\n```\n<think>\nhm\n</think>\n```\nMaybe <think> fits."
    for budget in (0, 1, None):
        gate = gate_of(FULL, tokenizer, "<|a|>", budget=budget)
        assert gate is not None
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            assert gate.forced_ids is None
            assert gate.forbidden_id != token_id
            gate.accept(token_id)
        assert (gate.reasoning_tokens, thinks(gate)) == (0, False)
        gate.accept(tokenizer.encode("\n", add_special_tokens=False)[0])
        assert (gate.forbidden_id is None) == (budget != 0)
        gate.accept(tokenizer.added_tokens["<think>"])
        assert thinks(gate) == (budget != 0)


def test_a_token_costs_the_same_in_a_long_answer(tokenizer: Tokenizer) -> None:
    """The place is followed, not the text kept, nor a copy of it made; what is remembered is bounded."""
    ids = tokenizer.encode('So `x` it "is".\n', add_special_tokens=False)
    for constrained in (False, True):
        gate = gate_of(FULL, tokenizer, "<|a|>", budget=5, constrained=constrained)
        assert gate is not None
        counts = [operations(lambda: [gate.accept(one) for _ in range(100) for one in ids]) for _ in range(4)]  # noqa: B023
        assert max(counts[1:]) - min(counts[1:]) <= 20
        assert counts[-1] < 100 * len(ids) * 200
        assert len(pickle.dumps(gate._answer)) < 2000


def test_the_gate_forgets_what_is_far_back(tokenizer: Tokenizer) -> None:
    """Memory is bounded: only so many tokens can be taken back, and asking for more is an error."""
    gate = gate_of(FULL, tokenizer, "<think>")
    assert gate is not None
    for _ in range(MAX_ROLLBACK + 50):
        gate.accept(5)
    gate.rollback(MAX_ROLLBACK)
    assert gate.reasoning_tokens == 50
    with pytest.raises(ValueError, match="cannot take back 1 tokens"):
        gate.rollback(1)


def test_the_gate_needs_no_torch() -> None:
    """An engine process that has not loaded its model yet can import it."""
    code = "import sys, dovetail.grammar.matching.reasoning_gate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Walk:
    """Random replies within a request's masks."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, backend: GrammarBackend) -> None:
        self.tokenizer, self.vocabulary, self.backend = tokenizer, vocabulary, backend
        self.sets = TokenSets(vocabulary)
        marks = {*MARKS, "<think>", "</think>"}
        self.marks = {i for text, i in tokenizer.added_tokens.items() if text in marks}

    def constraint(self, spec: FormatSpec, tail: str, grammar: GrammarSpec | None, **use: Any) -> Constraint:
        gate = gate_of(spec, self.tokenizer, tail, constrained=grammar is not None, **use)
        if grammar is None:
            return Constraint(self.sets, gate, None)
        made = self.backend.compile(grammar, GrammarLimits())
        matcher = (self.backend.load(made) if isinstance(made, bytes) else made).matcher()
        return Constraint(self.sets, gate, matcher, self.backend)

    def run(self, constraint: Constraint, rng: random.Random, most: int = 120) -> list[int]:
        """Tokens up to the end of the reply, which is left out; markers are taken gladly."""
        ids: list[int] = []
        mask = np.zeros((1, self.vocabulary.mask_words), dtype=np.int32)
        while len(ids) < most:
            matcher = constraint.matching
            filled = matcher is not None and matcher.fill(mask, 0)
            allowed = set(range(self.vocabulary.size))
            if constraint.fill(mask[0], filled):
                allowed = set(ids_of(mask[0]))
            assert allowed
            liked = sorted(allowed & self.marks) if rng.random() < 0.3 else []
            token = rng.choice(liked or sorted(allowed))
            if token in self.vocabulary.eos_ids:
                constraint.accept(token)
                return ids
            assert constraint.accept(token) is None
            ids.append(token)
        return ids

    def read(self, spec: FormatSpec, tail: str, ids: list[int]) -> Folded:
        parser = make_parser(spec, self.tokenizer)
        parser.prime(tail)
        return parse_full(parser, ids)


@pytest.fixture(scope="module")
def walk(tokenizer: Tokenizer, vocabulary: Vocabulary, backend: GrammarBackend) -> Walk:
    return Walk(tokenizer, vocabulary, backend)


@pytest.mark.parametrize(
    ("name", "tail"),
    [
        ("harmony", "<|start|>assistant"),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>Hm"),
        ("harmony", "<|start|>assistant<|channel|>final"),
        ("full", ""),
        ("full", "<think>\n"),
        ("text markers", "◁think▷"),
    ],
)
@pytest.mark.parametrize("budget", [None, 0, 4])
def test_the_answer_matches_whatever_is_thought(walk: Walk, name: str, tail: str, budget: int | None) -> None:
    """Random replies within the masks: the parser's content is a text of the grammar, the budget is kept."""
    rng = random.Random(len(name) + len(tail))
    num_ended = 0
    for _ in range(12):
        spec = SPECS[name]
        constraint = walk.constraint(spec, tail, ANSWER, budget=budget)
        ids = walk.run(constraint, rng)
        folded = walk.read(spec, tail, ids)
        if constraint.terminated:
            num_ended += 1
            assert matches(folded.content), (folded, ids)
        gate = constraint.gate
        assert gate is not None
        assert budget is None or gate.reasoning_tokens <= budget
    # Nobody happens to write a marker of many tokens: such thinking ends by its budget.
    assert num_ended >= (8 if budget is not None else name != "text markers")


def matches(text: str | None) -> bool:
    return text is not None and re.fullmatch(ANSWER.source, text.strip()) is not None


@pytest.mark.parametrize(
    ("name", "tail", "after"),
    [
        ("harmony", "<|start|>assistant", "<|end|><|start|>assistant<|channel|>final<|message|>"),
        ("full", "<think>\n", "</think>"),
        ("text markers", "◁think▷", "◁/think▷"),
    ],
)
def test_past_its_budget_thinking_is_closed(walk: Walk, name: str, tail: str, after: str) -> None:
    """Without a grammar, too: the end of thinking is forced, token by token, up to where the answer begins."""
    encode = walk.tokenizer.encode
    constraint = walk.constraint(SPECS[name], tail, None, budget=3)
    opening = "<|channel|>analysis<|message|>abc" if name == "harmony" else "abc"
    for token_id in encode(opening[:-3], add_special_tokens=False):
        constraint.accept(token_id)
    for char in "abc":
        [token_id] = encode(char, add_special_tokens=False)
        assert not constraint.fill(np.zeros(walk.vocabulary.mask_words, dtype=np.int32), False)
        constraint.accept(token_id)
    for token_id in encode(after, add_special_tokens=False):
        row = np.zeros(walk.vocabulary.mask_words, dtype=np.int32)
        assert constraint.fill(row, False)
        assert ids_of(row) == [token_id]
        constraint.accept(token_id)
    assert not constraint.fill(np.zeros(walk.vocabulary.mask_words, dtype=np.int32), False)


def test_past_its_budget_harmony_may_still_call(walk: Walk) -> None:
    """Where there are tools, only the channel of thinking is closed, not that of calls."""
    constraint = walk.constraint(CALLING, "<|start|>assistant", None, budget=0)
    [channel, thinking] = walk.tokenizer.encode("<|channel|>analysis", add_special_tokens=False)[:2]
    row = np.zeros(walk.vocabulary.mask_words, dtype=np.int32)
    assert not constraint.fill(row, False)
    constraint.accept(channel)
    assert constraint.fill(row, False)
    assert set(range(walk.vocabulary.size)) - set(ids_of(row)) == {thinking}


def test_a_format_that_does_not_say_where_it_thinks_is_refused(tokenizer: Tokenizer) -> None:
    """A machine without `messages`, and one whose markers are no tokens, give the request's field and a reason."""
    for spec, vocabulary in ((FormatSpec(machine=HarmonyParser), tokenizer), (HARMONY, byte_fallback())):
        with pytest.raises(RequestError) as caught:
            thinking_of(spec, vocabulary, "<|start|>assistant", ReasoningOptions(param="json_schema"))
        assert (caught.value.param, caught.value.code) == ("json_schema", "unsupported_parameter")


def test_a_budget_needs_thinking(tokenizer: Tokenizer) -> None:
    """Where nothing is known of thinking a budget is refused, and a grammar starts at once."""
    with pytest.raises(RequestError, match="needs a model that thinks"):
        thinking_of(FormatSpec(), tokenizer, "x", ReasoningOptions(budget=3, param="thinking_budget"))
    assert thinking_of(FormatSpec(), tokenizer, "x", ReasoningOptions()) is None
    assert thinking_of(FULL, tokenizer, "<think></think>", ReasoningOptions()) is None
