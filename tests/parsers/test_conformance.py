"""Every row of the golden table, in every built-in parser: the same result however the stream is cut."""

from __future__ import annotations

import random
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
from dovetail.sdk.formats.machine import IncrementalParser
from dovetail.sdk.formats.output import fold, make_parser
from dovetail.text.parsing.stream import NoTemplate
from dovetail.text.tokenizer.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # the table beside this file

from samples import CALLS, TAGS, THINKERS, Row, reasoning_rows, thinking_rows, tool_rows
from samples import TOOLS as WITH_TOOLS

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


def outcome(parser: IncrementalParser, chunks: list[Any]) -> tuple[object, ...]:
    fed = (parser.feed((), chunk) if isinstance(chunk, str) else parser.feed(chunk) for chunk in chunks)
    whole = fold([*chain.from_iterable(fed), *parser.finish("stop")])
    return whole.reasoning, whole.content, tuple((call.name, call.arguments) for call in whole.tool_calls)


@pytest.mark.parametrize(("group", "name"), SAMPLES, ids=lambda key: key)
def test_samples_in_every_chunking(group: str, name: str, tokenizer: Tokenizer) -> None:
    """Each sample parses as declared: as text and as tokens, in two parts at some place of six, singly, at random."""
    for sample in SAMPLES[group, name]:
        expected = (sample.reasoning, sample.content, sample.calls)
        rng = random.Random(3)
        ids = tokenizer.encode(sample.text, add_special_tokens=False)
        rows: list[tuple[Any, Tokenizer | None]] = [(sample.text, None), (ids, tokenizer)]
        for whole, vocabulary in rows:
            cuts = rng.sample(range(len(whole) + 1), len(whole) // 6 + 1)
            chunkings = [[whole[:cut], whole[cut:]] for cut in cuts]
            chunkings.append([whole[at : at + 1] for at in range(len(whole))])
            for _ in range(2):
                edges = sorted(rng.randrange(len(whole) + 1) for _ in range(5))
                pairs = zip([0, *edges], [*edges, len(whole)], strict=True)
                chunkings.append([whole[begin:end] for begin, end in pairs])
            for chunks in chunkings:
                assert outcome(made(group, name, sample, vocabulary), chunks) == expected, (sample.text, chunks)
