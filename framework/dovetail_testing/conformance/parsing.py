"""How the parser tests run a parser: the ways an output can arrive, replies to compare, and words for a difference."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.contracts.output import (
    ContentDelta,
    Event,
    FormatSpec,
    Malformed,
    OutputParser,
    ReasoningDelta,
    ToolArgs,
    ToolEnd,
    ToolStart,
)
from dovetail.plugins import Registry
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.records import PluginRecord
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.detection.detect import detect
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_testing.checks import check, fail, no_error, raised, shown
from dovetail_testing.samples import Sample
from dovetail_testing.vocabularies import byte_fallback, byte_level

MakeParser = Callable[[Tokenizer | None], OutputParser]
Chunks = Sequence[Any]
"""Pieces of an output: strings, or lists of token ids."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """What a client receives, in comparable form; `in_order` is all text in the order in which it was given out."""

    reasoning: str | None
    content: str | None
    calls: tuple[tuple[str, str], ...]
    reasoning_tokens: int
    in_order: str

    @property
    def visible(self) -> tuple[object, ...]:
        """What must not depend on the chunks."""
        return self.reasoning, self.content, self.calls, self.reasoning_tokens

    def __str__(self) -> str:
        """Show the parts that are there."""
        parts = {"reasoning": self.reasoning, "content": self.content, "tool_calls": list(self.calls) or None}
        return ", ".join(f"{name}={shown(value)}" for name, value in parts.items() if value is not None) or "nothing"


@dataclass(frozen=True, slots=True)
class RequestForm:
    """One way for an output to arrive: as text, or as the ids of a vocabulary."""

    name: str
    tokenizer: Tokenizer | None

    def whole(self, text: str) -> Any:
        """Return the output as it arrives: text or ids."""
        return text if self.tokenizer is None else self.tokenizer.encode(text, add_special_tokens=False)


@cache
def _vocabulary(markers: tuple[str, ...]) -> Tokenizer:
    return byte_level(markers)


@cache
def _fallback() -> Tokenizer:
    return byte_fallback()


def options(spec: FormatSpec) -> list[RequestForm]:
    """Return: as text; as ids where each marker is one token; as ids where markers are spelled in several."""
    return [
        RequestForm("as text", None),
        RequestForm("as tokens", _vocabulary(markers_of(spec))),
        RequestForm("as tokens, markers spelled out", _fallback()),
    ]


def markers_of(spec: FormatSpec) -> tuple[str, ...]:
    """Return the markers of a format, without duplicates."""
    found = [] if spec.reasoning is None else [spec.reasoning.start, spec.reasoning.end]
    if spec.tools is not None:
        found += [spec.tools.start, spec.tools.end, *spec.tools.also, *spec.tools.inner]
    return tuple(dict.fromkeys(marker for marker in found if marker))


def events_of(parser: OutputParser, chunks: Chunks, reason: str = "stop") -> list[Event]:
    """Feed chunks and finish. An exception fails the test with what was fed."""
    events: list[Event] = []
    for number, chunk in enumerate(chunks):
        try:
            events += parser.feed((), chunk) if isinstance(chunk, str) else parser.feed(chunk)
        except Exception as error:  # a stranger's parser; the message says what it did
            fail(f"feed raised {raised(error)} at piece {number} of {shown(list(chunks))}")
    try:
        events += parser.finish(reason)
    except Exception as error:  # a stranger's parser; the message says what it did
        fail(f"finish raised {raised(error)} after {shown(list(chunks))}")
    return events


def reply_of(parser: OutputParser, events: Sequence[Event]) -> ParsedReply:
    """Fold events, tolerating calls that were never started: other tests name those."""
    reasoning, content, in_order = [], [], []
    calls: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
            in_order.append(event.text)
        elif isinstance(event, ContentDelta | Malformed):
            content.append(event.text)
            in_order.append(event.text)
        elif isinstance(event, ToolStart):
            calls[event.index] = [event.name, ""]
            in_order.append(event.name)
        elif isinstance(event, ToolArgs):
            calls.setdefault(event.index, ["", ""])[1] += event.json
            in_order.append(event.json)
    named = tuple((name, arguments) for name, arguments in calls.values())
    return ParsedReply(
        "".join(reasoning) or None, "".join(content) or None, named, parser.reasoning_tokens, "".join(in_order)
    )


def parse(
    make: MakeParser, form: RequestForm, chunks: Chunks, tail: str | None = None, reason: str = "stop"
) -> ParsedReply:
    """Parse an output that arrives in these pieces, and ends for a reason, with a fresh parser."""
    parser = primed(make, form, tail)
    return reply_of(parser, events_of(parser, chunks, reason))


def primed(make: MakeParser, form: RequestForm, tail: str | None) -> OutputParser:
    """Return a fresh parser that has seen the prompt's tail."""
    parser = make(form.tokenizer)
    if tail is not None:
        with no_error("prime", f" for the prompt's tail {tail!r}"):
            parser.prime(tail)
    return parser


