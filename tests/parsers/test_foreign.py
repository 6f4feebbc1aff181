"""Replies that other servers' reasoning parsers read otherwise; docs/output.md says why."""

from __future__ import annotations

from importlib import metadata

import pytest

from dovetail.messages import Finish
from dovetail.text.parsing.stream import OutputStream
from dovetail.text.tokenizer.tokenizer import Tokenizer

OPENED = "<think>\n"
READ: dict[tuple[str, str, str], tuple[str | None, str | None]] = {
    ("gemma4", "", "<|channel>thought\nabc<channel|>xyz"): ("abc", "xyz"),
    ("gemma4", "", "<|channel>abc<channel|>xyz"): (None, "<|channel>abc<channel|>xyz"),
    ("gemma4", "", "thought\nabc<channel|>xyz"): (None, "thought\nabc<channel|>xyz"),
    ("gemma4", "", "abc<channel|>xyz"): (None, "abc<channel|>xyz"),
    ("minimax-m2-append-think", OPENED, "abc</think>xyz"): (None, "<think>abc</think>xyz"),
    ("minimax-m2-append-think", "", "abc</think>xyz"): (None, "abc</think>xyz"),
}
"""By parser, end of the prompt and reply: reasoning and content."""


@pytest.mark.parametrize(("name", "tail", "text"), READ)
def test_what_others_read_otherwise(name: str, tail: str, text: str, tokenizer: Tokenizer) -> None:
    """A channel without the header of thoughts is no thought; a marker that no prompt has is not put in front."""
    (entry,) = metadata.entry_points(group="dovetail.reasoning_parsers.v1", name=name)
    stream = OutputStream(tokenizer, reasoning=entry.load()(), prompt_tail=tail)
    stream.feed_ids(tokenizer.encode(text, add_special_tokens=False), Finish("stop"))
    assert (stream.reasoning, stream.content) == READ[name, tail, text]
