"""Every built-in parser: found under its name, and the same result however the stream is cut."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from functools import cache
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts.output import FormatSpec
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.contracts.tools import ToolParser
from dovetail.text.parsing.machine import IncrementalParser
from dovetail.text.parsing.output import fold, make_parser
from dovetail.text.parsing.stream import NoTemplate
from dovetail.text.tokenizer.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # the table beside this file

from samples import CALLS, TAGS, THINKERS, Row, reasoning_rows, thinking_rows, tool_rows
from samples import TOOLS as WITH_TOOLS

FULL = bool(os.environ.get("DOVETAIL_FULL"))
REASONING = "dovetail.reasoning_parsers.v1"
TOOLS = "dovetail.tool_parsers.v1"
SAMPLES: dict[tuple[str, str], list[Row]] = {
    **{(REASONING, name): reasoning_rows(name) for name in TAGS},
    **{(REASONING, name): thinking_rows(name) for name in THINKERS},
    **{(TOOLS, name): tool_rows(name) for name in CALLS},
}
"""By parser: the rows in which it works alone."""


@cache
def load(group: str, name: str) -> Any:
    (entry,) = entry_points(group=group, name=name)
    return entry.load()()


def made(group: str, name: str, sample: Row, tokenizer: Tokenizer | None) -> IncrementalParser:
    plugin = load(group, name)
    if isinstance(plugin, ReasoningParser):
        spec = plugin.spec(tokenizer or BARE, NoTemplate(), ParserRequest())
    else:
        assert isinstance(plugin, ToolParser)
        spec = plugin.extend(FormatSpec(), WITH_TOOLS)
    parser = make_parser(spec, tokenizer, make_id=lambda: "id")
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
JSON = {"hermes", "llama3", "mistral", "kimi-k2", "deepseek-v3", "deepseek-v31", "gpt-oss"}
CASES = [pytest.param(*key, sample, id=f"{key[1]}-{n}") for key, row in SAMPLES.items() for n, sample in enumerate(row)]


def outcome(parser: IncrementalParser, chunks: list[Any], reason: str = "stop") -> tuple[object, ...]:
    fed = (parser.feed((), chunk) if isinstance(chunk, str) else parser.feed(chunk) for chunk in chunks)
    whole = fold([*chain.from_iterable(fed), *parser.finish(reason)])
    return whole.reasoning, whole.content, tuple((call.name, call.arguments) for call in whole.tool_calls)


def test_every_built_in_parser_has_samples() -> None:
    """A parser cannot be added to the distribution without a sample here."""
    found = {
        (group, entry.name)
        for group in (REASONING, TOOLS)
        for entry in entry_points(group=group)
        if entry.value.startswith("dovetail_parsers.") and entry.name != "template"  # see tests/text/test_derive.py
    }
    assert found <= SAMPLES.keys()


@pytest.mark.parametrize(("group", "name", "sample"), CASES)
def test_samples_in_every_chunking(group: str, name: str, sample: Row, tokenizer: Tokenizer) -> None:
    """Each sample parses as declared: as text and as tokens, whole, in two parts, singly, at random.

    In two at some place of four; `DOVETAIL_FULL=1` tries every place.
    """
    expected = (sample.reasoning, sample.content, sample.calls)
    rng = random.Random(3)
    ids = tokenizer.encode(sample.text, add_special_tokens=False)
    rows: list[tuple[Any, Tokenizer | None]] = [(sample.text, None), (ids, tokenizer)]
    for whole, vocabulary in rows:
        cuts = range(len(whole) + 1) if FULL else rng.sample(range(len(whole) + 1), len(whole) // 4 + 1)
        chunkings = [[whole[:cut], whole[cut:]] for cut in cuts]
        chunkings.append([whole[at : at + 1] for at in range(len(whole))])
        for _ in range(20 if FULL else 8):
            edges = sorted(rng.randrange(len(whole) + 1) for _ in range(5))
            chunkings.append([whole[begin:end] for begin, end in zip([0, *edges], [*edges, len(whole)], strict=True)])
        for chunks in chunkings:
            assert outcome(made(group, name, sample, vocabulary), chunks) == expected


@pytest.mark.parametrize(("group", "name", "sample"), CASES)
def test_samples_cut_off_anywhere(group: str, name: str, sample: Row, tokenizer: Tokenizer) -> None:
    """A truncated reply never raises, invents no text and keeps what was streamed; a third of the lengths is tried."""
    ids = tokenizer.encode(sample.text, add_special_tokens=False)
    for length in range(len(ids) % 3, len(ids), 1 if FULL else 3):
        reasoning, content, calls = outcome(made(group, name, sample, tokenizer), [ids[:length]], "length")
        assert isinstance(calls, tuple)
        written = tokenizer.decode(ids[:length], skip_special_tokens=False)
        assert all(set(part or "") <= set(written) for part in (reasoning, content))
        assert all(name in written for name, _ in calls)
        if name in JSON:
            assert all(arguments == "{}" or arguments in written for _, arguments in calls)


def test_importing_parsers_imports_no_torch() -> None:
    """A parser author's tests start at once."""
    code = (
        "import sys, dovetail_parsers.harmony\n"
        "from importlib.metadata import entry_points\n"
        f"for group in ({REASONING!r}, {TOOLS!r}):\n"
        "    for entry in entry_points(group=group):\n"
        "        entry.load() if entry.value.startswith('dovetail_parsers') else None\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
