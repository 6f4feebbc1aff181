"""Random replies and ways to cut them, for every combination of output parsers and for what is read off templates.

Pairs that are written badly: see `Writer`. What is checked of each is in `Check`.
"""

# ruff: noqa: E501 - the tables hold one case per line

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dovetail.contracts.output import (
    ContentDelta,
    Event,
    FormatSpec,
    Malformed,
    ReasoningDelta,
    ToolArgs,
    ToolEnd,
    ToolStart,
)
from dovetail.contracts.reasoning import ParserRequest
from dovetail.sdk.formats.layout import compile_layout
from dovetail.sdk.formats.output import fold, make_parser
from dovetail.sdk.formats.samples import CALLED, THOUGHTS
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.chat.templates import FOLDER
from dovetail.text.parsing.stream import NoTemplate
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_parsers.derived.derive import derive
from dovetail_parsers.families.tagged_calls import TaggedCalls

sys.path.insert(0, str(Path(__file__).parents[1] / "parsers"))  # the table of the parsers' own tests

import samples as TABLE

CHUNKINGS = 16
"""Ways in which one text is cut."""
MAX_MUTATIONS = 6
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "properties": {
                    "q": {"type": "string"},
                    "n": {"type": "integer"},
                    "any": {},
                    "o": {"$ref": "#/$defs/o"},
                },
                "$defs": {"o": {"anyOf": [{"type": "object"}, {"type": "null"}]}},
            },
        },
    }
]
TOOL_LISTS = (TOOLS, [*TOOLS, *TABLE.TOOLS], [{"type": "function", "function": {"name": "get_weather"}}])
"""One tool; several; one without a schema."""
HARMONY = [f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "return", "call")]
DEEPSEEK = [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")]
KIMI = [
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
]
TOKENS = [
    *HARMONY, *DEEPSEEK, *KIMI, "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]", "<|python_tag|>",
    "<|python_start|>", "<|python_end|>", "｜DSML｜", "<think>", "</think>", "<tool_call>", "</tool_call>", "<seed:think>",
    "</seed:think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
]  # fmt: skip
TEXT_MARKERS = [
    "◁think▷", "◁/think▷", "<function=find>", "</function>", "<parameter=q>", "</parameter>", '<invoke name="find">',
    "</invoke>", '<parameter name="n">', "<minimax:tool_call>", "</minimax:tool_call>", "<seed:tool_call>",
    "</seed:tool_call>", "<｜DSML｜function_calls>", '<｜DSML｜invoke name="find">', "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="q" string="true">', "</｜DSML｜parameter>", "</｜DSML｜function_calls>",
]  # fmt: skip
CALLS = [
    '<tool_call>\n{"name": "find", "arguments": {"q": "</tool_call> \\"é\\"", "n": [1, {}]}}\n</tool_call>',
    "<tool_call>\n<function=find>\n<parameter=q>\na </parameter> 中\n\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
    "<function=find>\n<parameter=any>\n[1]\n</parameter>\n</function>",
    "<tool_call>find\n<arg_key>q</arg_key>\n<arg_value>a </arg_value> b</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    '{"name": "find", "parameters": {"q": "{"}}; {"name": "find"}',
    "[find(q='a, )]', n=-3), find(\"x\", 2)]",
    '[TOOL_CALLS] [{"name": "find", "arguments": {"q": "x"}}]',
    '[TOOL_CALLS]find[CALL_ID]abc[ARGS]{"q": "[TOOL_CALLS]"}',
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{"q": "```"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{"q": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="find">\n<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{"q": "x"}<|tool_call_end|><|tool_calls_section_end|>',
    '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"q": "x"}<|call|>',
    "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>so",
]  # fmt: skip
LATER = [
    "<|open|>", "<|close|>", "<|sep|>", "<|think|>", "<|content|>", "<|begin|>", "<|tool_call:begin|>", "<|tool_call:name|>",
    "<|tool_call:args|>", "<|tool_call:end|>", "<|tool_calls|>", "<|calls|>", "<|START_THINKING|>", "<|END_THINKING|>",
    "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|channel>", "<channel|>", "<|tool_call>",
    "<tool_call|>", '<|"|>', "<|tools_prefix|>", "<|tools_suffix|>", "]<]minimax[>[", "<|tool_call_start|>", "<|tool_call_end|>",
    "<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>", "<｜tool_calls_end｜>",
    "<|eom|>", "<|eot|>", "<|message_model|>", "<|end_message|>", "<|content_thinking|>", "<|content_text|>",
    "<|content_invoke_tool_json|>", "<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<ifm|tool_call>", "</ifm|tool_call>",
]  # fmt: skip
"""Special tokens of formats whose calls are those of the parsers' samples."""
CALLS += TABLE.CALLS.values()
PIECES = [
    "><", "</", "<|", "|>", ">\n", "\">\n", "}}\n", "}\n</", '{"', '": "', '"}', "}}", " to=", "to", "\n\n", "\n<", "think", "ink>", "</thi",
    "_call>", "name", "find", "<think></think>", ">>>", "]<", "]", "[", "[f", "(q='", "｜", "▁", "<｜", "w1w",
]  # fmt: skip
"""Tokens of an ordinary vocabulary: markers begin and end inside them."""
MAX_HEAD = 128
"""Characters at the end of a reply that was cut in which the head of a call may stand that is not shown."""
WRAPPERS = re.compile(
    r"\bto=[^\s<]*|<\|message_model\|>[^<]*<\|content_invoke|call▁begin｜>[^<]*<｜tool▁sep｜>|call_begin｜>[^<]*<｜tool_sep｜>"
    r'|"(?:tool_call_id|id|type)"\s*:\s*"[^"]*"|"[^"]*"\s*:|\btype="\w*"|(?<=")(?:\s+[\w.:-]+="[^"<>\n]*")+(?=\s*>)'
)
"""A recipient, a name that stands in a header once more, the word `function` before a name, an id that is replaced,
the type beside it, keys beside a call's, the type of a parameter, and other attributes of its tag."""
HEADERS = re.compile(r"\bto=[^\s<]*|<\|message_model\|>[^<]*<\|content_invoke|call▁begin｜>[^<]*<｜tool▁sep｜>")
"""Those of them that a prompt may end in, of which the reply holds the rest only."""
_HALF = re.compile(r"<[^<>]*\Z")
"""Half a marker at a prompt's end: no parser goes on in it, as a marker that is a token is never cut."""
WITNESS = "\ue000"
"""Stands in a random text for a word that is found nowhere else."""
PLAIN = [WITNESS, WITNESS, WITNESS, "\n", "\n\n", " ", "a", "Paris is ", "é", "中文", "🎉", "\ufffd", "<", "</", "<|", "{", "}", "[", "]", "'", '"', "\\", "find", ",", ";", "assistant", " to=functions.find", "analysis", "```", "\x01", "\r\n", "\u2028"]  # fmt: skip
TAILS = ["", "<|assistant|>", "<think>", "<think>\n", "</think>", "<think>\n\n</think>\n\n", "<|start|>assistant", "[THINK]", "◁think▷", "<seed:think>", "<|start|>assistant<|channel|>final<|message|>"]  # fmt: skip
TEMPLATES = (FOLDER, Path(__file__).parents[1] / "text" / "templates")
"""Chat templates whose formats are read off them."""
_TOKEN = re.compile(r"[<\[◁].+[>\]▷]")
"""A marker that may be a token. Others are words, or begin or end where others go on."""
_UNIT = re.compile(r"</?[^<>\s]*[^<>]*>|\[/?[A-Z_]{2,}\]|◁[^◁▷]*▷|```\w*|>>>")


@dataclass(frozen=True)
class Pair:
    """One combination of parsers, and what is written in its formats.

    Attributes:
        specs: The format, for each of `TOOL_LISTS`.
        own: Replies in it.
        markers: Its markers and tags.
    """

    name: str
    specs: tuple[FormatSpec, ...]
    own: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()

    @property
    def spec(self) -> FormatSpec:
        """The format with one tool."""
        return self.specs[0]


def made(name: str, specs: Sequence[FormatSpec], own: Sequence[str]) -> Pair:
    """Make a pair; its markers are those that its format declares, and those that stand in its replies."""
    spec = specs[0]
    own = [*own, *(call for call in CALLS if starts(spec, call))]
    found = [] if spec.reasoning is None else [spec.reasoning.start, spec.reasoning.end, *chain(*spec.reasoning.also)]
    found += [] if spec.answer is None else [spec.answer.start, spec.answer.end]
    found += spec.dropped
    if spec.tools is not None:
        found += [spec.tools.start, spec.tools.end, *spec.tools.also, *spec.tools.inner, *spec.tools.bare]
    if (messages := spec.messages) is not None:
        found += [messages.start, messages.start + messages.role, *messages.parts, *messages.inner, messages.body]
        found += [*messages.bodies, *messages.ends, messages.thinking + messages.body, messages.answer + messages.body]
    found += [unit for text in own for unit in _UNIT.findall(text)]
    return Pair(name, tuple(specs), tuple(filter(None, own)), tuple(dict.fromkeys(filter(None, found))))


def starts(spec: FormatSpec, call: str) -> bool:
    """Whether a format reads this way to write a call."""
    tools = spec.tools
    return tools is not None and call.startswith(tuple(filter(None, (tools.start, *tools.also, *tools.bare))))


def vocabulary(special: Sequence[str] = (*TOKENS[:24], *LATER), added: Sequence[str] = TOKENS[24:]) -> Tokenizer:
    """Make a vocabulary of bytes in which the formats' markers are tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*special])
    backend.add_tokens([*added])
    return Tokenizer(backend)


def vocabularies() -> list[Tokenizer]:
    """Markers are tokens; some are, and tokens lie across others; none is."""
    every = [*TOKENS, *LATER]
    return [vocabulary(), vocabulary(every[::3], [*every[1::3], *PIECES]), vocabulary((), PIECES), vocabulary((), ())]


@lru_cache(maxsize=2048)
def _of_markers(markers: tuple[str, ...]) -> Tokenizer:
    return vocabulary(markers, ())


def own_vocabulary(spec: FormatSpec) -> Tokenizer:
    """Make a vocabulary in which each marker of a format is a token, unless it is words, and nothing else is.

    What is read of a reply in it is what is read of the reply as text.
    """
    roles = {marker: None for view in compile_layout(spec, {}).by_text.values() for marker in view.roles}
    inner = () if spec.tools is None else spec.tools.inner
    return _of_markers(tuple(marker for marker in dict.fromkeys([*roles, *inner]) if _TOKEN.fullmatch(marker)))


def combinations(tokenizer: Tokenizer) -> list[Pair]:
    """Every reasoning parser, or none, with every tool parser, or none."""
    reasoning: dict[str, Any] = {"none": None}
    tools: dict[str, Any] = {"none": None}
    for found, group in ((reasoning, "dovetail.reasoning_parsers.v1"), (tools, "dovetail.tool_parsers.v1")):
        entries = sorted(entry_points(group=group), key=lambda entry: entry.name)  # the same pairs wherever it runs
        found.update({entry.name: entry.load()() for entry in entries})
    pairs = []
    for first, thinker in reasoning.items():
        for second, caller in tools.items():
            spec = FormatSpec() if thinker is None else thinker.spec(tokenizer, NoTemplate(), ParserRequest())
            specs = [spec if caller is None else caller.extend(spec, each) for each in TOOL_LISTS]
            rows = [row.text for row in (*TABLE.MACHINE_ROWS.get(first, ()), *TABLE.TOOL_ROWS.get(second, ()))]
            own = (*rows, TABLE.CALLS[second]) if second in TABLE.CALLS else (*rows,)
            pairs.append(made(f"{first} + {second}", specs, own))
    return [*pairs, *derived()]


def derived() -> Iterator[Pair]:
    """What is read off chat templates, in place of the parsers that would be chosen for them."""
    for path in sorted(path for folder in TEMPLATES for path in folder.glob("*.jinja")):
        template = ChatTemplate({"default": path.read_text(encoding="utf-8")})
        specs = [derive(template).spec(each) for each in TOOL_LISTS]
        if specs[0].reasoning is not None or specs[0].tools is not None:
            shown = [template.written(reply) for reply in (*CALLED, *THOUGHTS)]
            yield made(f"derived + {path.stem}", specs, [each.output or "" for each in shown if each is not None])


class Writer:
    """Writes replies as no model should.

    A third is marker soup: whole and cut markers, calls, late markers, many-byte characters. The rest tells a story in
    the format (thinking, an answer, calls, calls of another format) and then breaks it: parts are left out, doubled,
    exchanged, put inside one another, and markers, whole or cut, put anywhere.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def text(self, pair: Pair) -> str:
        """Return a text of a format, with words that stand nowhere else."""
        rng = self.rng
        text = self._soup(pair) if rng.random() < 1 / 3 else self._broken(pair, self._story(pair))
        if rng.random() < 0.3:
            text = text[: rng.randrange(len(text) + 1)]
        return numbered(text)

    def tail(self, pair: Pair) -> str | None:
        """Return what the template appended: nothing, markers, or the beginning of a reply that is to be continued."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.6:
            return rng.choice([None, *TAILS])
        if kind < 0.8 and pair.markers:
            return "".join(rng.choice(pair.markers) for _ in range(rng.randrange(1, 4)))
        begun = rng.choice(TAILS) + self._broken(pair, self._story(pair))
        return begun[: rng.randrange(len(begun) + 1)].replace(WITNESS, "x")

    def _soup(self, pair: Pair) -> str:
        rng, parts = self.rng, []
        for _ in range(rng.randrange(1, 9)):
            kind = rng.random()
            if rng.random() < 1 / 3 and (own := [*pair.own, *pair.markers]):
                parts.append(rng.choice(own))
            elif kind < 0.4:
                parts.append(rng.choice(PLAIN))
            elif kind < 0.6:
                parts.append(rng.choice([*TOKENS, *LATER]))
            elif kind < 0.7:
                parts.append(rng.choice(TEXT_MARKERS))
            elif kind < 0.8:
                parts.append(self._cut(rng.choice([*TOKENS, *TEXT_MARKERS])))
            else:
                parts.append(rng.choice(CALLS))
        return "".join(parts)

    def _story(self, pair: Pair) -> str:
        """Return thinking, an answer and calls as they should be, most of them in the pair's own format."""
        rng, spec, parts = self.rng, pair.spec, []
        if spec.reasoning is not None and rng.random() < 0.6:
            markers = spec.reasoning
            parts += [
                markers.start,
                markers.after_start,
                self._prose(),
                markers.before_end,
                markers.end,
                markers.after_end,
            ]
        for _ in range(rng.randrange(1, 5)):
            kind = rng.random()
            if kind < 0.3:
                parts.append(self._prose())
            elif kind < 0.9 and pair.own:
                parts.append(rng.choice(pair.own))
            else:
                parts.append(rng.choice(CALLS))
        return "".join(parts)

    def _prose(self) -> str:
        return "".join(self.rng.choice(PLAIN) for _ in range(self.rng.randrange(5)))

    def _cut(self, text: str) -> str:
        return text[: self.rng.randrange(len(text) + 1)]

    def _broken(self, pair: Pair, text: str) -> str:
        for _ in range(self.rng.randrange(MAX_MUTATIONS)):
            text = self._mutated(pair, text)
        return text

    def _mutated(self, pair: Pair, text: str) -> str:
        """Break a text in one way, at the edge of a marker or anywhere."""
        rng = self.rng
        edges = [0, len(text), *(edge for unit in _UNIT.finditer(text) for edge in unit.span())]
        a, b, c = sorted(rng.choice(edges) if rng.random() < 0.6 else rng.randrange(len(text) + 1) for _ in range(3))
        kind = rng.randrange(8)
        if kind == 0:  # left out
            return text[:a] + text[b:]
        if kind == 1:  # doubled
            return text[:b] + text[a:]
        if kind == 2:  # exchanged
            return text[:a] + text[b:c] + text[a:b] + text[c:]
        if kind == 3 and pair.markers:
            return text[:b] + rng.choice(pair.markers) + text[b:]
        if kind == 4 and pair.markers:
            return text[:b] + self._cut(rng.choice(pair.markers)) + text[b:]
        if kind == 5:
            return text[:b] + rng.choice(PLAIN) + text[b:]
        if kind == 6 and pair.own:  # put inside one another
            return text[:b] + rng.choice(pair.own) + text[b:]
        return text[:b] + rng.choice([*CALLS, *TOKENS, *TEXT_MARKERS, *LATER]) + text[b:]


def numbered(text: str) -> str:
    """Put a word that stands nowhere else in the place of each witness."""
    head, *rest = text.split(WITNESS)
    return head + "".join(f"w{number}w{part}" for number, part in enumerate(rest))


def cut(whole: Any, rng: random.Random) -> list[Any]:
    """Cut into single elements, in two, or at random."""
    kind = rng.random()
    if kind < 0.15:
        return [whole[at : at + 1] for at in range(len(whole))]
    edges = sorted(rng.randrange(len(whole) + 1) for _ in range(1 if kind < 0.5 else rng.randrange(2, 12)))
    return [whole[begin:end] for begin, end in zip([0, *edges], [*edges, len(whole)], strict=True)]


@dataclass(frozen=True)
class Given:
    """How a reply is read."""

    spec: FormatSpec
    tokenizer: Tokenizer | None
    tail: str | None
    reason: str
    skip_special_tokens: bool = True
    keep_markers: bool = False


def outcome(given: Given, chunks: Sequence[Any]) -> Any:
    """Parse chunk by chunk and fold."""
    tokenizer = given.tokenizer
    parser = make_parser(
        given.spec,
        tokenizer,
        skip_special_tokens=given.skip_special_tokens,
        keep_markers=given.keep_markers,
        make_id=lambda: "id",
    )
    if given.tail is not None:
        parser.prime(given.tail)
    events = [*chain.from_iterable(parser.feed((), c) if tokenizer is None else parser.feed(c) for c in chunks)]
    events += parser.finish(given.reason)
    check_order(events)
    whole = fold(events)
    calls = [(c.id, c.name, c.arguments) for c in whole.tool_calls]
    return whole.reasoning, whole.content, calls, parser.reasoning_tokens


def check_order(events: Sequence[Event]) -> None:
    """Raise where a call is begun out of turn, goes on behind its end, or is not ended; or where an event is empty."""
    begun, open_call = 0, None
    for event in events:
        if isinstance(event, ToolStart):
            if open_call is not None or event.index != begun:
                raise RuntimeError(f"{event} in {events}")
            open_call, begun = event.index, begun + 1
        elif isinstance(event, ToolArgs) and (event.index != open_call or not event.json):
            raise RuntimeError(f"{event} in {events}")
        elif isinstance(event, ToolEnd):
            if event.index != open_call:
                raise RuntimeError(f"{event} in {events}")
            open_call = None
        elif isinstance(event, (ReasoningDelta, ContentDelta, Malformed)) and not event.text:
            raise RuntimeError(f"empty {event} in {events}")
    if open_call is not None:
        raise RuntimeError(f"call {open_call} is not ended in {events}")


def mismatches(num_pairs: int, seed: int) -> Iterator[str]:
    """Yield a line for every pair whose stream differs from its whole, that loses something, or that raises."""
    rng = random.Random(seed)
    writer, tables = Writer(rng), vocabularies()
    pairs = combinations(tables[0])
    rng.shuffle(pairs)
    for number in range(0, num_pairs, CHUNKINGS):
        pair = pairs[number // CHUNKINGS % len(pairs)]
        text, tail = writer.text(pair), writer.tail(pair)
        spec, used, kind = rng.choice(pair.specs), None, rng.random()
        is_own = kind < 0.15 and spec.machine is None
        if is_own:
            used = own_vocabulary(spec)
        elif kind < 0.6:
            used = rng.choice(tables)
        given = Given(
            spec,
            used,
            tail,
            rng.choice(["stop", "length"]),
            rng.random() < 0.7 and not is_own,
            rng.random() < 0.15,
        )
        named = "own" if is_own else used and tables.index(used)
        about = f"{pair.name}, spec {pair.specs.index(given.spec)}, vocabulary {named}, tail {tail!r}, {given.reason}, skip {given.skip_special_tokens}, keep {given.keep_markers}, {text!r}"
        try:
            for line in wrong(given, text, rng, min(CHUNKINGS, num_pairs - number)):
                yield f"{about}: {line}"
        except Exception as error:
            yield f"{about}: {type(error).__name__}: {error}"


def wrong(given: Given, text: str, rng: random.Random, chunkings: int) -> Iterator[str]:
    """Yield what is wrong with the reading of one text."""
    whole: Any = text
    if given.tokenizer is not None:
        whole = given.tokenizer.encode(text, add_special_tokens=False)
        whole = whole[: rng.randrange(len(whole) + 1)] if rng.random() < 0.2 else whole
    expected = outcome(given, [whole])
    written = text if given.tokenizer is None else given.tokenizer.decode(whole, skip_special_tokens=False)
    if missing := lost(written, expected, given.reason, given.tail or ""):
        yield f"{missing} is lost in {expected}"
    if given.reason == "stop" and (odd := no_json(given.spec, expected)):
        yield f"{odd} are no JSON in {expected}"
    if given.tokenizer is not None and not given.skip_special_tokens and is_spelled_alike(given, written, whole):
        as_text = outcome(replace(given, tokenizer=None), [written])
        if as_text[:3] != expected[:3]:
            yield f"as text {as_text}, as tokens {expected}"
    for _ in range(chunkings):
        chunks = cut(whole, rng)
        found = outcome(given, chunks)
        if found != expected:
            yield f"chunks {chunks!r}: {found} instead of {expected}"


def is_spelled_alike(given: Given, text: str, ids: Sequence[int]) -> bool:
    """Whether every marker in a text that may be a token is one: then it is read as the text is."""
    tokenizer = given.tokenizer
    if tokenizer is None or "\ufffd" in text:
        return False
    added = tokenizer.added_tokens
    if any(text.endswith(marker[:size]) for marker in added for size in range(1, len(marker))):
        return False  # the beginning of a marker, as text
    marked = sum(text.count(marker) for marker in added if marker not in PIECES)
    return marked == sum(1 for token_id in ids if token_id in set(added.values()))


def joined(word: str, text: str) -> int:
    """Count where a word may come to be as the marker within it is left out."""
    return sum(text.count(word[:cut] + "<") for cut in range(1, len(word)))


def no_json(spec: FormatSpec, found: Any) -> list[str]:
    """Return the arguments that are no JSON object, though the parser wrote them: of calls with tags.

    Where the model writes JSON itself, it passes as it is.
    """
    tools = spec.tools
    if (
        tools is None
        or spec.machine is not None
        or not isinstance(tools.body(lambda name, _=None: ToolStart(0, "", name)), TaggedCalls)
    ):
        return []
    return [arguments for _, _, arguments in found[2] if not is_object(arguments)]


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def wrapping(text: str, tail: str) -> str:
    """Return what `WRAPPERS` find in a reply, and the header that begins in the prompt's tail and ends in the reply."""
    begun = _HALF.sub("", tail)
    headers = [found for found in HEADERS.finditer(begun + text) if found.start() < len(begun) < found.end()]
    return " ".join([*WRAPPERS.findall(text), *(found[0][len(begun) - found.start() :] for found in headers)])


def lost(text: str, found: Any, reason: str, tail: str) -> list[str]:
    """Return the words of a text that stand in no part of the reply, or more often than in the text.

    What `WRAPPERS` find is part of a format, as is the name of a call that was cut off.
    """
    reasoning, content, calls, _ = found
    parts = [part for call_id, name, arguments in calls for part in (call_id * (name not in call_id), name, arguments)]
    kept = " ".join([reasoning or "", content or "", *parts])
    wrapped = wrapping(text, tail)
    words = [word for word in dict.fromkeys(re.findall(r"w\d+w", text)) if word not in wrapped]
    missing = [word for word in words if not 0 <= kept.count(word) - text.count(word) <= joined(word, text)]
    return [word for word in missing if reason != "length" or word not in text[-MAX_HEAD:]]
