"""Replies as Dovetail, vLLM and SGLang read them; `docs/output-recovery.md` gives the reason of each difference.

The others' columns are worked out by hand from what their parsers did on 28 November 2026, for whole replies: vLLM's
`deepseek_r1`, `qwen3`, `gemma4` and `minimax_m2_append_think`, SGLang's of these names. Where the prompt opened the
thinking, SGLang's column is that of a server which was told so (`force_reasoning`).
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from dovetail.messages import Finish
from dovetail.text.parsing.stream import OutputStream
from dovetail.text.tokenizer.tokenizer import Tokenizer

OUTPUT = Path(__file__).parents[2] / "docs" / "output-recovery.md"
OPENED = "<think>\n"
CALL = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
Read = tuple[str | None, str | None]
"""Reasoning and content; None for nothing, as for an empty text."""


class Row(NamedTuple):
    """A reply behind the end of a prompt, and what each server makes of it."""

    parsers: str
    tail: str
    text: str
    ours: Read
    vllm: Read
    sglang: Read
    why: str = ""


STATE = "The prompt decides whether thinking is open."
KEPT = "No text is lost before a marker."
LITERAL = "A second marker is text."
NEWLINES = "Only the template's newlines are dropped."
HEADER = "A thought of Gemma 4 has a header."
APPENDED = "`minimax-m2-append-think` adds the marker of the prompt."
CALLS = "A call on a line of its own ends thinking."
THINK = "deepseek-r1 qwen3"
CLOSED = "<think>abc</think>xyz"
LONE = "abc</think>xyz"
ROWS = [
    Row(THINK, "", CLOSED, ("abc", "xyz"), ("abc", "xyz"), ("abc", "xyz")),
    Row(THINK, OPENED, LONE, ("abc", "xyz"), ("abc", "xyz"), ("abc", "xyz")),
    Row(THINK, OPENED, "abc", ("abc", None), ("abc", None), ("abc", None)),
    Row(THINK, "", "<think>abc", ("abc", None), ("abc", None), ("abc", None)),
    Row(THINK, "", "<think></think>xyz", (None, "xyz"), (None, "xyz"), (None, "xyz")),
    Row(THINK, OPENED, "</think>xyz", (None, "xyz"), (None, "xyz"), (None, "xyz")),
    Row(THINK, "", "<think>abc</think>", ("abc", None), ("abc", None), ("abc", None)),
    Row(THINK, OPENED, CLOSED, ("abc", "xyz"), ("abc", "xyz"), ("abc", "xyz")),
    Row(THINK, OPENED, "abc</think>x</think>y", ("abc", "x</think>y"), ("abc", "x</think>y"), ("abc", "x</think>y")),
    Row("deepseek-r1", "", "xyz", (None, "xyz"), ("xyz", None), ("xyz", None), STATE),
    Row("qwen3", "", "xyz", (None, "xyz"), ("xyz", None), (None, "xyz"), STATE),
    Row("deepseek-r1", "", LONE, (None, LONE), ("abc", "xyz"), ("abc", "xyz"), STATE),
    Row("qwen3", "", LONE, (None, LONE), ("abc", "xyz"), (None, LONE), STATE),
    Row(THINK, "", f"pre{CLOSED}", ("abc", "prexyz"), ("abc", "xyz"), ("preabc", "xyz"), KEPT),
    Row(THINK, OPENED, "a<think>b</think>xyz", ("a<think>b", "xyz"), ("b", "xyz"), ("ab", "xyz"), LITERAL),
    Row(
        THINK,
        "",
        "<think>abc</think>x<think>b</think>y",
        ("abc", "x<think>b</think>y"),
        ("abc", "x<think>b</think>y"),
        ("abc", "xb</think>y"),
        LITERAL,
    ),
    Row(
        THINK,
        "",
        "<think>\nabc\n</think>\n\nxyz",
        ("abc", "xyz"),
        ("\nabc\n", "\n\nxyz"),
        ("abc\n", "xyz"),
        NEWLINES,
    ),
    Row(
        THINK,
        "",
        "<think>  abc  </think>  xyz  ",
        ("  abc  ", "  xyz  "),
        ("  abc  ", "  xyz  "),
        ("abc  ", "xyz"),
        NEWLINES,
    ),
    Row("qwen3", OPENED, f"abc\n{CALL}", ("abc\n", CALL), ("abc\n", CALL), (f"abc\n{CALL}", None), CALLS),
    Row("gemma4", "", "<|channel>thought\nabc<channel|>xyz", ("abc", "xyz"), ("abc", "xyz"), ("abc", "xyz")),
    Row("gemma4", "", "<|channel>thought\nabc", ("abc", None), ("abc", None), ("abc", None)),
    Row("gemma4", "", "<|channel>thought\n<channel|>xyz", (None, "xyz"), (None, "xyz"), (None, "xyz")),
    Row("gemma4", "", "xyz", (None, "xyz"), (None, "xyz"), (None, "xyz")),
    Row(
        "gemma4",
        "",
        "<|channel>abc<channel|>xyz",
        (None, "<|channel>abc<channel|>xyz"),
        ("abc", "xyz"),
        ("abc", "xyz"),
        HEADER,
    ),
    Row("gemma4", "", "<|channel>abc", (None, "<|channel>abc"), ("abc", None), ("abc", None), HEADER),
    Row(
        "gemma4",
        "",
        "thought\nabc<channel|>xyz",
        (None, "thought\nabc<channel|>xyz"),
        ("abc", "xyz"),
        (None, "thought\nabc<channel|>xyz"),
        HEADER,
    ),
    Row(
        "gemma4",
        "",
        "abc<channel|>xyz",
        (None, "abc<channel|>xyz"),
        ("abc", "xyz"),
        (None, "abc<channel|>xyz"),
        HEADER,
    ),
    Row("minimax-m2-append-think", OPENED, LONE, (None, CLOSED), (None, CLOSED), (None, CLOSED)),
    Row("minimax-m2-append-think", OPENED, "abc", (None, "<think>abc"), (None, "<think>abc"), (None, "<think>abc")),
    Row("minimax-m2-append-think", "", LONE, (None, LONE), (None, CLOSED), (None, CLOSED), APPENDED),
    Row("minimax-m2-append-think", "", "xyz", (None, "xyz"), (None, "<think>xyz"), (None, "<think>xyz"), APPENDED),
]


def read(parser: str, row: Row, tokenizer: Tokenizer, size: int) -> Read:
    """Feed a reply in steps of some tokens."""
    (entry,) = metadata.entry_points(group="dovetail.reasoning_parsers.v1", name=parser)
    stream = OutputStream(tokenizer, reasoning=entry.load()(), prompt_tail=row.tail)
    ids = tokenizer.encode(row.text, add_special_tokens=False)
    for start in range(0, len(ids), size):
        step = ids[start : start + size]
        stream.feed_ids(step, Finish("stop") if start + size >= len(ids) else None)
    return stream.reasoning or None, stream.content or None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.parsers}: {row.tail}{row.text}")
def test_a_reply_is_read_as_the_table_says(row: Row, tokenizer: Tokenizer) -> None:
    """Whole and streamed token by token."""
    for parser in row.parsers.split():
        assert read(parser, row, tokenizer, size=1 << 20) == row.ours
        assert read(parser, row, tokenizer, size=1) == row.ours


def test_each_difference_has_a_reason_in_the_documentation() -> None:
    """And what has none is read alike by all three."""
    text = " ".join(OUTPUT.read_text().split())
    for row in ROWS:
        assert bool(row.why) == ({row.vllm, row.sglang} != {row.ours}), row
        assert f"**{row.why}**" in text or not row.why, row
