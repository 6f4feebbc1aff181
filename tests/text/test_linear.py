"""Work stays in proportion to the output: operations are counted, not timed."""

from __future__ import annotations

import pytest

from dovetail.contracts.output import FormatSpec, Markers, ToolFormat
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail.sdk.formats.matcher import StopMatcher
from dovetail.sdk.formats.output import FormatParser
from dovetail_testing.operations import operations

FULL = FormatSpec(
    reasoning=Markers("<think>", "</think>", ended_by_tools=True),
    tools=ToolFormat("<tool_call>", "</tool_call>", JsonCalls),
)
PATHOLOGICAL = {
    "plain": "a",
    "unfinished marker": "<",
    "almost a marker": "<tool_cal",
    "start markers": "<think>",
    "end markers": "</think>",
    "sections": "<tool_call></tool_call>",
    "sections never closed": "<tool_call>",
    "calls": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "newlines": "\n",
    "newlines and text": "\n\na",
    "nesting": "[",
    "escapes": "\\",
    "quotes": '"',
}
OPENINGS = {
    "content": "",
    "reasoning": "<think>",
    "section": "<tool_call>",
    "arguments": '<tool_call>{"name": "f", "arguments": {"x": ',
    "string": '<tool_call>{"name": "f", "arguments": {"x": "',
    "unnamed": '<tool_call>{"arguments": {"x": "',
}


def parse(text: str, size: int) -> None:
    parser = FormatParser(FULL)
    for begin in range(0, len(text), size):
        parser.feed((), text[begin : begin + size])
    parser.finish("length")


@pytest.mark.sampled
@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("unit", PATHOLOGICAL)
def test_parsing_is_linear(opening: str, unit: str) -> None:
    """Twice the output costs at most about twice the operations, in small pieces and in one."""
    for size in (3, 1 << 20):
        one, two = (
            operations(lambda: parse(OPENINGS[opening] + PATHOLOGICAL[unit] * (n // len(PATHOLOGICAL[unit])), size))  # noqa: B023
            for n in (600, 1200)
        )
        assert two <= 2.2 * one + 100


def test_a_hundred_thousand_characters_of_an_unfinished_marker_cost_what_they_must() -> None:
    """A long run that always may begin a marker, or a tag of HTML, stays at some operations a character."""
    text = "<" * 100_000
    assert operations(lambda: parse(text, 4)) < 60 * len(text)


def test_stop_strings_are_linear_in_the_text() -> None:
    """A text that keeps almost matching a long stop string is read once."""

    def work(length: int) -> None:
        stop = StopMatcher(["a" * 500 + "b", "ab" * 200 + "c"])
        for _ in range(length // 4):
            stop.feed("aaba")

    work(8)
    one, two = operations(lambda: work(4000)), operations(lambda: work(8000))
    assert two <= 2.2 * one
