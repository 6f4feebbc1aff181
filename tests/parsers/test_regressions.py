"""Mistakes that others made in public, and those that the parsers must never make: one case each.

Issues are named by project and number; the cases are our own.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import metadata
from typing import Any

import pytest

from dovetail.contracts.output import ContentDelta, Event, FormatSpec, ReasoningDelta, ToolArgs, ToolStart
from dovetail.contracts.reasoning import ParserRequest
from dovetail.messages import Finish
from dovetail.sdk.formats.output import FormatParser, fold, make_parser
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.parsing.stream import NoTemplate, OutputStream
from dovetail.text.tokenizer.tokenizer import Tokenizer

entry_points = cache(metadata.entry_points)
"""All metadata is read for it, and most tests ask."""

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "ends with </think> or <tool_call>", "parameters": {"type": "object"}},
}


def spec_of(reasoning: str | None, tools: str | None, tokenizer: Tokenizer) -> FormatSpec:
    spec = FormatSpec()
    if reasoning is not None:
        (entry,) = entry_points(group="dovetail.reasoning_parsers.v1", name=reasoning)
        spec = entry.load()().spec(tokenizer, NoTemplate(), ParserRequest())
    if tools is not None:
        (entry,) = entry_points(group="dovetail.tool_parsers.v1", name=tools)
        spec = entry.load()().extend(spec, [TOOL])
    return spec


def parse(
    text: str,
    tokenizer: Tokenizer,
    *,
    reasoning: str | None = "qwen3",
    tools: str | None = "hermes",
    tail: str = "<|im_start|>assistant\n",
    reason: str = "stop",
) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    """Parse as text and as tokens, whole and cut everywhere; all must agree."""
    spec = spec_of(reasoning, tools, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    results = []
    for whole, vocabulary in ((text, None), (ids, tokenizer)):
        for size in (1, 2, 5, 1 << 20):
            parser = make_parser(spec, vocabulary)
            parser.prime(tail)
            events: list[Event] = []
            for at in range(0, len(whole), size):
                piece: Any = whole[at : at + size]
                events += parser.feed((), piece) if vocabulary is None else parser.feed(piece)
            reply = fold(events + parser.finish(reason))
            results.append((reply.reasoning, reply.content, [(c.name, c.arguments) for c in reply.tool_calls]))
    assert all(result == results[0] for result in results)
    return results[0]


def test_text_before_thinking_is_content_in_every_chunking(tokenizer: Tokenizer) -> None:
    """sglang #35083: four different answers by chunking. One here: what stands before the marker is content."""
    assert parse("Sure. <think>\nwhy\n</think>\n\nso", tokenizer) == ("why", "Sure. so", [])


def test_reasoning_and_content_in_one_delta(tokenizer: Tokenizer) -> None:
    """vllm #43933: a delta that ends thinking and begins the answer gives both parts, in order."""
    parser = FormatParser(spec_of("qwen3", None, tokenizer), tokenizer)
    parser.prime("<think>\n")
    events = parser.feed(tokenizer.encode("why\n</think>\n\nso", add_special_tokens=False))
    assert events == [ReasoningDelta("why", 4), ContentDelta("so")]


def test_calls_stream_without_thinking(tokenizer: Tokenizer) -> None:
    """vllm #17655: with thinking closed in the prompt, a streamed call was lost."""
    tail = "<think>\n\n</think>\n\n"
    assert parse(CALL, tokenizer, tail=tail) == (None, None, [("f", '{"a": 1}')])
    assert parse("<think>x</think>" + CALL, tokenizer, tail=tail)[2] == [("f", '{"a": 1}')]


@pytest.mark.parametrize("place", ["user", "history", "schema", "system"])
def test_markers_in_the_prompt_mean_nothing(place: str, tokenizer: Tokenizer) -> None:
    """vllm PR 36224: `</think>` in a user's message, in history or in a tool's schema began the answer."""
    messages = [{"role": "user", "content": "what is </think>?" if place == "user" else "hi"}]
    if place == "history":
        messages = [*messages, {"role": "assistant", "content": "it is </think> <tool_call>"}, *messages]
    if place == "system":
        messages = [{"role": "system", "content": "close with </think>"}, *messages]
    chat = ChatTemplate.load(tokenizer.files, "qwen3-thinking")
    tail = chat.render(messages, tools=[TOOL] if place == "schema" else None).tail
    assert parse("why\n</think>\n\nso", tokenizer, tail=tail) == ("why", "so", [])


