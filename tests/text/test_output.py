"""The output parser's machine, on a format of its own and with markers as tokens or as text."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain
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
    State,
    ToolEnd,
    ToolFormat,
    ToolStart,
)
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail.sdk.formats.output import FormatParser, fold, parse_full
from dovetail.text.tokenizer.tokenizer import Tokenizer

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
REASONING = FormatSpec(reasoning=Markers("<think>", "</think>"))
FULL = replace(
    REASONING,
    reasoning=Markers("<think>", "</think>", ended_by_tools=True),
    tools=ToolFormat("<tool_call>", "</tool_call>", JsonCalls),
)
TOOLS = FormatSpec(tools=FULL.tools)
SPECS = {"reasoning": REASONING, "full": FULL, "tools": TOOLS, "plain": FormatSpec()}
TAILS = {"in": "<|a|>\n<think>\n", "out": "<|a|><think>\n\n</think>\n\n", "bare": "<|a|></think>", "open": "<|a|>\n"}
STATES = {"in": State.IN, "out": State.OUT, "bare": State.OUT, "open": State.OPEN}
SOUP = [
    *MARKERS,
    *("\n", "\n\n", " ", "<", "</", "<th", "</thin", "<tool", "a", "Paris", "é", "中", "🎉", "\ufffd"),
    *('{"name": "f", "arguments": {"x": "</tool_call>"}}', '{"arguments": [1, "a}\\""], "name": "g"}', '{"name": "h"'),
    *(
        '"arguments": ',
        "}",
        '"',
        "\\",
        ", ",
        "[",
        "]",
        '{"name": "s", "arguments": "{\\"a\\": 1}"}',
        "null",
        '"name": 3',
    ),
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>'

soup = st.lists(st.sampled_from(SOUP), max_size=14).map("".join)
tails = st.sampled_from([None, *TAILS])
spec_names = st.sampled_from([*SPECS])


def parser(
    spec: FormatSpec, tokenizer: Tokenizer | None = None, tail: str | None = None, **options: Any
) -> FormatParser:
    made = FormatParser(spec, tokenizer, make_id=lambda: "id", **options)
    if tail is not None:
        made.prime(TAILS[tail])
    return made


def result(events: list[Event], made: FormatParser) -> tuple[object, ...]:
    """The fold, in comparable form."""
    whole = fold(events)
    calls = [(call.id, call.name, call.arguments) for call in whole.tool_calls]
    return whole.reasoning, whole.content, calls, made.reasoning_tokens


def of_text(made: FormatParser, chunks: list[str]) -> tuple[object, ...]:
    events = list(chain.from_iterable(made.feed((), chunk) for chunk in chunks))
    return result(events + made.finish("stop"), made)


def of_ids(made: FormatParser, chunks: list[list[int]]) -> tuple[object, ...]:
    events = list(chain.from_iterable(made.feed(chunk) for chunk in chunks))
    return result(events + made.finish("stop"), made)


def split(value: Any, rng: random.Random) -> list[Any]:
    edges = sorted(rng.randrange(len(value) + 1) for _ in range(rng.randrange(6)))
    return [value[begin:end] for begin, end in zip([0, *edges], [*edges, len(value)], strict=True)]


@given(text=soup, tail=tails, name=spec_names, rng=st.randoms(use_true_random=False))
def test_text_gives_the_same_in_every_chunking(text: str, tail: str, name: str, rng: random.Random) -> None:
    """Every two-way split, single characters and random splits of marker soup give the one-shot result."""
    whole = of_text(parser(SPECS[name], tail=tail), [text])
    for cut in range(len(text) + 1):
        assert of_text(parser(SPECS[name], tail=tail), [text[:cut], text[cut:]]) == whole
    assert of_text(parser(SPECS[name], tail=tail), [*text]) == whole
    assert of_text(parser(SPECS[name], tail=tail), split(text, rng)) == whole


@given(text=soup, tail=tails, name=spec_names, rng=st.randoms(use_true_random=False))
def test_tokens_give_the_same_in_every_chunking(
    byte_level: Tokenizer, byte_fallback: Tokenizer, text: str, tail: str, name: str, rng: random.Random
) -> None:
    """The same for token ids, with markers that are tokens and with a vocabulary where they are not."""
    for tokenizer in (byte_level, byte_fallback):
        ids = tokenizer.encode(text, add_special_tokens=False)
        whole = of_ids(parser(SPECS[name], tokenizer, tail), [ids])
        for cut in range(len(ids) + 1):
            assert of_ids(parser(SPECS[name], tokenizer, tail), [ids[:cut], ids[cut:]]) == whole
        assert of_ids(parser(SPECS[name], tokenizer, tail), [[token_id] for token_id in ids]) == whole
        assert of_ids(parser(SPECS[name], tokenizer, tail), split(ids, rng)) == whole


def test_random_tokens_give_the_same_in_every_chunking(byte_level: Tokenizer) -> None:
    """Ids drawn at random, so that bytes are cut everywhere, with markers strewn in; seeded."""
    rng = random.Random(11)
    markers = [byte_level.added_tokens[marker] for marker in MARKERS]
    for _ in range(500):
        ids = [rng.choice(markers) if rng.random() < 0.2 else rng.randrange(byte_level.vocab_size) for _ in range(12)]
        spec, tail = rng.choice([*SPECS.values()]), rng.choice([None, *TAILS])
        whole = of_ids(parser(spec, byte_level, tail), [ids])
        assert of_ids(parser(spec, byte_level, tail), [[token_id] for token_id in ids]) == whole
        assert of_ids(parser(spec, byte_level, tail), split(ids, rng)) == whole


@given(text=soup, tail=tails)
def test_every_character_is_in_one_sink_or_a_marker(byte_level: Tokenizer, text: str, tail: str) -> None:
    """Reasoning and content together are the output without markers and the whitespace around them."""
    ids = byte_level.encode(text, add_special_tokens=False)
    for made in (parser(REASONING, None, tail), parser(REASONING, byte_level, tail)):
        fed = made.feed(ids) if made.marker_ids else made.feed((), text)
        sinks = "".join(
            event.text for event in fed + made.finish("stop") if not isinstance(event, (ToolStart, ToolEnd))
        )
        assert bare(sinks) == bare(text)


def bare(text: str) -> str:
    for marker in (*MARKERS, "\n", " "):
        text = text.replace(marker, "")
    return text


@given(text=soup, tail=tails, name=st.sampled_from(["reasoning", "plain"]))
def test_kept_markers_give_the_output_back(byte_level: Tokenizer, text: str, tail: str, name: str) -> None:
    """With markers kept, the events' text in order is the output, character for character."""
    made = parser(SPECS[name], byte_level, tail, keep_markers=True)
    events = made.feed(byte_level.encode(text, add_special_tokens=False)) + made.finish("stop")
    assert "".join(event.text for event in events if isinstance(event, (ReasoningDelta, ContentDelta))) == text


