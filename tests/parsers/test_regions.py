"""A checkpoint's `response_template` whose fields are told by patterns: read in regions, in every chunking."""

# ruff: noqa: E501 - a table: one case per row

from __future__ import annotations

import json
import logging
import random
from functools import cache
from typing import Any

import pytest

from dovetail.sdk.formats.output import make_parser
from dovetail.sdk.formats.reply import fold
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_parsers.derived import regions
from dovetail_parsers.derived.derive import derive
from dovetail_testing.operations import operations

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
        },
    }
]
FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
CALL = {"open_pattern": r"<call=(?P<name>\w+)>", "close": "</call>", "repeats": True, "transform": FUNCTION}
TAGS = {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"}


def said(calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A response template with these calls."""
    thinking = {"open_pattern": r"<why\d*>", "close": ["</why>", "</because>"]}
    return {"start_anchor": "<|a|>", "fields": {"thinking": thinking, "content": {}, "tool_calls": calls, **fields}}


HELD = said({**CALL, "content": "json"})
INLINE = said({**CALL, "content": "xml-inline", "content_args": TAGS})
LINES = said({**CALL, "content": "kv-lines"})
DIALECT = said(
    {
        "open_pattern": r"<\|call>call:(?P<name>\w+)",
        "close": "<call|>",
        "content": "json",
        "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
        "transform": FUNCTION,
    }
)
LIST = said(
    {
        "open_pattern": r"<calls?>",
        "close": "</calls>",
        "content": "json",
        "transform_each": True,
        "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{args}"}},
    }
)
SampleReply = tuple[str | None, str | None, list[tuple[str, str]]]
ROWS: list[tuple[dict[str, Any], str, SampleReply]] = [
    (HELD, "<why12>\nhm\n</why>\n\nso <is", ("hm", "so <is", [])),
    (HELD, "<why>hm</because>so", ("hm", "so", [])),
    # What opens a region is only named, or is meant behind what was.
    (HELD, "So `<why>` and `</why>` it is.", (None, "So `<why>` and `</why>` it is.", [])),
    (HELD, "A\n\n```\n<why>hm</why>\n```\nB", (None, "A\n\n```\n<why>hm</why>\n```\nB", [])),
    (HELD, 'So "<call=find>{}</call>" it is.', (None, 'So "<call=find>{}</call>" it is.', [])),
    (HELD, "So `x and\n\n<why>hm</why>so", ("hm", "So `x andso", [])),
    (HELD, "<why>`<call=find>` it is</why>so", ("`<call=find>` it is", "so", [])),
    (HELD, "    <why>hm</why>so", ("hm", "so", [])),
    (HELD, 'so\n<call=find>{"n": 1}</call>\n<call=find></call> end', (None, "so end", [("find", '{"n": 1}'), ("find", "{}")])),
    (HELD, '<call=find>{"s": "</call>"}</call>', (None, None, [("find", '{"s": "</call>"}')])),
    (HELD, '<why>hm<call=find>{"n": 1}</call>', ("hm", None, [("find", '{"n": 1}')])),
    (HELD, '<call=find>{"n": 1}', (None, None, [("find", '{"n": 1}')])),
    (HELD, '<call=find>{"n": 1} oops</call>', (None, "oops", [("find", '{"n": 1}')])),
    (INLINE, "<call=find><n>3</n><s>4</s></call>", (None, None, [("find", '{"n": 3, "s": "4"}')])),
    (LINES, "<call=find>\nn: 3\ns: a: b\n</call>", (None, None, [("find", '{"n": 3, "s": "a: b"}')])),
    (DIALECT, '<|call>call:find{n:3,s:<|"|>a "b": c<|"|>}<call|>', (None, None, [("find", '{"n": 3, "s": "a \\"b\\": c"}')])),
    (DIALECT, "<|call>call:find{oops}<call|>so", (None, "<|call>call:find{oops}<call|>so", [])),
    (LIST, '<calls>[{"tool": "find", "args": {"n": 1}}, {"tool": "now"}]</calls>', (None, None, [("find", '{"n": 1}'), ("now", "{}")])),
    (LIST, "<calls>oops</calls>so", (None, "<calls>oops</calls>so", [])),
]  # fmt: skip


@cache
def derived(template: str) -> Any:
    return derive(ChatTemplate({"default": PLAIN}, response_template=json.loads(template)))


def read(
    template: dict[str, Any], chunks: list[Any], tail: str = "<|a|>", reason: str = "stop", **kwargs: Any
) -> SampleReply:
    """Read a reply's pieces: text, or ids of a vocabulary."""
    tools, vocabulary = kwargs.pop("tools", TOOLS), kwargs.pop("vocabulary", None)
    parser = make_parser(derived(json.dumps(template)).spec(tools), vocabulary, **kwargs)
    parser.prime(tail)
    events = [e for c in chunks for e in (parser.feed((), c) if isinstance(c, str) else parser.feed(c))]
    reply = fold([*events, *parser.finish(reason)])
    return reply.reasoning, reply.content, [(call.name, call.arguments) for call in reply.tool_calls]


@pytest.mark.parametrize(("template", "text", "wanted"), ROWS)
def test_regions_are_read(template: dict[str, Any], text: str, wanted: SampleReply, tokenizer: Tokenizer) -> None:
    """Patterns with captures, every kind of content, cut in two anywhere, character by character, as tokens."""
    for at in range(len(text)):
        assert read(template, [text[:at], text[at:]]) == wanted
    assert read(template, [*text]) == wanted
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert read(template, [[token_id] for token_id in ids], vocabulary=tokenizer) == wanted


def test_the_state_comes_from_the_prompt() -> None:
    """What the template appended behind the anchor is the beginning of the reply."""
    assert read(HELD, ["hm</why>so"], tail="<|a|><why3>") == ("hm", "so", [])
    assert read(HELD, ["so"], tail="<why><|a|><why3>x</why>") == (None, "so", [])
    assert read(HELD, ["hm</why>so"], tail="<|a|><why3>", keep_markers=True) == ("hm</why>", "so", [])


def test_without_tools_calls_are_text() -> None:
    """As in every other format."""
    text = 'so <call=find>{"n": 1}</call>'
    assert read(HELD, [text], tools=[]) == (None, text, [])


def test_what_max_tokens_cuts() -> None:
    """A call keeps what is there of it; one without a name is nothing."""
    assert read(HELD, ['<call=find>{"n": 1, "s": "a'], reason="length") == (None, None, [("find", '{"n": 1, "s": "a')])
    assert read(INLINE, ["<call=find><n>3</n><s>4"], reason="length") == (None, None, [("find", '{"n": 3')])
    assert read(LIST, ['<calls>[{"to'], reason="length") == (None, None, [])


@pytest.mark.parametrize("pattern", ["(a+)+$b", "(?:a|a)*b", "(a|aa)+(?!a)c"])
def test_a_hostile_pattern_does_not_hold_up_the_reply(
    pattern: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every character arrives, and the log says once that the pattern takes too long."""
    template = said({**CALL, "content": "json"}, thinking={"open_pattern": pattern, "close": "</why>"})
    text = "a" * 400 + " so it is " + "a" * 400
    monkeypatch.setattr(regions, "_COMPLAINTS", set())
    with caplog.at_level(logging.ERROR, logger="dovetail.text"):
        replies = [read(template, [text]), read(template, [text[:300], text[300:]]), read(template, [*text])]
    assert [reply[1] for reply in replies] == [text] * 3
    assert sum("too long" in record.message for record in caplog.records) == 1


def test_random_replies_are_the_same_in_every_chunking() -> None:
    """Edges whole, cut and nested: nothing depends on where the text is cut, and no word is lost."""
    rng = random.Random(3)
    parts = [text for _, text, _ in ROWS] + [
        "<why1>",
        "</why>",
        "<call=find>",
        "</call>",
        "<wh",
        "</",
        "{",
        '"',
        "\n",
        "w0w ",
    ]
    for number in range(150):
        template = (HELD, INLINE, LINES, DIALECT, LIST)[number % 5]
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(1, 6)))
        whole = read(template, [text])
        for _ in range(3):
            edges = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 8)))
            pieces = [text[a:b] for a, b in zip([0, *edges], [*edges, len(text)], strict=True)]
            assert read(template, pieces) == whole, (text, pieces)


@pytest.mark.parametrize("unit", ["so it is ", "<", "<why ", "<call=find>{", "</call>"])
def test_work_is_linear(unit: str) -> None:
    """Twice the text, twice the work."""

    def work(size: int) -> int:
        parser = make_parser(derive(ChatTemplate({"default": PLAIN}, response_template=HELD)).spec(TOOLS))
        text = unit * (size // len(unit))
        return operations(lambda: [parser.feed((), text[at : at + 16]) for at in range(0, len(text), 16)])

    assert work(4000) < 3 * work(2000)


def test_tokens_of_thinking_are_counted(tokenizer: Tokenizer) -> None:
    """Those between the edges; special tokens give their text to the patterns."""
    text = "<why>hm</why>so"
    found = derive(ChatTemplate({"default": PLAIN}, response_template=HELD))
    parser = make_parser(found.spec(), tokenizer)
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        parser.feed([token_id])
    parser.finish("stop")
    assert parser.reasoning_tokens == 2