def test_an_empty_thinking_block_is_null(tokenizer: Tokenizer) -> None:
    """Absent parts are null, never empty text."""
    for text in ("<think>\n\n</think>\n\nso", "<think></think>so", "<think>\n</think>\n\nso"):
        assert parse(text, tokenizer) == (None, "so", [])
    assert parse("<think>\n\n</think>\n\n", tokenizer) == (None, None, [])


def test_the_end_of_thinking_and_a_call_in_one_delta(tokenizer: Tokenizer) -> None:
    """Both are acted on."""
    assert parse(f"why\n</think>\n\n{CALL}", tokenizer, tail="<think>\n") == ("why", None, [("f", '{"a": 1}')])


def test_a_call_inside_thinking(tokenizer: Tokenizer) -> None:
    """It ends the thought."""
    for reasoning in ("qwen3", "deepseek-r1", "minimax-m2"):
        found = parse(f"why\n{CALL} so", tokenizer, reasoning=reasoning, tail="<think>\n")
        assert found == ("why", " so", [("f", '{"a": 1}')])


def test_a_missing_end_tag(tokenizer: Tokenizer) -> None:
    """Of thinking: all is thought. Of a call: the call stands, whether the model stopped or was cut off."""
    assert parse("why", tokenizer, tail="<think>\n", reason="length") == ("why", None, [])
    for reason in ("stop", "length"):
        assert parse(CALL.removesuffix("\n</tool_call>"), tokenizer, reason=reason)[2] == [("f", '{"a": 1}')]


def test_no_tags_at_all(tokenizer: Tokenizer) -> None:
    """Content in state OPEN, reasoning in state IN."""
    assert parse("so it is", tokenizer) == (None, "so it is", [])
    assert parse("so it is", tokenizer, tail="<think>\n") == ("so it is", None, [])


def test_the_last_brace_arrives_alone(tokenizer: Tokenizer) -> None:
    """The pieces of the arguments add up whatever their sizes, and the last brace comes when it is written."""
    parser = FormatParser(spec_of(None, "hermes", tokenizer))
    start = '<tool_call>{"name": "f", "arguments": {"a": {"b": 1}'
    pieces = [e.json for e in parser.feed((), start) if isinstance(e, ToolArgs)]
    assert pieces == ['{"a": {"b": 1}']
    assert [e.json for e in parser.feed((), "}") if isinstance(e, ToolArgs)] == ["}"]
    assert [e for e in parser.feed((), "}\n</tool_call>") if isinstance(e, ToolArgs)] == []


@pytest.mark.parametrize(
    "value", ['{"a": "{\\"b\\": \\"}\\"}"}', '{"a": "]}</tool_call>"}', '{"a": "\\\\"}', '{"é": "中🎉"}']
)
def test_nested_json_in_strings(value: str, tokenizer: Tokenizer) -> None:
    """Braces, quotes and backslashes in strings are not structure; the text passes byte for byte."""
    call = f'<tool_call>\n{{"name": "f", "arguments": {value}}}\n</tool_call>'
    assert parse(call, tokenizer) == (None, None, [("f", value)])
    parser = make_parser(spec_of(None, "hermes", tokenizer))
    assert [e.name for e in parser.feed((), call) if isinstance(e, ToolStart)] == ["f"]


@pytest.mark.parametrize(
    "value", ["a </parameter> b", "</parameter>", "<parameter=x>", "</function>", "x\n</parameter>\ny"]
)
def test_parameters_that_look_like_tags(value: str, tokenizer: Tokenizer) -> None:
    """A closing tag counts only where what follows it can follow it."""
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    calls = parse(text, tokenizer, tools="qwen3-coder")[2]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", {"a": value})]


def test_unknown_names_and_arguments_that_are_no_object(tokenizer: Tokenizer) -> None:
    """They are surfaced as written: the client can answer them, nobody else can."""
    for value in ("[1, 2]", "3", '"text"', "true"):
        call = f'<tool_call>{{"name": "nobody", "arguments": {value}}}</tool_call>'
        assert parse(call, tokenizer)[2] == [("nobody", value)]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json",
        " to=functions.f<|channel|>commentary json",
        " to=functions.f<|channel|>analysis code",
        "<|channel|>analysis to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>commentary to=functions.f",
        "<|channel|>commentary<|channel|>commentary to=functions.f json",
        "<|channel|>to=functions.f json",
        "commentary to=functions.f",
    ],
)
def test_harmony_calls_in_every_header(header: str, tokenizer: Tokenizer) -> None:
    """The recipient in the role part, calls on analysis, a missing `<|constrain|>`, headers out of shape."""
    found = parse(
        f'{header}<|message|>{{"a": 1}}<|call|>',
        tokenizer,
        reasoning="gpt-oss",
        tools="gpt-oss",
        tail="<|start|>assistant",
    )
    assert found == (None, None, [("f", '{"a": 1}')])


