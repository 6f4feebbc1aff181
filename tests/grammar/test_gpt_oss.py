"""Grammars, budgets and tools with harmony, end to end: a random model that writes gpt-oss's tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from dovetail import LLM, SamplingParams
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_parsers.harmony import MARKS
from dovetail_server.bench.grammar_folder import CONFIG
from dovetail_testing.vocabularies import write_tokenizer

ASK = [{"role": "user", "content": "Which city?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA, "strict": True}}]
NAMED = {"type": "function", "function": {"name": "look_up"}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_tokenizer(tmp_path_factory.mktemp("harmony"), added=[*MARKS])
    tokenizer = Tokenizer.load(folder)
    ends = [tokenizer.added_tokens[mark] for mark in ("<|return|>", "<|call|>")]
    config = {**CONFIG, "vocab_size": tokenizer.vocab_size, "eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with LLM(
        str(folder), load_format="dummy", chat_template="gpt-oss", device="cpu", max_total_tokens=32768, random_seed=1
    ) as made:
        yield made


def ask(llm: LLM, *, num: int = 6, tools: Any = None, choice: Any = "auto", **params: Any) -> list[Any]:
    wanted = [SamplingParams(**{"max_tokens": 300, "temperature": 1.0, "seed": i, **params}) for i in range(num)]
    return llm.chat([ASK] * num, wanted, tools=tools, tool_choice=choice, use_tqdm=False)


@pytest.mark.parametrize("budget", [0, 5])
def test_a_schema_holds_for_the_final_channel(llm: LLM, budget: int) -> None:
    """Whatever is thought, the answer conforms; the budget closes the thinking, of a model that never would."""
    for reply in ask(llm, json_schema=SCHEMA, thinking_budget=budget):
        assert reply.finish_reason == "stop", reply.message
        jsonschema.validate(json.loads(reply.text), SCHEMA)
        assert reply.grammar.valid is True
        assert reply.reasoning_tokens <= budget


def test_without_a_budget_thinking_is_free(llm: LLM) -> None:
    """The model thinks as long as it likes; nothing is answered before the channel is closed."""
    for reply in ask(llm, regex="[A-Z]{3}", max_tokens=60):
        assert re.fullmatch("[A-Z]{3}", reply.text) or (reply.finish_reason == "length" and reply.text == "")


def test_a_budget_works_alone(llm: LLM) -> None:
    """Without a grammar: the channel of thinking is closed and the final one opened; the answer is free."""
    for reply in ask(llm, thinking_budget=3, max_tokens=60):
        assert reply.reasoning_tokens <= 3


@pytest.mark.first(1)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_required_calls_are_made(llm: LLM, choice: Any) -> None:
    """A call that must be made is made on its channel, with conforming arguments, and ends the reply."""
    for reply in ask(llm, tools=TOOLS, choice=choice, thinking_budget=4, max_tokens=300):
        if reply.finish_reason == "length":
            continue  # a preamble may be as long as it likes
        [call] = reply.tool_calls
        assert call.name == "look_up"
        jsonschema.validate(json.loads(call.arguments), SCHEMA)


def test_strict_tools_leave_the_choice(llm: LLM) -> None:
    """Under `auto` the reply is an answer or a conforming call, never a call of anything else."""
    kinds = set()
    for reply in ask(llm, num=24, tools=TOOLS, thinking_budget=0, max_tokens=80):
        for call in reply.tool_calls:
            assert call.name == "look_up"
            if reply.finish_reason != "length":
                jsonschema.validate(json.loads(call.arguments), SCHEMA)
        kinds.add(bool(reply.tool_calls))
    assert kinds == {False, True}
