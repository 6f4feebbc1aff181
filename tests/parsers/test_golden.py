"""Every reasoning format with every tool format, in every state, streamed and whole, with tools allowed and not."""

from __future__ import annotations

import sys
from functools import cache
from importlib import metadata
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts.output import ContentDelta, ReasoningDelta, ToolArgs, ToolEnd, ToolStart
from dovetail.messages import Finish
from dovetail.text.parsing.stream import OutputStream
from dovetail.text.tokenizer.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # the table beside this file

from samples import CALLS, CONTENT_FIRST, MACHINES, TAGS, TOOLS, TWO

entry_points = cache(metadata.entry_points)
"""All metadata is read for it, and most tests ask."""

STATES = ("in", "out", "open")
SEPARATORS = {
    "hermes": "\n",
    "minicpm5": "\n",
    "qwen3-coder": "\n",
    "glm45": "\n",
    "deepseek-v32": "\n\n",
    "minimax-m2": "\n",
    "seed-oss": "\n",
    "iquest-q1": "\n",
}
"""What a template puts between an answer and its calls."""
BRACKETED = {("apriel", "pythonic"), ("apriel", "xlam")}
"""Formats that cannot stand beside each other: the one's marker begins with the character that is the other's call."""
WITHOUT_HEADERS = [name for name in CALLS if name not in MACHINES]
IN_TURN = {*zip(cycle(TAGS), WITHOUT_HEADERS), ("gpt-oss", "gpt-oss")}
"""Pairs in which every format stands."""
PAIRS = [
    pytest.param(*pair, marks=() if pair in IN_TURN else pytest.mark.full)
    for pair in [*product(TAGS, WITHOUT_HEADERS), ("gpt-oss", "gpt-oss")]
    if pair not in BRACKETED
]
HEADER = "<|start|>assistant"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


def plugin(group: str, name: str) -> Any:
    (entry,) = entry_points(group=f"dovetail.{group}.v1", name=name)
    return entry.load()()


def written(reasoning: str, state: str) -> tuple[str, str, str | None]:
    """Return what the prompt ends with, the thought as the model writes it from there, and its text."""
    if reasoning == "gpt-oss":
        tail = {"in": HEADER + ANALYSIS, "out": HEADER + FINAL, "open": HEADER}[state]
        if state == "out":
            return tail, "", None
        return tail, (ANALYSIS if state == "open" else "") + "why 🎉<|end|>" + HEADER, "why 🎉"
    start, end, after_start, before_end, after_end, _ = TAGS[reasoning]
    opened = start + after_start
    tail = "<a>" + {"in": opened, "out": opened + before_end + end + after_end, "open": ""}[state]
    if state == "out":
        return tail, "", None
    return tail, (opened if state == "open" else "") + "why 🎉" + before_end + end + after_end, "why 🎉"


def output(reasoning: str, tool: str, state: str, thought: str, *, calls: bool) -> tuple[str, str | None]:
    """Return a whole output and the answer in it."""
    if reasoning == "gpt-oss":
        if not calls:
            return thought + ("" if state == "out" else FINAL) + "so it is", "so it is"
        before = "so it is<|end|>" + HEADER if state == "out" else ""
        return thought + before + CALLS[tool], "so it is" if state == "out" else None
    if not calls:
        return thought + "so it is", "so it is"
    if tool not in CONTENT_FIRST:
        return thought + CALLS[tool], None
    return thought + "so it is" + SEPARATORS.get(tool, "") + CALLS[tool], "so it is"


def run(stream: OutputStream, ids: list[int], size: int) -> list[Any]:
    events = []
    for at in range(0, len(ids), size):
        events += stream.feed_ids(ids[at : at + size], Finish("stop") if at + size >= len(ids) else None)
    return events