def test_harmony_headers_that_are_none(tokenizer: Tokenizer) -> None:
    """Text where a header should be is content, never lost and never an exception."""
    harmony = {"reasoning": "gpt-oss", "tools": "gpt-oss", "tail": "<|start|>assistant"}
    for text in (
        "Hello there",
        "Hello <|mess",
        "analysis of data",
        "<|channel|>The end<|return|>",
        "<|message|>",
        "<|end|><|end|>",
        "<|start|>",
    ):
        content = parse(text, tokenizer, **harmony)[1] or ""
        bare = text
        for marker in ("<|message|>", "<|end|>", "<|start|>", "<|return|>"):
            bare = bare.replace(marker, "")
        assert content == bare


def test_harmony_text_behind_a_recipient(tokenizer: Tokenizer) -> None:
    """What touches a recipient and is none of it is content; a marker that is cut off there is not."""
    harmony = {"reasoning": "gpt-oss", "tools": "gpt-oss", "tail": "<|start|>assistant"}
    text = '<|channel|>commentary to=functions.f</x>w0w<|message|>{"a": 1}<|call|>'
    _, content, calls = parse(text, tokenizer, **harmony)
    assert content is not None
    assert "</x>w0w" in content
    assert calls == [("f", '{"a": 1}')]
    for end in ("", "<", "<|", "<|mess", "<|message|"):
        assert parse(f"<|channel|>commentary to=functions.f{end}", tokenizer, **harmony)[:2] == (None, None)


def test_harmony_goes_on_with_a_recipient(tokenizer: Tokenizer) -> None:
    """What goes on with a recipient that the prompt began is part of it, and of nothing else."""
    tail = "<|start|>assistant<|channel|>commentary to=functions.get"
    text = '_weather<x<|message|>{"a": 1}<|call|>'
    _, content, calls = parse(text, tokenizer, reasoning="gpt-oss", tools="gpt-oss", tail=tail)
    assert (content, calls) == ("<x", [("get_weather", '{"a": 1}')])


def test_half_a_character_at_the_end(tokenizer: Tokenizer) -> None:
    """A reply cut inside a character shows a replacement character, in the part where it stands."""
    ids = tokenizer.encode("<think>\n🎉", add_special_tokens=False)[:-2]
    stream = OutputStream(tokenizer, prompt_tail="", reasoning=None)
    stream.feed_ids(ids, Finish("length"))
    assert stream.content == "<think>\n\ufffd"


def test_a_surrogate_escaped_into_a_name_can_be_sent(tokenizer: Tokenizer) -> None:
    """JSON can spell half of a surrogate pair; what reaches the client is text all the same."""
    calls = parse('<tool_call>{"name": "f\\ud800", "arguments": {}}</tool_call>', tokenizer)[2]
    assert calls == [("f?", "{}")]
    calls = parse("[f(a='\\ud83d\\ude00\\ud800')]", tokenizer, reasoning=None, tools="pythonic", tail="")[2]
    assert json.loads(calls[0][1]) == {"a": "😀\ufffd"}


@pytest.mark.parametrize("answer", ["", "["])
def test_a_marker_hides_no_character_that_opens_a_call(answer: str, tokenizer: Tokenizer) -> None:
    """A bare list is a call also where markers of thinking begin with the same bracket."""
    text = f'[THINK]why[/THINK]{answer}[{{"name": "f", "arguments": {{"a": 1}}}}]'
    assert parse(text, tokenizer, reasoning="mistral", tools="xlam", tail="") == ("why", None, [("f", '{"a": 1}')])


@pytest.mark.parametrize("answer", ["[T", "[THINK", "[[THINK]", " \n[/TH", "[[/THINK"])
def test_half_a_marker_is_text_where_a_bare_call_may_stand(answer: str, tokenizer: Tokenizer) -> None:
    """It is read as what a bare call begins with, in every chunking, and is shown as none follows."""
    found = parse(f"[THINK]why[/THINK]{answer} so", tokenizer, reasoning="mistral", tools="xlam", tail="")
    assert found[0] == "why"
    assert (found[1] or "").strip() == f"{answer} so".strip()


