"""`OutputStream`: what the server and the offline LLM see of a choice."""

from __future__ import annotations

import random
from importlib.metadata import entry_points
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.contracts.output import (
    ContentDelta,
    Event,
    FormatSpec,
    Malformed,
    Markers,
    ReasoningDelta,
    TemplateView,
    TokenizerView,
    ToolArgs,
    ToolFormat,
    ToolStart,
)
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.contracts.tools import ToolParser
from dovetail.messages import Finish, TokenDelta
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail.text.parsing.stream import OutputStream
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_testing.vocabularies import byte_level

CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>'


class Think(ReasoningParser):
    """The smallest reasoning parser."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        return FormatSpec(reasoning=Markers("<think>", "</think>", ended_by_tools=True))


class Calls(ToolParser):
    """The smallest tool parser."""

    def extend(self, spec: FormatSpec, tools: Any) -> FormatSpec:
        return FormatSpec(reasoning=spec.reasoning, tools=ToolFormat("<tool_call>", "</tool_call>", JsonCalls))


def run(
    tokenizer: Tokenizer, text: str, *, size: int = 1, eos: bool = True, parse: bool = True, **options: Any
) -> tuple[OutputStream, list[Event]]:
    """Stream a text in deltas of `size` tokens, then end it with the eos token or by length."""
    if parse:
        options = {"reasoning": Think(), "tools": Calls(), "prompt_tail": "", **options}
    stream = OutputStream(tokenizer, **options)
    ids = tokenizer.encode(text, add_special_tokens=False)
    end = tokenizer.eos_token_ids[0]
    finish = Finish("stop", end) if eos else Finish("length")
    ids += [end] if eos else []
    events: list[Event] = []
    for begin in range(0, len(ids), size):
        last = begin + size >= len(ids)
        events += stream.feed(TokenDelta(handle=1, ids=ids[begin : begin + size], finish=finish if last else None))
    return stream, events


def folded(events: list[Event]) -> tuple[str, str, dict[int, list[str]]]:
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    calls: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, ToolStart):
            calls[event.index] = [event.name, ""]
        elif isinstance(event, ToolArgs):
            calls[event.index][1] += event.json
    return reasoning, content, calls


def test_plain_text_is_all_content(byte_level: Tokenizer) -> None:
    """Without parsers markers are text, and the stop token gives none."""
    text = "<think>x</think> élève 🎉"
    stream, events = run(byte_level, text, parse=False)
    assert folded(events) == ("", text, {})
    assert (stream.text, stream.content, stream.reasoning, stream.tool_calls) == (text, text, None, [])
    assert stream.finish is not None
    assert (stream.finish.reason, stream.finish.matched) == ("stop", byte_level.eos_token_ids[0])
    assert stream.num_tokens == len(byte_level.encode(text, add_special_tokens=False)) + 1
    assert stream.feed_ids([1], Finish("length")) == []


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("stop", [(), ("is.\n", "zzz"), ("why",), ("Rome",), ("so\n", "o\nit"), ("🎉",)])
def test_events_and_attributes_agree(byte_level: Tokenizer, size: int, stop: tuple[str, ...]) -> None:
    """The events' fold is the reply that the attributes hold, for any delta size; a stop string cuts only content."""
    text = f"<think>\nwhy 🎉\n</think>\n\nso\nit is.\n中🎉\n{CALL}"
    stream, events = run(byte_level, text, size=size, stop=stop)
    calls = {at: [call.name, call.arguments] for at, call in enumerate(stream.tool_calls)}
    assert folded(events) == (stream.reasoning or "", stream.content or "", calls)
    assert stream.reasoning == "why 🎉"
    expected = {"is.\n": "so\nit ", "so\n": "", "🎉": "so\nit is.\n中"}.get(stop[0] if stop else "", "so\nit is.\n中🎉")
    assert stream.text == expected
    assert len(stream.tool_calls) == (0 if expected != "so\nit is.\n中🎉" else 1)
    assert not any(isinstance(event, Malformed) for event in events)


def test_usage_ends_with_the_token_that_completes_a_stop_string(byte_level: Tokenizer) -> None:
    """However many tokens a delta brings, those after the stop string do not count."""
    ids = byte_level.encode("the fox thinks about Paris", add_special_tokens=False)
    text = ""
    expected = 0
    while "thin" not in text:
        expected += 1
        text = byte_level.decode(ids[:expected], skip_special_tokens=True)
    for size in (1, 3, 100):
        stream, _ = run(byte_level, "the fox thinks about Paris", size=size, parse=False, stop=["thin"])
        assert (stream.num_tokens, stream.token_ids, stream.text) == (expected, ids[:expected], "the fox ")
        assert stream.finish is not None
        assert (stream.finish.reason, stream.finish.matched) == ("stop", "thin")