def difference(got: ParsedReply, want: ParsedReply) -> str:
    """Name how a reply differs from the one expected: text dropped, repeated, or in another place."""
    if got.calls != want.calls and len(got.calls) != len(want.calls):
        return f"{len(got.calls)} tool calls instead of {len(want.calls)}"
    lost, more = len(want.in_order) - len(got.in_order), len(got.in_order) - len(want.in_order)
    if lost > 0:
        return f"it drops text ({lost} characters)"
    if more > 0:
        return f"it duplicates or invents text ({more} characters)"
    if got.in_order != want.in_order:
        return "it changes the text"
    if got.visible[:3] == want.visible[:3]:
        return f"it counts {got.reasoning_tokens} reasoning tokens instead of {want.reasoning_tokens}"
    return "it puts text in another place"


def two_chunks(whole: Any, most: int | None = None) -> Iterator[Chunks]:
    """Every way to cut an output in two, or `most` of them, the same each time: each costs a parse of the whole."""
    cuts: Sequence[int] = range(len(whole) + 1)
    if most is not None and most < len(cuts):
        cuts = sorted(random.Random(len(whole)).sample(cuts, most))
    for cut in cuts:
        yield [whole[:cut], whole[cut:]]


def singly(whole: Any) -> Chunks:
    """One character or token at a time."""
    return [whole[at : at + 1] for at in range(len(whole))]


def randomly(whole: Any, rng: random.Random) -> Chunks:
    """A few pieces, some of them empty."""
    edges = sorted(rng.randrange(len(whole) + 1) for _ in range(rng.randrange(1, 7)))
    return [whole[begin:end] for begin, end in zip([0, *edges], [*edges, len(whole)], strict=True)]


def at_cut(chunks: Chunks) -> str:
    """Say where an output was cut."""
    first, second = chunks
    if isinstance(first, str):
        return f"cut between {first[-16:]!r} and {second[:16]!r}"
    return f"cut after {len(first)} of {len(first) + len(second)} tokens"


def soup(spec: FormatSpec, pieces: Sequence[str], rng: random.Random, length: int = 12) -> str:
    """Random text of markers, parts of markers, newlines, JSON and words."""
    markers = markers_of(spec)
    parts = [marker[: rng.randrange(1, len(marker) + 1)] for marker in markers]
    plain = [
        "\n",
        "\n\n",
        " ",
        "<",
        "</",
        "a",
        "Paris",
        "é",
        "中",
        "🎉",
        "{",
        "}",
        '"',
        "\\",
        ",",
        ":",
        "[",
        "]",
        "null",
    ]
    choices = [*markers, *markers, *parts, *plain, *pieces]
    return "".join(rng.choice(choices) for _ in range(rng.randrange(1, length)))


def bare(text: str, markers: Sequence[str]) -> str:
    """Return text without markers and whitespace."""
    text = re.sub(r"\s", "", text)
    before = None
    while text != before:
        before = text
        for marker in markers:
            text = text.replace(re.sub(r"\s", "", marker), "")
    return text


# What `auto` does with a parser: whether its clues find the chat templates of its models.

EXAMPLE = '"clues": [{"all": ["<r>"], "score": 1.0}]'


