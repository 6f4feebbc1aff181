"""Replies that name the markers of thinking: what is only named begins none and ends none, in every format."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.contracts.output import FormatSpec
from dovetail.contracts.reasoning import ParserRequest
from dovetail.messages import MarkedThinking, Marker, SamplerParams
from dovetail.processing.constraints import Constraints
from dovetail.processing.input import PreparedRequest
from dovetail.processing.sampling import StopRules
from dovetail.sdk.formats.machine import IncrementalParser
from dovetail.sdk.formats.output import Folded, fold, make_parser
from dovetail.sdk.formats.place import Place
from dovetail.text.parsing.stream import NoTemplate
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_testing.operations import operations

sys.path.insert(0, str(Path(__file__).parent))  # the table beside this file
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from phantoms import spills
from samples import ANSWERS, TAGS

NAMED = [
    "Put your thoughts between `{start}` and `{end}`.",
    "``{start}`` opens and ``{end}`` closes.",
    "`{start}hm{end}so` is how it looks.",
    "So:\n\n```xml\n{start}\nhm\n{end}\nso\n```\n\nThat is all.",
    "~~~\n{start}hm{end}\n~~~",
    "> {start}hm{end}\n> so it goes",
    "So:\n\n    {start}\n    hm\n    {end}\n\nso",
    'It writes "{start}" and "{end}".',
    "It is '{start}' and '{end}' then.",
    "He said „{start}“, «{start}», “{start}”, 「{start}」 and ‹{start}›.",
    "用“{start}”和“{end}”。",
    "- `{start}`: opens\n- `{end}`: closes",
    "| `{start}` | opens |\n| `{end}` | closes |",
    "So <code>{start}</code> and <code>{end}</code> it is.",
    "<pre>\n{start}\nhm\n{end}\n</pre>\nSo.",
    "<!-- {start} -->so",
    'x = """\n{start}hm{end}\n"""\nso',
    "So `{start}\nhm\n{end}` it is.",
    'So {{"text": "{start}hm{end}"}} it is.',
    # Within a line of prose, behind neither a sentence nor a word.
    "Maybe {start} fits.",
    "Use {start} and {end} for it.",
    "The tags ({start}, {end}) hold thoughts.",
    "- {start}: opens\n- {end}: closes",
    "1. {start} opens",
    "使用{start}标签。",
    "A tag: {start}.",
    "**{start}** opens.",
]
THINKS = [
    "Well. {start}hm{end}so",
    "Well.\n{start}hm{end}so",
    "pre{start}hm{end}so",
    "So! {start}hm{end}so",
    "好。{start}hm{end}so",
    'He said "yes." {start}hm{end}so',
    "Use `{start}` here.\n\n{start}hm{end}so",
    "Use `{start} here.\n\n{start}hm{end}so",
    'A 5" screen, it\'s "open\n\n{start}hm{end}so',
    "“open\n\n{start}hm{end}so",
    "```\n{start}\n```\n\n{start}hm{end}so",
    "> {start}\n\n{start}hm{end}so",
    "<code>{start}\n\n{start}hm{end}so",
    "Maybe {start} fits.\n{start}hm{end}so",
]
THOUGHTS = [
    "I put it between `{start}` and `{end}` then",
    "the tag `{end}` ends it, `{end}`, too",
    "``{end}`` ends it, '{end}' or \"{end}\" or “{end}” or 「{end}」 then",
    "`{start}hm{end}so` is how it looks",
    "```\n{start}\nhm\n{end}\nso\n```\nIt is",
    '```py\nre.sub("{start}.*{end}", "", x)\ny = "{end}"\n```\nIt is',
    "<code>{end}</code> ends it",
    "re.sub(r'{start}.*?{end}', '', x) drops it",
    're.sub(r"{start}.*?{end}", "", x) drops it',
    "So it is:\n\n    {start}\n    hm\n    {end}\n    so\n\nthen",
    "```\n{start}\nhm\n{end}\nso\n{start}\nhm\n{end}\nso\n```\nIt is",
    "```py\na = '{start}'  # and {end}, too\nb = x.split('{end}')  # {end} goes\n```\nIt is",
]
ENDS = [
    # What is left open, or closed later only, ends with the thinking.
    'So "hm{end}so',
    "So `hm{end}so",
    'So "hm{end}so "it" is',
    "```py\nx = 1\n{end}```py\ny = 2\n```",
    "```\n{start}\n```\nhm `x{end}so",
    "`{start}` opens, `x{end}so `y` is",
    "> hm{end}so",
    "hm\n\n    x{end}so",
    "So `{end}",
    "So ``x{end}`so",
    'So f("{start}", "", "") is\n{end}so',
    "So `{start}\nx{end}so",
    "r'{start}' is one.{end}so",
    "It is:\n\n    {start}\n\nhm{end}so",
    # Code with an example was left open.
    "So:\n\n```xml\n{start}\nhm\n{end}\nso\n\nThat is it.\n{end}so",
    # An indented start in quotation marks begins the thinking.
    '    "{start}" is it\n\nSo `x{end}so',
]


@cache
def spec_of(name: str) -> FormatSpec:
    (entry,) = entry_points(group="dovetail.reasoning_parsers.v1", name=name)
    spec: FormatSpec = entry.load()().spec(NoTokens(), NoTemplate(), ParserRequest())
    return spec


class NoTokens:
    vocab_size = 0
    added_tokens: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return []

    def token_bytes(self, token_id: int) -> bytes:
        return b""


def read(spec: FormatSpec, tokenizer: Tokenizer | None, tail: str, chunks: list[Any]) -> tuple[Folded, int]:
    parser: IncrementalParser = make_parser(spec, tokenizer, skip_special_tokens=False)
    parser.prime(tail)
    events = [
        event for chunk in chunks for event in (parser.feed((), chunk) if tokenizer is None else parser.feed(chunk))
    ]
    return fold([*events, *parser.finish("stop")]), parser.reasoning_tokens


def both(spec: FormatSpec, tokenizer: Tokenizer, text: str, tail: str = "<a>") -> tuple[str | None, str | None]:
    """Read a reply as text and as tokens, whole and in single pieces: it is the same."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = [read(spec, None, tail, chunks) for chunks in ([text], [*text])]
    counts = [read(spec, tokenizer, tail, chunks) for chunks in ([ids], [[one] for one in ids])]
    assert counts[0][1] == counts[1][1]
    results = {(reply.reasoning, reply.content) for reply, _ in (*found, *counts)}
    assert len(results) == 1, (text, results)
    return results.pop()