K3 = "<|open|>response<|sep|>so<|close|>response<|sep|><|close|>message<|sep|>"


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize(
    ("reasoning", "caller", "tail", "text"),
    [
        ("kimi-k3", "kimi-k3", "<|open|>think<|sep|>", f"why{K3}"),
        ("kimi-k3", "kimi-k3", "<|open|>think<|sep|>", f"why<|close|>message<|sep|>{K3}"),
        ("solar", "solar", "<|think|>", "why<|begin|>assistant<|content|>so<|end|>"),
        ("solar", "solar", "", "<|think|>why<|end|><|begin|>assistant<|content|>so<|end|>"),
        ("cohere-command3", "cohere-command", "<|START_THINKING|>", "why<|START_RESPONSE|>so<|END_RESPONSE|>"),
        ("cohere-command4", "cohere-command", "<|START_THINKING|>", "why<|START_TEXT|>so<|END_TEXT|>"),
    ],
)
def test_an_answer_ends_thinking(
    reasoning: str, caller: str, tail: str, text: str, tools: bool, tokenizer: Tokenizer
) -> None:
    """A model that goes to the answer's marker without closing its thinking answers; no marker leaks beside tools."""
    found = parse(text, tokenizer, reasoning=reasoning, tools=caller if tools else None, tail=tail)
    assert found == ("why", "so", [])


def test_an_answer_inside_thinking_leaves_the_calls(tokenizer: Tokenizer) -> None:
    """Kimi-K3 at times writes an empty response in its thinking, and then calls: nothing of it is reasoning."""
    call = '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>'
    text = f"<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>{call}<|close|>tools<|sep|>"
    found = parse(text, tokenizer, reasoning="kimi-k3", tools="kimi-k3", tail="<|open|>think<|sep|>")
    assert found == (None, None, [("f", "{}")])


@pytest.mark.parametrize("section_end", ["", "\n</tool_call>"])
def test_a_call_in_thinking_counts_where_nothing_follows_it(section_end: str, tokenizer: Tokenizer) -> None:
    """Where an answer or a call follows the end of thinking, it was thought about."""
    call = CALL.removesuffix("\n</tool_call>") + section_end
    made = ("f", '{"a": 1}')
    assert parse(f"why\n{call}", tokenizer, tail="<think>\n") == ("why", None, [made])
    assert parse(f"why\n{call}\n</think>\n\n", tokenizer, tail="<think>\n") == ("why", None, [made])
    for behind, content, calls in (("so", "so", []), (CALL, None, [made])):
        found = parse(f"why\n{call}\n</think>\n\n{behind}", tokenizer, tail="<think>\n")
        assert found == (f"why\n{call}", content, calls)


def test_newlines_before_a_call_are_dropped_in_thinking_too(tokenizer: Tokenizer) -> None:
    """As many as the format has before a call; before the end of thinking only its own."""
    dsml = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    found = parse(f"why\n\n\n{dsml}", tokenizer, reasoning="deepseek-v3", tools="deepseek-v4", tail="<think>")
    assert found == ("why\n", None, [("f", "{}")])
    found = parse("why\n\n\n</think>so", tokenizer, reasoning="deepseek-v3", tools="deepseek-v4", tail="<think>")
    assert found == ("why\n\n\n", "so", [])


@pytest.mark.parametrize(
    ("reasoning", "marker"),
    [
        ("qwen3", "<tool_call>"),
        ("qwen3-thinking", "<tool_call>"),
        ("glm45", "<tool_call>"),
        ("kimi-k2", "<|tool_calls_section_begin|>"),
    ],
)
def test_what_begins_a_call_ends_thinking_where_calls_are_not_looked_for(
    reasoning: str, marker: str, tokenizer: Tokenizer
) -> None:
    """A client that reads calls itself finds them in the content, whole."""
    found = parse(f"why\n\n{marker}f", tokenizer, reasoning=reasoning, tools=None, tail="<think>")
    assert found == ("why\n\n", f"{marker}f", [])