@given(text=soup, tail=tails)
def test_kept_markers_do_not_change_what_counts_as_reasoning(byte_level: Tokenizer, text: str, tail: str) -> None:
    """Token counts do not depend on whether markers are kept."""
    ids = byte_level.encode(text, add_special_tokens=False)
    counts = set()
    for keep in (False, True):
        made = parser(FULL, byte_level, tail, keep_markers=keep)
        made.feed(ids)
        made.finish("stop")
        counts.add(made.reasoning_tokens)
    assert len(counts) == 1


@given(text=soup, tail=tails, name=spec_names)
def test_events_are_well_formed(text: str, tail: str, name: str) -> None:
    """No empty text; calls are numbered from 0, each started before its arguments and ended once."""
    made = parser(SPECS[name], tail=tail)
    events = [event for char in text for event in made.feed((), char)] + made.finish("length")
    live: list[int] = []
    started = 0
    for event in events:
        if isinstance(event, ToolStart):
            assert event.index == started
            assert event.name
            started += 1
            live.append(event.index)
        elif isinstance(event, ToolEnd):
            live.remove(event.index)
        elif isinstance(event, (ReasoningDelta, ContentDelta, Malformed)):
            assert event.text
        else:
            assert event.index in live
    assert not live


def test_interleaved_streams_do_not_touch(byte_level: Tokenizer) -> None:
    """Two parsers of one format fed in turns give what each gives alone."""
    texts = [f"<think>\none\n</think>\n\n1 {CALL}", f"two </think> 2 {CALL}{CALL}"]
    ids = [byte_level.encode(text, add_special_tokens=False) for text in texts]
    alone = [of_ids(parser(FULL, byte_level, "open"), [row]) for row in ids]
    made = [parser(FULL, byte_level, "open") for _ in ids]
    events: list[list[Event]] = [[], []]
    for step in range(max(map(len, ids))):
        for stream, row in enumerate(ids):
            events[stream] += made[stream].feed(row[step : step + 1])
    assert [result(events[n] + made[n].finish("stop"), made[n]) for n in range(2)] == alone