def filled(text: str, name: str) -> str:
    start, end = TAGS[name][:2]
    return text.format(start=start, end=end)


SPELLED = ("apriel", "granite")
"""Their markers are sentences, which begin a line as any other does."""


@pytest.mark.parametrize("name", sorted(TAGS))
def test_an_answer_that_names_the_markers_begins_no_thinking(name: str, tokenizer: Tokenizer) -> None:
    spec = spec_of(name)
    for text in NAMED:
        said = filled(text, name)
        assert both(spec, tokenizer, said) == (None, said)
        # Behind thinking all of them are text, and so is what they hold.
        assert both(spec, tokenizer, filled("{start}hm{end}", name) + f"so {said}") == ("hm", f"so {said}")


@pytest.mark.parametrize("name", sorted(TAGS))
def test_thinking_begins_behind_an_answer(name: str, tokenizer: Tokenizer) -> None:
    """Where a line begins, or a sentence or a word ends, also behind what was named or left open."""
    for text in THINKS:
        said, _, _ = text.rpartition("{start}")
        assert both(spec_of(name), tokenizer, filled(text, name)) == ("hm", filled(said, name) + "so")


@pytest.mark.parametrize("name", sorted(TAGS))
def test_thinking_that_names_the_markers_goes_on(name: str, tokenizer: Tokenizer) -> None:
    """To the end that is not quoted, wherever the thinking began."""
    spec = spec_of(name)
    start, end, after_start, *_ = TAGS[name]
    for text in THOUGHTS:
        if name == "gemma4" and "{start}" in text:
            continue  # it ends its line, and what quotes it
        thought = filled(text, name)
        assert both(spec, tokenizer, f"{start}{after_start}{thought}{end}so") == (thought, "so")
        assert both(spec, tokenizer, f"{thought}{end}so", f"<a>{start}{after_start}") == (thought, "so")
        assert both(spec, tokenizer, f"{start}{after_start}{thought}") == (thought, None)


@pytest.mark.parametrize("name", sorted(TAGS))
def test_what_is_left_open_ends_with_the_thinking(name: str, tokenizer: Tokenizer) -> None:
    spec = spec_of(name)
    end = TAGS[name][1]
    for text in ENDS:
        thought, _, answer = text.rpartition("{end}")
        found = both(spec, tokenizer, filled("{start}" + text, name))
        assert ((found[0] or "").rstrip("\n"), found[1]) == (filled(thought, name).rstrip("\n"), answer or None), text
    # A budget or a grammar ends thinking wherever it stands.
    assert spec.reasoning is not None
    followed = replace(spec, reasoning=replace(spec.reasoning, ends_quoted=True))
    assert both(followed, tokenizer, filled("{start}So `{end}` it is", name)) == ("So `", "` it is")
    assert both(followed, tokenizer, filled("{start}So `{start}{end}so", name))[1] == "so"
    assert end


