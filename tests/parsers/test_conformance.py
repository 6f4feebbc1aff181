"""Every built-in parser: found under its name, and the same result however the stream is cut."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from itertools import chain
from typing import Any

import pytest

from dovetail.contracts.reasoning import FormatSpec, ParserRequest, ReasoningParser
from dovetail.contracts.tools import ToolParser
from dovetail.text.output import FormatParser, fold
from dovetail.text.stream import NoTemplate
from dovetail.text.tokenizer import Tokenizer

REASONING = "dovetail.reasoning_parsers.v1"
TOOLS = "dovetail.tool_parsers.v1"
ARGUMENTS = '{"city": "Rom, \\"die\\" Stadt", "n": [1, {"é": null}]}'
WEATHER = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'


@dataclass(frozen=True)
class Sample:
    """An output and its parts. `tail` is what the template put before it."""

    text: str
    reasoning: str | None = None
    content: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    tail: str | None = None


THINKING = [
    Sample("<think>\nwhy 🎉\n</think>\n\nso", "why 🎉", "so", tail="<|im_start|>assistant\n"),
    Sample("so it is", None, "so it is", tail="<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    Sample("why\n</think>\n\nso", "why", "so", tail="<think>\n"),
    Sample("why", "why", None, tail="<think>\n"),
]
SAMPLES: dict[tuple[str, str], list[Sample]] = {
    (REASONING, "qwen3"): [*THINKING, Sample("so", None, "so"), Sample("<think>why</think>so", "why", "so")],
    (REASONING, "deepseek-r1"): [
        *THINKING,
        Sample("why\n</think>\n\nso", "why", "so"),
        Sample("<think>\nwhy\n</think>\n\nso", "why", "so"),
        Sample("so", None, "so", tail="<\uff5cAssistant\uff5c>"),
        Sample("<think>\nwhy\n</think>\n\nso", "why", "so", tail="<\uff5cAssistant\uff5c>"),
        Sample("<tool_call>{}</tool_call></think>so", "<tool_call>{}</tool_call>", "so"),
    ],
    (TOOLS, "hermes"): [
        Sample(
            f"so\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n" + '{"name": "g", "arguments": {}}\n</tool_call>',
            None,
            "so",
            (("get_weather", ARGUMENTS), ("g", "{}")),
        ),
        Sample("no call", None, "no call"),
        Sample('<tool_call>{"name": "f", "arguments": {"a": 1', None, None, (("f", '{"a": 1'),)),
    ],
}


@cache
def load(group: str, name: str) -> Any:
    (entry,) = entry_points(group=group, name=name)
    return entry.load()()


def made(group: str, name: str, sample: Sample, tokenizer: Tokenizer | None) -> FormatParser:
    plugin = load(group, name)
    if isinstance(plugin, ReasoningParser):
        spec = plugin.spec(tokenizer or BARE, NoTemplate(), ParserRequest())
    else:
        assert isinstance(plugin, ToolParser)
        spec = plugin.extend(FormatSpec(), [])
    parser = FormatParser(spec, tokenizer, make_id=lambda: "id")
    if sample.tail is not None:
        parser.prime(sample.tail)
    return parser


class NoTokenizer:
    """The view of a tokenizer that knows no added tokens."""

    vocab_size = 0
    added_tokens: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return []

    def token_bytes(self, token_id: int) -> bytes:
        return b""


BARE = NoTokenizer()
CASES = [pytest.param(*key, sample, id=f"{key[1]}-{n}") for key, row in SAMPLES.items() for n, sample in enumerate(row)]


def outcome(parser: FormatParser, chunks: list[Any]) -> tuple[object, ...]:
    fed = (parser.feed((), chunk) if isinstance(chunk, str) else parser.feed(chunk) for chunk in chunks)
    whole = fold([*chain.from_iterable(fed), *parser.finish("stop")])
    return whole.reasoning, whole.content, tuple((call.name, call.arguments) for call in whole.tool_calls)


def test_every_built_in_parser_has_samples() -> None:
    """A parser cannot be added to the distribution without a sample here."""
    found = {
        (group, entry.name)
        for group in (REASONING, TOOLS)
        for entry in entry_points(group=group)
        if entry.value.startswith("dovetail_parsers.")
    }
    assert found <= SAMPLES.keys()


@pytest.mark.parametrize(("group", "name", "sample"), CASES)
def test_samples_in_every_chunking(group: str, name: str, sample: Sample, tokenizer: Tokenizer) -> None:
    """Each sample parses as declared: as text and as tokens, whole, in two parts at every place, singly, at random."""
    expected = (sample.reasoning, sample.content, sample.calls)
    rng = random.Random(3)
    ids = tokenizer.encode(sample.text, add_special_tokens=False)
    rows: list[tuple[Any, Tokenizer | None]] = [(sample.text, None), (ids, tokenizer)]
    for whole, vocabulary in rows:
        chunkings = [[whole[:cut], whole[cut:]] for cut in range(len(whole) + 1)]
        chunkings.append([whole[at : at + 1] for at in range(len(whole))])
        for _ in range(20):
            edges = sorted(rng.randrange(len(whole) + 1) for _ in range(5))
            chunkings.append([whole[begin:end] for begin, end in zip([0, *edges], [*edges, len(whole)], strict=True)])
        for chunks in chunkings:
            assert outcome(made(group, name, sample, vocabulary), chunks) == expected


@pytest.mark.parametrize(("group", "name", "sample"), CASES)
def test_samples_cut_off_anywhere(group: str, name: str, sample: Sample, tokenizer: Tokenizer) -> None:
    """A truncated reply never raises, invents no text and keeps what was streamed."""
    ids = tokenizer.encode(sample.text, add_special_tokens=False)
    for length in range(len(ids)):
        reasoning, content, calls = outcome(made(group, name, sample, tokenizer), [ids[:length]])
        assert isinstance(calls, tuple)
        written = tokenizer.decode(ids[:length], skip_special_tokens=True)
        assert all(part is None or part in written for part in (reasoning, content))
        assert all(name in written and arguments in written for name, arguments in calls)


def test_importing_a_parser_imports_no_torch() -> None:
    """A parser author's tests start at once."""
    code = (
        "import sys, dovetail_parsers.reasoning.qwen3, dovetail_parsers.reasoning.deepseek_r1,"
        "dovetail_parsers.tools.hermes; sys.exit(bool({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