@pytest.mark.parametrize("tail", TAILS)
def test_the_prompts_tail_decides_where_the_reply_starts(tail: str) -> None:
    """Priming returns the state that the template left."""
    assert FormatParser(REASONING).prime(TAILS[tail]) is STATES[tail]


@pytest.mark.parametrize(
    ("tail", "text", "reasoning", "content"),
    [
        ("open", "<think>\nwhy\n</think>\n\nso", "why", "so"),
        ("open", "just so", None, "just so"),
        ("open", "Well. <think>\nwhy\n</think>\n\nso", "why", "Well. so"),
        ("open", "\n <think>why</think>so", "why", "so"),
        ("open", "</think>\n\nso", None, "so"),
        ("open", "so </think> what", None, "so </think> what"),
        ("open", "<think>\n\n</think>\n\nso", None, "so"),
        ("open", "<think></think>", None, None),
        ("open", "<think>why", "why", None),
        ("open", "\n\n", None, "\n\n"),
        ("in", "why\n</think>\n\nso", "why", "so"),
        ("in", "why", "why", None),
        ("in", "why\n", "why\n", None),
        ("in", "<think>\nwhy\n</think>\n\nso", "why", "so"),
        ("in", "why <think> why\n</think>\n\nso", "why <think> why", "so"),
        ("in", "\n\nwhy\n\n\n</think>\n\n\nso", "\n\nwhy\n\n", "\nso"),
        ("in", "why</thi", "why</thi", None),
        ("in", "why</think>so <think>x</think>", "why", "so <think>x</think>"),
        ("out", "\nso", None, "\nso"),
        ("out", "<think>x</think>", None, "<think>x</think>"),
        ("bare", "\n\nso", None, "so"),
    ],
)
def test_reasoning_and_content(
    byte_level: Tokenizer, byte_fallback: Tokenizer, tail: str, text: str, reasoning: str | None, content: str | None
) -> None:
    """The states and what the newlines around markers mean, with markers as tokens and as text; absent is None."""
    assert of_text(parser(REASONING, None, tail), [text])[:2] == (reasoning, content)
    ids = byte_level.encode(text, add_special_tokens=False)
    assert of_ids(parser(REASONING, byte_level, tail), [ids])[:2] == (reasoning, content)
    ids = [3 + byte for byte in text.encode()]
    assert of_ids(parser(REASONING, byte_fallback, tail), [ids])[:2] == (reasoning, content)


def test_a_trimmed_newline_split_from_its_marker_by_the_prompt() -> None:
    """A template that ends with the bare start marker leaves the newline behind it to the model; it is dropped too."""
    made = FormatParser(REASONING)
    assert made.prime("<|a|><think>") is State.IN
    assert of_text(made, ["\nwhy\n</think>\n\nso"])[:2] == ("why", "so")


def test_a_marker_token_matches_by_its_id_only(byte_level: Tokenizer) -> None:
    """`</think>` spelled out in other tokens is text; the token is the marker, also where special tokens are shown."""
    spelled = list(chain.from_iterable(byte_level.encode(part, add_special_tokens=False) for part in ("</thi", "nk>")))
    end = byte_level.added_tokens["</think>"]
    for skip in (True, False):
        made = parser(REASONING, byte_level, "in", skip_special_tokens=skip)
        assert of_ids(made, [[*spelled, end, *spelled]])[:2] == ("</think>", "</think>")


def test_every_truncation_is_a_prefix(byte_level: Tokenizer) -> None:
    """Cut off at any token, reasoning and content begin the full reply's, and an unfinished thought is no content."""
    text = f"<think>\nélan 🎉 why\n</think>\n\nso 中文 it is.\n{CALL}"
    ids = byte_level.encode(text, add_special_tokens=False)
    end = ids.index(byte_level.added_tokens["</think>"])
    full = parse_full(parser(FULL, byte_level, "open"), ids)
    for length in range(len(ids)):
        part = parse_full(parser(FULL, byte_level, "open"), ids[:length])
        reasoning, content = (part.reasoning or "").rstrip("\ufffd\n"), (part.content or "").rstrip("\ufffd\n")
        assert (full.reasoning or "").startswith(reasoning)
        if length <= end:
            assert part.content is None
        elif not part.tool_calls:
            assert (full.content or "").startswith(content.split("<tool_call>")[0].rstrip("\n"))
        for call, whole in zip(part.tool_calls, full.tool_calls, strict=False):
            assert whole.arguments.startswith(call.arguments)


