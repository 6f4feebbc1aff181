"""Replies as Dovetail, vLLM and SGLang read them; `docs/output-recovery.md` gives the reason of each difference.

The table is `foreign.json`: of each parser the rows `[end of the prompt, reply, ours, vLLM's, SGLang's, reason]`, each
result reasoning and content, null for nothing; null in place of a result: no such parser, or none that takes the row.

Whole replies were put to the reasoning parsers of the wheels vllm 0.33.0 and sglang 0.5.23 on 29 November 2026. vLLM's
got the ids of the prompt and a request without template variables; SGLang's `force_reasoning` where the prompt opened
the thinking. A tokenizer in which every marker is a token stood in for the models'. vLLM's column of `gpt-oss` alone
was not run but read off its `parser/harmony.py`, as its library needs a vocabulary from the network. Not tried:
`cohere_command4` (vLLM reads it with a library of Cohere's), `olmo3`, `poolside_v1`, and `beam`, `muse` and templates,
which both read with machines of their own.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from dovetail.contracts import ReasoningParser
from dovetail.messages import Finish
from dovetail.plugins import Registry
from dovetail.text.parsing.stream import OutputStream
from dovetail.text.tokenizer.tokenizer import Tokenizer

OUTPUT = Path(__file__).parents[2] / "docs" / "output-recovery.md"
TABLE = Path(__file__).with_name("foreign.json")
Read = tuple[str | None, str | None]
"""Reasoning and content; None for nothing, as for an empty text."""
REASONS = {
    "state": "The prompt decides whether thinking is open.",
    "kept": "No text is lost before a marker.",
    "literal": "A second marker is text.",
    "newlines": "Only the template's newlines are dropped.",
    "cut": "Thinking that nothing closes is reasoning.",
    "calls": "A call in thinking that is closed later is reasoning.",
    "tokens": "A special token that no chosen parser names is left out.",
    "messages": "Messages follow each other as they are.",
    "header": "A thought of Gemma 4 has a header.",
    "appended": "`minimax-m2-append-think` adds the marker of the prompt.",
}


class Row(NamedTuple):
    """A reply behind the end of a prompt, and what each server makes of it."""

    parser: str
    tail: str
    text: str
    ours: Read
    vllm: Read | None
    sglang: Read | None
    why: str

    @property
    def differs(self) -> bool:
        """Whether another server that has the parser reads the reply otherwise."""
        return bool({self.vllm, self.sglang} - {self.ours, None})


def table() -> list[Row]:
    """Read the rows."""
    rows = []
    for parser, given in json.loads(TABLE.read_text()).items():
        for tail, text, *results, why in given:
            ours, vllm, sglang = (None if read is None else tuple(read) for read in results)
            rows.append(Row(parser, tail, text, ours, vllm, sglang, why))
    return rows


ROWS = table()


@cache
def loaded(parser: str) -> type[ReasoningParser]:
    """Import a parser; the name may be another server's."""
    name = Registry.scan().resolve("reasoning_parser", parser).name
    (entry,) = metadata.entry_points(group="dovetail.reasoning_parsers.v1", name=name)
    found: type[ReasoningParser] = entry.load()
    return found


def read(parser: str, row: Row, tokenizer: Tokenizer, size: int) -> Read:
    """Feed a reply in steps of some tokens."""
    stream = OutputStream(tokenizer, reasoning=loaded(parser)(), prompt_tail=row.tail)
    ids = tokenizer.encode(row.text, add_special_tokens=False)
    for start in range(0, len(ids), size):
        step = ids[start : start + size]
        stream.feed_ids(step, Finish("stop") if start + size >= len(ids) else None)
    return stream.reasoning or None, stream.content or None


@pytest.mark.parametrize("parser", sorted({row.parser for row in ROWS}))
def test_replies_are_read_as_the_table_says(parser: str, tokenizer: Tokenizer) -> None:
    """Whole and streamed token by token."""
    for row in ROWS:
        if row.parser == parser:
            assert read(parser, row, tokenizer, size=1 << 20) == row.ours, row
            assert read(parser, row, tokenizer, size=1) == row.ours, row


def test_each_difference_has_a_reason_in_the_documentation() -> None:
    """And what has none is read alike by all that have the parser; each reason is of some row."""
    text = " ".join(OUTPUT.read_text().split())
    for row in ROWS:
        assert bool(row.why) == row.differs, row
    assert {row.why for row in ROWS} - {""} == REASONS.keys()
    assert [reason for reason in REASONS.values() if f"**{reason}**" not in text] == []
