"""`hermes`: what models write between the markers, well and badly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.contracts.output import Event, FormatSpec, ToolArgs, ToolEnd, ToolStart
from dovetail.plugins.clues import score_of
from dovetail.plugins.registry import Registry
from dovetail.sdk.formats.output import FormatParser, fold
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_parsers.tools.hermes import HermesTools


def parse(body: str, *, size: int = 1 << 20) -> tuple[list[tuple[str, str]], str | None]:
    parser = FormatParser(HermesTools().extend(FormatSpec(), []))
    text = f"<tool_call>{body}</tool_call>"
    events = [event for at in range(0, len(text), size) for event in parser.feed((), text[at : at + size])]
    whole = fold(events + parser.finish("stop"))
    return [(call.name, call.arguments) for call in whole.tool_calls], whole.content


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ('\n{"name": "f", "arguments": {"a": "}\\" {", "b": [[{}]]}}\n', [("f", '{"a": "}\\" {", "b": [[{}]]}')]),
        ('{"arguments":{"a":1},"name":"f"}', [("f", '{"a":1}')]),
        ('{"name": "f"}', [("f", "{}")]),
        ('{"name": "f", "arguments": null}', [("f", "{}")]),
        ('{"name": "f", "arguments": ""}', [("f", "{}")]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", '{"a": 1}')]),
        ('{"name": "f", "arguments": "text"}', [("f", '"text"')]),
        ('{"name": "f", "arguments": 3}', [("f", "3")]),
        ('{"name": "f", "arguments": [1, 2]}', [("f", "[1, 2]")]),
        ('{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
        ('{"id": 7, "type": "function", "name": "f", "arguments": {}, "extra": {"x": []}}', [("f", "{}")]),
        ('{"name": "f", "arguments": {}, "arguments": {"a": 1}}', [("f", "{}")]),
        ('{"name": "nobody_knows", "arguments": {}}', [("nobody_knows", "{}")]),
        ('{"name": "f", "arguments": {}}}', [("f", "{}")]),
        ('{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}', [("f", "{}"), ("g", "{}")]),
        ('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', [("f", "{}"), ("g", "{}")]),
        ('{"name": "d\\u00e9j\\u00e0", "arguments": {"a": "\\u00e9"}}', [("déjà", '{"a": "\\u00e9"}')]),
        ('{"name": "f", "arguments": {"a": "<tool_call> </tool_call>"}}', [("f", '{"a": "<tool_call> </tool_call>"}')]),
    ],
)
def test_calls_are_read(body: str, calls: list[tuple[str, str]], size: int) -> None:
    """Arguments are the model's own bytes; both keys in any order; nested and quoted braces; several calls."""
    assert parse(body, size=size) == (calls, None)


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    "body",
    [
        "\nnot json\n",
        '{"arguments": {"a": 1}}',
        '{"name": 3}',
        '{"name": ""}',
        "{name: f}",
        '{"name" "f"}',
        "[1]",
        "{}",
    ],
)
def test_a_section_without_a_call_comes_back_as_written(body: str, size: int) -> None:
    """What the format does not explain is content, markers included."""
    assert parse(body, size=size) == ([], f"<tool_call>{body}</tool_call>")


@pytest.mark.parametrize(
    ("body", "content"),
    [
        ('{"name": "f", "arguments": {}} and more', "and more"),
        ('{"name": "f", "arguments": {}, oops}', "oops}"),
        ('{"name": "f", "arguments": {}}\n{"oops": 1}', '\n{"oops": 1}'),
    ],
)
def test_what_follows_a_call_in_its_section_is_content(body: str, content: str) -> None:
    """The call is kept, and so is the rest."""
    for size in (1, 1 << 20):
        calls, rest = parse(body, size=size)
        assert calls == [("f", "{}")]
        assert rest is not None
        assert rest.strip() == content.strip()


@pytest.mark.parametrize(
    ("end", "content"), [('"what"', '"what"'), ("'what' ", "'what'"), ('"argum', None), ('"arguments"', None)]
)
def test_a_key_that_ends_a_section_is_content_unless_it_begins_one_of_a_call(end: str, content: str | None) -> None:
    """With its quotes, whether or not a colon was to come."""
    for size in (1, 1 << 20):
        assert parse(f'{{"name": "f", {end}', size=size) == ([("f", "")], content)


def test_arguments_stream_while_they_are_written(tokenizer: Tokenizer) -> None:
    """The name is out before the arguments, each token of the arguments at once, the last brace when it comes."""
    parser = FormatParser(HermesTools().extend(FormatSpec(), []), tokenizer)
    text = '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>'
    events: list[list[Event]] = [parser.feed([one]) for one in tokenizer.encode(text, add_special_tokens=False)]
    (start,) = [event for step in events for event in step if isinstance(event, ToolStart)]
    assert start.id.startswith("call_")
    assert len(start.id) == 29
    pieces = [event.json for step in events for event in step if isinstance(event, ToolArgs)]
    assert pieces == [*'{"city": "Rome"}']
    assert [event for step in events for event in step if isinstance(event, ToolEnd)] == [ToolEnd(0)]


def test_ids_are_unique() -> None:
    """Every call has an id of its own."""
    parser = FormatParser(HermesTools().extend(FormatSpec(), []))
    whole = fold(parser.feed((), '<tool_call>{"name": "f"}</tool_call>' * 50) + parser.finish("stop"))
    assert len({call.id for call in whole.tool_calls}) == 50


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    arguments=st.dictionaries(st.text(max_size=5), json_values, max_size=4),
    name=st.text(min_size=1, max_size=8),
    ascii_only=st.booleans(),
    size=st.integers(1, 9),
)
def test_any_arguments_survive(arguments: dict[str, Any], name: str, ascii_only: bool, size: int) -> None:
    """Whatever JSON a call holds arrives byte for byte."""
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    call = json.dumps(name, ensure_ascii=ascii_only)
    assert parse(f'\n{{"name": {call}, "arguments": {written}}}\n', size=size) == ([(name, written)], None)


@pytest.mark.parametrize(
    ("source", "scores"),
    [
        ("", (0.0, 0.0, 0.0)),
        ('<|im_start|> <think> </think> enable_thinking <tool_call> "arguments"', (0.9, 0.0, 0.9)),
        ("<|im_start|> <tool_call> <function=", (0.0, 0.0, 0.0)),
        ("<\uff5cAssistant\uff5c><think>\\n </think>", (0.0, 0.9, 0.0)),
        ("<\uff5cAssistant\uff5c></think> if thinking", (0.0, 0.3, 0.0)),
    ],
)
def test_templates_are_recognised(source: str, scores: tuple[float, float, float]) -> None:
    """The clues of each parser know the templates of its models."""
    names = [("reasoning_parser", "qwen3"), ("reasoning_parser", "deepseek-r1"), ("tool_parser", "hermes")]
    registry = Registry.scan()
    assert tuple(score_of(registry.resolve(*name).facts.clues, source) for name in names) == scores
