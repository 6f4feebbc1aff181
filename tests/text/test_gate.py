"""The gate: it agrees with the parser at every token, says once when a grammar starts, and takes tokens back."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest

from dovetail.contracts.reasoning import FormatSpec, Markers
from dovetail.contracts.tools import ToolFormat
from dovetail.text.gate import MAX_ROLLBACK, Gate
from dovetail.text.json_calls import JsonCalls
from dovetail.text.output import make_parser
from dovetail.text.tokenizer import Tokenizer
from dovetail_parsers.harmony import HarmonyParser

FULL = FormatSpec(
    reasoning=Markers("<think>", "</think>", ended_by_tools=True),
    tools=ToolFormat("<tool_call>", "</tool_call>", JsonCalls),
)
SPECS = {
    "full": FULL,
    "reasoning": replace(FULL, tools=None),
    "text markers": FormatSpec(reasoning=Markers("◁think▷", "◁/think▷")),
    "plain": FormatSpec(),
    "harmony": FormatSpec(machine=HarmonyParser),
    "harmony with tools": FormatSpec(machine=HarmonyParser, tools=FULL.tools),
}
TAILS = ["", "<|a|><think>\n", "<|a|></think>", "<|start|>assistant", "◁think▷"]
SOUP = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "◁think▷", "◁/think▷", "\n", " ", "a", "why 🎉", "é", "<"),
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>"),
    *("<|channel|>commentary to=functions.f<|message|>", '{"name": "f"}', "<|call|>", "◁", "</thi"),
]


def cases(tokenizer: Tokenizer, count: int, seed: int) -> list[tuple[FormatSpec, str, list[int]]]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        text = "".join(rng.choices(SOUP, k=rng.randrange(12)))
        found.append(
            (rng.choice([*SPECS.values()]), rng.choice(TAILS), tokenizer.encode(text, add_special_tokens=False))
        )
    return found


def signs(gate: Gate) -> tuple[object, ...]:
    return gate.reasoning_tokens, gate.in_reasoning, gate.may_think, gate.answering


def test_gate_and_parser_agree_after_every_token(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    """Over random outputs of every kind of format, with markers as tokens and as text."""
    for tokenizer in (byte_level, byte_fallback):
        for spec, tail, ids in cases(tokenizer, 1500, 5):
            gate, parser = Gate(spec, tokenizer, tail), make_parser(spec, tokenizer)
            parser.prime(tail)
            for token_id in ids:
                gate.accept(token_id)
                parser.feed([token_id])
                assert (gate.reasoning_tokens, gate.in_reasoning) == (parser.reasoning_tokens, parser.in_reasoning)


def test_rollback_restores_what_was(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    """Tokens taken back and others taken instead leave the gate as if the first had never come."""
    rng = random.Random(7)
    for tokenizer in (byte_level, byte_fallback):
        for spec, tail, ids in cases(tokenizer, 400, 9):
            gate = Gate(spec, tokenizer, tail)
            trail = [signs(gate)]
            at = 0
            while at < len(ids):
                for token_id in ids[at : at + rng.randrange(1, 6)]:
                    gate.accept(token_id)
                    trail.append(signs(gate))
                    at += 1
                back = rng.randrange(min(at, 4) + 1)
                gate.rollback(back)
                at -= back
                del trail[at + 1 :]
                assert signs(gate) == trail[at]
                if rng.random() < 0.3:
                    detour = rng.randrange(tokenizer.vocab_size)
                    gate.accept(detour)
                    gate.rollback(1)
                    assert signs(gate) == trail[at]
                for token_id in ids[at : at + 2]:
                    gate.accept(token_id)
                    trail.append(signs(gate))
                    at += 1
            fresh = Gate(spec, tokenizer, tail)
            for token_id in ids:
                fresh.accept(token_id)
            assert signs(fresh) == signs(gate)


@pytest.mark.parametrize(
    ("tail", "text", "starts_behind"),
    [
        ("<think>", "why</think>so", "</think>"),
        ("<think>", "why<tool_call>{}", "<tool_call>"),
        ("", "<think>why</think>so", "</think>"),
        ("", "so", "s"),
        ("", "\n so", "s"),
        ("<think></think>", "so", None),
        ("<think>", "why", None),
    ],
)
def test_a_grammar_starts_once(byte_fallback: Tokenizer, tail: str, text: str, starts_behind: str | None) -> None:
    """Behind the end marker, behind the first token of an answer without thinking, or before any token."""
    ids = [3 + byte for byte in text.encode()]
    gate = Gate(FULL, byte_fallback, tail)
    assert gate.answering is (tail == "<think></think>")
    starts = [at for at, token_id in enumerate(ids) if gate.accept(token_id)]
    expected = [] if starts_behind is None else [text.index(starts_behind) + len(starts_behind) - 1]
    assert starts == expected
    gate.rollback(len(ids))
    assert [at for at, token_id in enumerate(ids) if gate.accept(token_id)] == expected


def test_harmony_starts_with_the_final_message(byte_fallback: Tokenizer) -> None:
    """A preamble is free text; the grammar is for the final answer."""
    text = "<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>so"
    gate = Gate(SPECS["harmony"], byte_fallback, "<|start|>assistant")
    ids = [3 + byte for byte in text.encode()]
    assert [at for at, token_id in enumerate(ids) if gate.accept(token_id)] == [len(text) - 3]


def test_the_gate_forgets_what_is_far_back(byte_level: Tokenizer) -> None:
    """Memory is bounded: only so many tokens can be taken back, and asking for more is an error."""
    gate = Gate(FULL, byte_level, "<think>")
    for _ in range(MAX_ROLLBACK + 50):
        gate.accept(5)
    gate.rollback(MAX_ROLLBACK)
    assert gate.reasoning_tokens == 50
    with pytest.raises(ValueError, match="cannot take back 1 tokens"):
        gate.rollback(1)
    assert Gate(FULL, byte_level).start_ids == (byte_level.added_tokens["<think>"],)


def test_the_gate_needs_no_torch() -> None:
    """An engine process that has not loaded its model yet can import it."""
    code = "import sys, dovetail.text.gate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