def test_a_stop_string_fires_though_its_end_is_held_back(byte_level: Tokenizer) -> None:
    """A newline that may belong to a tool call ends the choice at once if it completes a stop string."""
    stream, events = run(byte_level, "so\n\nit is", stop=["\n\n"])
    assert (stream.text, folded(events)[1]) == ("so", "so")
    shown = byte_level.decode(stream.token_ids, skip_special_tokens=True)
    assert shown.endswith("\n\n")


@pytest.mark.parametrize(("keep", "text"), [(False, "the "), (True, "the quick")])
def test_no_stop_trim_keeps_the_stop_string(byte_level: Tokenizer, keep: bool, text: str) -> None:
    """The matched string is cut off, or stays with nothing behind it."""
    for size in (1, 50):
        stream, events = run(byte_level, "the quick fox", size=size, parse=False, stop=["quick"], no_stop_trim=keep)
        assert (stream.text, folded(events)[1]) == (text, text)


def test_no_stop_trim_shows_the_stop_token(byte_level: Tokenizer) -> None:
    """The stop token's text appears if asked for; as a special token only if those are shown too."""
    for trim, skip, text in (
        (False, True, "so"),
        (False, False, "so"),
        (True, True, "so"),
        (True, False, "so<|im_end|>"),
    ):
        stream, _ = run(byte_level, "so", parse=False, no_stop_trim=trim, skip_special_tokens=skip)
        assert stream.text == text


def test_stop_strings_wait_for_min_tokens(byte_fallback: Tokenizer) -> None:
    """A stop string before `min_tokens` does not count."""
    stream = OutputStream(byte_fallback, stop=["a"], min_tokens=4)
    ids = [3 + byte for byte in b"aabaca"]
    stream.feed_ids(ids)
    assert (stream.text, stream.num_tokens) == ("aab", 4)


@given(
    cuts=st.lists(st.integers(1, 4), max_size=30), stops=st.lists(st.text("abc\n", min_size=1, max_size=3), max_size=3)
)
def test_stop_strings_give_the_same_for_any_delta_size(
    byte_fallback: Tokenizer, cuts: list[int], stops: list[str]
) -> None:
    """Text, ids and the reason do not depend on how the engine groups tokens."""
    rng = random.Random(len(cuts))
    ids = [3 + rng.choice(b"abc\n") for _ in range(40)]
    results = set()
    for sizes in ([1] * 40, [40], cuts):
        stream = OutputStream(byte_fallback, stop=stops, reasoning=Think(), tools=Calls(), prompt_tail="</think>")
        rest = ids
        for size in [*sizes, 40]:
            stream.feed_ids(rest[:size])
            rest = rest[size:]
        stream.feed_ids([], Finish("length"))
        results.add((stream.text, tuple(stream.token_ids), stream.finish))
    assert len(results) == 1


def test_reasoning_joins_content_as_written(byte_level: Tokenizer) -> None:
    """`separate_reasoning` false gives the model's text back; calls are parsed, and content alone stops."""
    text = f"<think>\nwhy\n\n</think>\n\nso it is\n{CALL}"
    plain, events = run(byte_level, text, separate_reasoning=False)
    assert plain.content == folded(events)[1] == "<think>\nwhy\n\n</think>\n\nso it is"
    assert (plain.reasoning, len(plain.tool_calls)) == (None, 1)
    assert plain.reasoning_tokens == run(byte_level, text)[0].reasoning_tokens > 0
    for stop in ("\n\n", "<think>", "why"):
        assert run(byte_level, text, separate_reasoning=False, stop=[stop])[0].content == plain.content
    assert run(byte_level, text, separate_reasoning=False, stop=["it"])[0].text.endswith("</think>\n\nso ")


def test_reasoning_in_one_piece_when_thinking_ends(byte_level: Tokenizer) -> None:
    """`stream_reasoning` false gives one delta, with the end marker and not later; or at the end, if cut off."""
    ids = byte_level.encode("<think>\nwhy so\n</think>", add_special_tokens=False)
    stream = OutputStream(byte_level, reasoning=Think(), prompt_tail="", stream_reasoning=False)
    deltas = [stream.feed_ids([token_id]) for token_id in ids]
    assert [event for delta in deltas[:-1] for event in delta] == []
    (event,) = deltas[-1]
    assert isinstance(event, ReasoningDelta)
    assert (event.text, event.num_tokens) == ("why so", len(ids) - 3)
    _, events = run(byte_level, "<think>\nwhy so", eos=False, stream_reasoning=False)
    assert [type(event) for event in events] == [ReasoningDelta]


@pytest.mark.parametrize(
    ("text", "eos", "reason"),
    [(CALL, True, "tool_calls"), (CALL[:40], False, "length"), ("so", True, "stop"), ("<think>why", False, "length")],
)
def test_finish_reasons(byte_level: Tokenizer, text: str, eos: bool, reason: str) -> None:
    """A reply with calls ends in tool_calls, a truncated one in length; absent parts are None."""
    stream, _ = run(byte_level, text, eos=eos)
    assert stream.finish is not None
    assert stream.finish.reason == reason
    assert stream.content == ("so" if text == "so" else None)
    assert stream.reasoning == ("why" if "why" in text else None)