def check_auto(plugin: Any, record: PluginRecord | None, templates: Sequence[str], spec: FormatSpec) -> None:
    """Check that `auto` chooses a parser for its own templates; skip, and say so, where nothing is stated.

    Args:
        plugin: The parser's class.
        record: What is installed of it; None: it is not.
        templates: Sources of chat templates of its models.
        spec: The format that it declares.
    """
    if hasattr(plugin, "detect"):
        fail(f"auto does not call `detect`: take it out, and state in the manifest which texts its templates hold: "
             f"{EXAMPLE}")  # fmt: skip
    if record is None:
        pytest.skip("not installed: its manifest is not read")
    label, facts = f"{KINDS[record.kind].label} auto", record.facts
    if not facts.clues and not facts.opens:
        pytest.skip(f"{label} never chooses it: its manifest states neither clues nor opens, such as {EXAMPLE}")
    markers = openers(spec, record.kind)
    check(
        not facts.opens or not markers or any(one in facts.opens or facts.opens in one for one in markers),
        f"its manifest says opens: {facts.opens!r}, and what it declares begins with {' or '.join(map(repr, markers))}",
    )
    if not templates:
        pytest.skip("no templates declared: auto_templates = [ChatTemplate's source, …]")
    registry = Registry.scan()
    for source in templates:
        ChatTemplate({"default": source})  # one that cannot be read is told as such
        found = detect(registry, TokenizerFiles(chat_templates={"default": source}))[record.kind]
        tried = ", ".join(f"{one.name} {one.score:.2f}" for one in found.scores) or "none"
        check(
            found.name == record.name,
            f"{label} chooses {found.name or 'none'} for the template {source!r}: {found.why}; tried: {tried}",
        )


def openers(spec: FormatSpec, kind: str) -> tuple[str, ...]:
    """Return what a format declares to open calls, or thinking; nothing of one with a machine of its own."""
    found: tuple[str, ...] = ()
    if kind == "tool_parser" and spec.tools is not None:
        found = spec.tools.start, *spec.tools.also, *spec.tools.starts, *spec.tools.bare
    elif kind == "reasoning_parser" and spec.reasoning is not None:
        found = spec.reasoning.start, *(start for start, _ in spec.reasoning.also)
    return () if spec.machine is not None else tuple(filter(None, found))


# Whether the events of a reply tell a consistent story of its tool calls.


def check_events(events: Sequence[Event], sample: Sample) -> None:
    """Check order, numbering and ends; where the sample states its calls, that their arguments are valid JSON."""
    where = f"in the reply to {sample.text!r}"
    arguments: list[str] = []
    live: set[int] = set()
    for event in events:
        if isinstance(event, ToolStart):
            check(
                event.index == len(arguments),
                f"wrong tool index: call {len(arguments)} has index {event.index} {where}",
            )
            check(isinstance(event.name, str) and bool(event.name), f"call {event.index} has no name {where}")
            check(bool(event.id), f"call {event.index} has no id {where}")
            arguments.append("")
            live.add(event.index)
        elif isinstance(event, ToolArgs):
            check(
                event.index in live, f"wrong tool index: arguments for call {event.index}, which is not open, {where}"
            )
            arguments[event.index] += event.json
        elif isinstance(event, ToolEnd):
            check(event.index in live, f"call {event.index} ends twice or never began {where}")
            live.discard(event.index)
        elif isinstance(event, ReasoningDelta | ContentDelta | Malformed):
            check(bool(event.text), f"an empty {type(event).__name__} is sent {where}")
        else:
            fail(f"{event!r} is no event of the contract {where}")
    check(not live, f"calls {sorted(live)} are never ended {where}")
    _check_json(arguments, sample)


def _check_json(arguments: Sequence[str], sample: Sample) -> None:
    for number, (name, declared) in enumerate(sample.tool_calls):
        if number >= len(arguments) or not is_json(declared):
            continue
        check(
            is_json(arguments[number]),
            f"the argument deltas of call {number} ({name}) add up to {arguments[number]!r}, which is not valid JSON",
        )


def is_json(text: str) -> bool:
    """Whether `text` is JSON."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