@pytest.mark.parametrize("name", sorted(ANSWERS.keys() - {"ernie45", "hunyuan-a13b"}))
def test_thinking_that_names_the_answers_marker_goes_on(name: str, tokenizer: Tokenizer) -> None:
    """Where it would end thinking."""
    start, end, *_ = TAGS[name]
    before = ANSWERS[name][0]
    spec = spec_of(name)
    named = f"Behind `{before.removeprefix('<|begin|>assistant')}` it is"
    assert both(spec, tokenizer, f"{start}{named}{end}so") == (named, "so")
    assert both(spec, tokenizer, f"{start}hm{before}so") == ("hm", "so")


def test_a_quotation_closes_behind_a_marker_of_any_signs(tokenizer: Tokenizer) -> None:
    """So that the next quotation opens: a string with a prefix, too."""
    for name in ("kimi", "seed-oss", "mistral"):
        start, end = TAGS[name][:2]
        thought = f'b"{start}" and r"""\n{start}\n{end}\n""" it is'
        assert both(spec_of(name), tokenizer, f"{start}{thought}{end}so") == (thought, "so")


def test_a_marker_that_is_named_counts_as_thinking(tokenizer: Tokenizer) -> None:
    """Its tokens are counted where it is text, and what follows an end is not."""
    spec = spec_of("qwen3")
    for text in ("<think>a `</think>` b</think>so", "<think>a `</think>so", "<think>``a</think>`<think>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        for chunks in ([ids], [[one] for one in ids]):
            reply, count = read(spec, tokenizer, "<a>", chunks)
            thought = tokenizer.encode(reply.reasoning or "", add_special_tokens=False)
            assert count == len(thought), text


@pytest.mark.parametrize("follows", [True, False])
def test_a_reply_that_the_engine_follows_ends_its_thinking(follows: bool, tokenizer: Tokenizer) -> None:
    """A budget may force the end within code; and a grammar holds behind it."""
    (entry,) = entry_points(group="dovetail.reasoning_parsers.v1", name="qwen3")
    thinking = MarkedThinking(state="open", start=Marker("", ()), end=Marker("", ())) if follows else None
    prepared = PreparedRequest(
        params=SamplerParams(max_tokens=8),
        stops=StopRules(stop=(), stop_regex=(), no_stop_trim=False, min_tokens=0, skip_special_tokens=True),
        constraints=Constraints(thinking=thinking),
        reading={"reasoning": entry.load()(), "prompt_tail": "<a><think>\n"},
    )
    stream = prepared.output(SimpleNamespace(tokenizer=tokenizer))  # type: ignore[arg-type]  # it asks for nothing else
    stream.feed_ids(tokenizer.encode("So `x</think>`y` it is", add_special_tokens=False))
    found = ("So `x", "`y` it is") if follows else ("So `x</think>`y` it is", None)
    assert (stream.reasoning, stream.content) == found


def test_talk_about_thinking_is_read_rightly() -> None:
    """Random talk in every format; `tests/benchmarks/phantoms.py thinking` reads thousands."""
    assert list(spills(250, seed=3)) == []


@pytest.mark.parametrize(
    ("opening", "unit"),
    [("", "`<think>` "), ("x", "<think> "), ("<think>a", "`</think>"), ("<think>a", "`<think></think>")],
)
def test_a_long_reply_costs_what_it_is_long(opening: str, unit: str) -> None:
    def cost(num: int) -> int:
        parser = make_parser(spec_of("qwen3"))
        return operations(lambda: [parser.feed((), text) for text in (opening, *num * [unit])])

    assert cost(400) < 2.2 * cost(200)


def test_a_run_of_backticks_is_bounded() -> None:
    """A longer one is not kept, nor copied for each of them."""
    place = Place()
    for _ in range(5000):
        place.feed("`")
    place.feed("x")
    assert max(len(closing) for closing in place.closings) < 500


MESSAGES = {
    "gpt-oss": ("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"),
    "inkling": ("<|message_model|>", "<|content_text|>", "<|content_thinking|>"),
    "muse": ("<|start|>assistant", " to=user<|message|>", " to=self<|message|>"),
}
"""By reasoning parser of messages: what begins one, the headers of an answer and of thinking."""


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_a_token_that_begins_a_message_does_so_anywhere(name: str, tokenizer: Tokenizer) -> None:
    """No text is encoded as such a token."""
    begin, answer, thinking = MESSAGES[name]
    ids = tokenizer.encode(f"{answer}So `{begin}{thinking}hm", add_special_tokens=False)
    reply, _ = read(spec_of(name), tokenizer, begin, [ids])
    assert reply.reasoning == "hm"