@pytest.mark.parametrize(
    ("tail", "text", "count"),
    [("in", "abc</think>de", 3), ("open", "<think>abc</think>de", 3), ("out", "abc", 0), ("in", "ab</thi", 7)],
)
def test_reasoning_tokens_exclude_markers(byte_fallback: Tokenizer, tail: str, text: str, count: int) -> None:
    """A token counts where its first character stands; with one token per byte the count is the reasoning's length."""
    tokenizer = byte_fallback
    ids = [3 + byte for byte in text.encode()]
    for chunks in ([ids], [[token_id] for token_id in ids]):
        assert of_ids(parser(REASONING, tokenizer, tail), chunks)[3] == count


def test_marker_tokens_do_not_count(byte_level: Tokenizer) -> None:
    """With markers as tokens, every token between them counts, a dropped newline and half a character included."""
    inside = byte_level.encode("\nwhy 🎉\n", add_special_tokens=False)
    text = [byte_level.added_tokens["<think>"], *inside, byte_level.added_tokens["</think>"], *inside]
    made = parser(REASONING, byte_level, "open")
    events = list(chain.from_iterable(made.feed([token_id]) for token_id in text)) + made.finish("stop")
    assert made.reasoning_tokens == len(inside)
    assert 0 < sum(event.num_tokens for event in events if isinstance(event, ReasoningDelta)) <= len(inside)


@pytest.mark.parametrize(
    ("spec", "tail", "text", "reasoning", "content", "names"),
    [
        (FULL, "open", f"so\n{CALL}", None, "so", ["f"]),
        (FULL, "open", f"<think>why\n</think>\n\n{CALL}\n{CALL}\n", "why", None, ["f", "f"]),
        (FULL, "in", f"why\n{CALL}", "why", None, ["f"]),
        (REASONING, "in", f"why\n{CALL}", f"why\n{CALL}", None, []),
        (FULL, "out", f"{CALL}\n\nand so", None, "\n\nand so", ["f"]),
        (FULL, "out", f"\n \n{CALL}", None, None, ["f"]),
        (FULL, "out", '<tool_call>\n{"name": "f", "argu', None, '<tool_call>\n{"name": "f", "argu', None),
        (FULL, "out", "so\n<tool_call>\nnot json\n</tool_call>", None, "so\n<tool_call>\nnot json\n</tool_call>", []),
        (FULL, "out", "<tool_call></tool_call>", None, None, []),
        (FULL, "out", "a\n</tool_call>", None, "a\n</tool_call>", []),
        (FULL, "out", CALL.removesuffix("</tool_call>") + CALL, None, None, ["f", "f"]),
        (TOOLS, "open", f"<think>so</think>\n{CALL}", None, "<think>so</think>", ["f"]),
        (TOOLS, None, f"so\n{CALL}", None, "so", ["f"]),
    ],
)
def test_tool_sections(
    byte_level: Tokenizer,
    spec: FormatSpec,
    tail: str | None,
    text: str,
    reasoning: str | None,
    content: str | None,
    names: list[str] | None,
) -> None:
    """Where calls may stand, what is trimmed around them, and that a section without a call comes back as written."""
    if names is None:
        content, names = None, ["f"]
    for whole in (
        of_text(parser(spec, None, tail), [text]),
        of_ids(parser(spec, byte_level, tail), [byte_level.encode(text, add_special_tokens=False)]),
    ):
        calls = whole[2]
        assert isinstance(calls, list)
        assert (whole[0], whole[1], [name for _, name, _ in calls]) == (reasoning, content, names)


def test_an_end_marker_inside_a_json_string_is_part_of_it() -> None:
    """Where markers are matched in the text, one inside a string of the arguments does not end the call."""
    text = '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>'
    assert of_text(parser(TOOLS), [text])[2] == [("id", "f", '{"x": "</tool_call>"}')]


def test_a_parser_without_a_tokenizer_refuses_ids() -> None:
    """Ids cannot be read without a vocabulary."""
    with pytest.raises(ValueError, match="takes text"):
        FormatParser(REASONING).feed([1])


def test_text_after_ids_is_understood(byte_level: Tokenizer) -> None:
    """A caller may switch to text; what was held back for a marker in one mode does not leak into the other."""
    made = parser(REASONING, byte_level, "in")
    events = made.feed([], "why</thi") + made.feed(byte_level.encode("nk>", add_special_tokens=False))
    events += made.feed([], "</think>so") + made.finish("stop")
    assert result(events, made)[:2] == ("why</think>", "so")