@pytest.mark.parametrize(("reasoning", "tool"), PAIRS)
def test_a_reply_and_its_calls(reasoning: str, tool: str, tokenizer: Tokenizer) -> None:
    """In every state, with and without calls, with tools allowed or not, in one piece, in single tokens, in threes."""
    thinker, caller = plugin("reasoning_parsers", reasoning), plugin("tool_parsers", tool)
    for state, has_calls, allowed, size in product(STATES, (True, False), (True, False), (1, 3, 1 << 20)):
        tail, thought, reasoned = written(reasoning, state)
        text, answer = output(reasoning, tool, state, thought, calls=has_calls)
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = OutputStream(
            tokenizer,
            reasoning=thinker,
            tools=caller if allowed else None,
            tool_schemas=TOOLS if allowed else (),
            prompt_tail=tail,
        )
        events = run(stream, ids, size)
        found = [(call.name, call.arguments) for call in stream.tool_calls]
        assert stream.reasoning == reasoned
        assert stream.finish is not None
        if has_calls and allowed:
            assert (stream.content, found) == (answer, [*TWO])
            assert stream.finish.reason == "tool_calls"
        elif has_calls:
            assert found == []
            assert (stream.content or "").startswith(answer or "")
            assert "Rom, " in (stream.content or "")
            assert stream.finish.reason == "stop"
        else:
            assert (stream.content, found, stream.finish.reason) == (answer, [], "stop")
        check_events(events, stream)


def check_events(events: list[Any], stream: OutputStream) -> None:
    """What was streamed adds up to the whole, and calls are well-formed."""
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == (stream.reasoning or "")
    assert "".join(e.text for e in events if isinstance(e, ContentDelta)) == (stream.content or "")
    for index, call in enumerate(stream.tool_calls):
        (start,) = [e for e in events if isinstance(e, ToolStart) and e.index == index]
        assert (start.name, start.id) == (call.name, call.id)
        assert "".join(e.json for e in events if isinstance(e, ToolArgs) and e.index == index) == call.arguments
        assert events.count(ToolEnd(index)) == 1


@pytest.mark.parametrize(
    "reasoning", [name for name in TAGS if name in ("qwen3", "qwen3-thinking", "kimi-k2", "glm45", "mistral")]
)
def test_a_tool_marker_ends_thinking_where_the_format_says_so(reasoning: str, tokenizer: Tokenizer) -> None:
    """The call is found although the thought was never closed."""
    tool = {"kimi-k2": "kimi-k2", "glm45": "glm45", "mistral": "mistral"}.get(reasoning, "hermes")
    start, _, after_start, before_end, _, _ = TAGS[reasoning]
    ids = tokenizer.encode("why" + before_end + CALLS[tool], add_special_tokens=False)
    stream = OutputStream(
        tokenizer,
        reasoning=plugin("reasoning_parsers", reasoning),
        tools=plugin("tool_parsers", tool),
        tool_schemas=TOOLS,
        prompt_tail=start + after_start,
    )
    run(stream, ids, 1)
    assert (stream.reasoning, stream.content) == ("why", None)
    assert [(call.name, call.arguments) for call in stream.tool_calls] == [*TWO]


@pytest.mark.parametrize("reasoning", TAGS)
def test_thinking_that_goes_on_to_its_end_after_a_call(reasoning: str, tokenizer: Tokenizer) -> None:
    """A call that is followed by the end of thinking and an answer was thought about; the end counts once."""
    start, end, after_start, _, after_end, _ = TAGS[reasoning]
    ids = tokenizer.encode(f"hm{CALLS['hermes']}{end}{after_end}so {end}", add_special_tokens=False)
    stream = OutputStream(
        tokenizer,
        reasoning=plugin("reasoning_parsers", reasoning),
        tools=plugin("tool_parsers", "hermes"),
        prompt_tail=start + after_start,
    )
    run(stream, ids, 2)
    assert (stream.reasoning, stream.content) == (f"hm{CALLS['hermes']}", f"so {end}")
    assert not stream.tool_calls