def test_elements_in_one_another_without_end_are_linear(tokenizer: Tokenizer) -> None:
    """Elements deeper than any schema are text, and none of them is lost."""
    mark = "]<]minimax[>["
    depth = 20_000
    text = f'{mark}<tool_call>{mark}<invoke name="f">' + f"{mark}<a>" * depth
    parser = make_parser(spec_of("minimax-m3", "minimax-m3", tokenizer))
    reply = fold([*parser.feed((), text), *parser.finish("stop")])
    (call,) = reply.tool_calls
    assert call.arguments.count("<a>") + call.arguments.count('"a"') + (reply.content or "").count("<a>") == depth


def test_a_recipient_that_is_no_name_is_not_lost(tokenizer: Tokenizer) -> None:
    """Beam's tags are arguments of a tool; behind what cannot be one the text passes, and the recipient with it."""
    text = "w[[<|channel|>analysis <|constrain|>xml<|message|>so<|call|>"
    found = parse(text, tokenizer, reasoning="gpt-oss", tools="beam", tail="<|start|>assistant to=find,")
    assert found == (None, None, [("find,w[[", "so")])


@pytest.mark.parametrize("size", [100, 300, 2000])
def test_long_noise_before_a_call_is_the_same_in_every_chunking(size: int, tokenizer: Tokenizer) -> None:
    """It comes with the markers in it if it is long, whether the call is in the same piece or not."""
    begin, end = "<|plamo:begin_tool_request:plamo|>", "<|plamo:end_tool_arguments:plamo|>"
    name = "<|plamo:begin_tool_name:plamo|>f<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
    noise = f"{begin}no name{'?' * size}{end}{'?' * 300}"
    text = f"<|plamo:begin_tool_requests:plamo|>{noise}{begin}{name}<|plamo:constrain|>json<|plamo:msg|>{{}}{end}"
    _, content, calls = parse(text, tokenizer, reasoning=None, tools="plamo3")
    assert calls == [("f", "{}")]
    assert content is not None
    assert (end in content) == (size + 300 > 512)
    assert content.count("?") == size + 300


@pytest.mark.parametrize("text", [" to=self<|meaw0wge|>why", " to=self<|me<b>w0w"])
def test_text_behind_a_recipient_of_muse_is_not_lost(text: str, tokenizer: Tokenizer) -> None:
    """A header that is none is content; half a marker at the end of one is not."""
    assert parse(text, tokenizer, reasoning="muse", tools="muse")[:2] == (None, text)
    assert parse(" to=self<|mess", tokenizer, reasoning="muse", tools="muse")[:2] == (None, None)


@pytest.mark.parametrize(
    ("tools", "opening"),
    [("xlam", "["), ("phi4-mini-json", "functools["), ("granite", "<|tool_call|>["), ("llama3", "")],
)
@pytest.mark.parametrize("closing", ["]", " ,\n ] ", "}]"])
def test_the_end_of_a_list_of_calls_is_no_content(tools: str, opening: str, closing: str, tokenizer: Tokenizer) -> None:
    """What follows the list is."""
    key = "parameters" if tools == "llama3" else "arguments"
    text = f'{opening}{{"name": "f", "{key}": {{}}}}{closing}\nSo [it] is.'
    _, content, calls = parse(text, tokenizer, reasoning=None, tools=tools)
    assert calls == [("f", "{}")]
    assert content is not None
    assert content.strip() == "So [it] is."


@pytest.mark.parametrize(
    ("tools", "noise"),
    [
        ("dots", '<dots_function_call><<invoke name=f>o<invoke name=f></invoke>'),
        ("minimax-m2", '<minimax:tool_call><invoke name="r">c<invoke name="f"></invoke>'),
        ("qwen3-coder", f"<tool_call><function={'g' * 600}<function=f></function>"),
    ],
)  # fmt: skip
def test_noise_before_a_call_ends_at_its_mark_in_every_chunking(tools: str, noise: str, tokenizer: Tokenizer) -> None:
    """Where it stands in one piece with the noise, too."""
    _, content, calls = parse(noise, tokenizer, reasoning=None, tools=tools)
    assert [name for name, _ in calls] == ["f"]
    assert content


def test_what_stands_beside_the_arguments_of_an_unknown_tool_is_not_lost(tokenizer: Tokenizer) -> None:
    """A call of it counts where it ends, and text in it is content."""
    text = "<iquest_tool_call>r<arg_key>half a key"
    _, content, calls = parse(text, tokenizer, reasoning=None, tools="iquest-q1")
    assert (content, calls) == ("<arg_key>half a key", [("r", "{}")])