def test_abort_carries_its_message(byte_level: Tokenizer) -> None:
    """An aborted choice keeps what it has."""
    stream = OutputStream(byte_level)
    stream.feed_ids(byte_level.encode("so", add_special_tokens=False))
    stream.feed_ids([], Finish("abort", None, "server is stopping"))
    assert stream.finish is not None
    assert (stream.finish.reason, stream.finish.message, stream.text) == ("abort", "server is stopping", "so")


def test_a_section_without_a_call_reaches_the_client_as_content(byte_level: Tokenizer) -> None:
    """`Malformed` becomes content, and the choice ends in stop."""
    stream, events = run(byte_level, "so\n<tool_call>\noops\n</tool_call>")
    assert stream.content == folded(events)[1] == "so\n<tool_call>\noops\n</tool_call>"
    assert stream.finish is not None
    assert stream.finish.reason == "stop"


def test_a_stop_token_that_is_a_marker_still_closes_its_section(byte_level: Tokenizer) -> None:
    """With `</tool_call>` as stop token the call is complete."""
    ids = byte_level.encode(CALL, add_special_tokens=False)
    stream = OutputStream(byte_level, tools=Calls())
    stream.feed_ids(ids, Finish("stop", ids[-1]))
    assert [(call.name, call.arguments) for call in stream.tool_calls] == [("f", '{"city": "Rome"}')]
    assert stream.content is None


def test_text_offsets_say_where_each_token_starts(byte_level: Tokenizer) -> None:
    """One offset per token, in characters of the text before it; bytes of one character share theirs."""
    text = "the élève 🎉 thinks"
    for size in (1, 4, 100):
        stream, _ = run(byte_level, text, size=size, parse=False, track_offsets=True)
        assert len(stream.text_offsets) == stream.num_tokens
        for at, offset in enumerate(stream.text_offsets):
            before = byte_level.decode(stream.token_ids[:at], skip_special_tokens=True)
            assert text[:offset] == before.rstrip("\ufffd")


def test_a_parser_that_raises_in_the_middle(
    byte_level: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply still arrives, whole, and the log says once what was wrong."""
    from dovetail.contracts.output import FormatSpec
    from dovetail.contracts.reasoning import ReasoningParser
    from dovetail.sdk.formats.output import FormatParser

    class Failing(FormatParser):
        def feed(self, token_ids: Any, text: str | None = None) -> Any:
            if self.num_chars >= 3:
                raise KeyError("odd")
            return super().feed(token_ids, text)

    class Odd(ReasoningParser):
        def spec(self, tokenizer: Any, template: Any, request: Any) -> FormatSpec:
            return FormatSpec(machine=Failing)

    monkeypatch.setattr("dovetail.text.parsing.stream._FAILURES", set())
    for _ in range(2):
        stream = OutputStream(byte_level, reasoning=Odd())
        ids = byte_level.encode("so it is", add_special_tokens=False)
        for token_id in ids:
            stream.feed_ids([token_id])
        stream.feed_ids([], Finish("stop"))
        assert stream.content == "so it is"
    assert sum("KeyError" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("separate", [True, False])
def test_thinking_that_is_shown_stays_in_the_content(separate: bool) -> None:
    """As `minimax-m2-append-think` has it: behind the marker that the prompt ends with, whatever the request says."""
    tokenizer = byte_level()
    (entry,) = entry_points(group="dovetail.reasoning_parsers.v1", name="minimax-m2-append-think")
    for tail, text, content in (
        ("]~b]ai\n<think>\n", "why\n</think>\n\nso", "<think>why\n</think>\n\nso"),
        ("]~b]ai\n<think>\n\n</think>\n\n", "so", "so"),
        (None, "why", "<think>why"),
    ):
        stream = OutputStream(tokenizer, reasoning=entry.load()(), prompt_tail=tail, separate_reasoning=separate)
        events = [event for i in tokenizer.encode(text, add_special_tokens=False) for event in stream.feed_ids([i])]
        events += stream.feed_ids([], Finish("stop"))
        assert (stream.content, stream.reasoning) == (content, None)
        assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == content


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_pieces_of_one_calls_arguments_are_joined(byte_level: Tokenizer, size: int) -> None:
    """What came together of a call's arguments is one event, never joined with those of another call."""
    stream = OutputStream(byte_level, tools=Calls())
    ids = byte_level.encode(CALL + CALL.replace("Rome", "Oslo"), add_special_tokens=False)
    steps = [stream.feed_ids(ids[at : at + size]) for at in range(0, len(ids), size)]
    for events in steps:
        pieces = [event.index for event in events if isinstance(event, ToolArgs)]
        assert len(pieces) == len(set(pieces))
    whole: dict[int, str] = {}
    for event in (event for events in steps for event in events if isinstance(event, ToolArgs)):
        whole[event.index] = whole.get(event.index, "") + event.json
    assert whole == {0: '{"city": "Rome"}', 1: '{"city": "Oslo"}'}
