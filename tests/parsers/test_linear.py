"""Work stays in proportion to the output in every format: operations are counted, not timed."""

from __future__ import annotations

import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from dovetail.contracts.output import FormatSpec
from dovetail.sdk.formats.output import make_parser
from dovetail_testing.operations import operations

sys.path.insert(0, str(Path(__file__).parent))  # the table beside this file

from samples import CALLS

entry_points = cache(metadata.entry_points)
"""All metadata is read for it, and most tests ask."""

OPENINGS = {
    "hermes": ['<tool_call>{"name": "f", "arguments": {"a": "'],
    "qwen3-coder": ["<tool_call><function=f>", "<tool_call><function=f><parameter=a>", "<function="],
    "minimax-m2": ['<minimax:tool_call><invoke name="f"><parameter name="a">'],
    "seed-oss": ["<seed:tool_call><function=f><parameter="],
    "deepseek-v3": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
    ],
    "deepseek-v31": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>x"],
    "deepseek-v32": ['<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">'],
    "kimi-k2": ["<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{"],
    "glm45": ["<tool_call>f<arg_key>a</arg_key>", "<tool_call>f<arg_key>a</arg_key><arg_value>"],
    "llama3": ["", '{"name": "f", "x": ', "<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]"],
    "pythonic": ["[", "[f(a=", "[f(a='"],
    "gpt-oss": ["", "<|channel|>", "<|channel|>commentary to=functions.f<|message|>"],
}
OPENINGS |= {name: [call.partition("Rom")[0]] for name, call in CALLS.items() if name not in OPENINGS}
UNITS = [
    *("a", " ", "\n", "<", "</", "[", "]", "{", "}", '"', "\\", "'", ",", "f(", "<｜", "<|", "```"),
    *("</parameter> ", "</arg_value>", "<|channel|>", "<|end|>"),
]


def test_every_format_is_here() -> None:
    """A parser cannot be added without openings to try."""
    found = {e.name for e in entry_points(group="dovetail.tool_parsers.v1") if e.value.startswith("dovetail_parsers.")}
    assert found == {*OPENINGS, "template"}  # the last reads with the bodies of the others


@pytest.mark.parametrize("name", OPENINGS)
def test_parsing_is_linear(name: str) -> None:
    """Twice the output costs at most about twice the operations, whatever is repeated behind whatever beginning.

    A unit stands behind one of a format's openings in turn, every other one in every other format.
    """
    (entry,) = entry_points(group="dovetail.tool_parsers.v1", name=name)
    spec = entry.load()().extend(FormatSpec(), [])

    def parse(text: str) -> None:
        parser = make_parser(spec)
        for begin in range(0, len(text), 3):
            parser.feed((), text[begin : begin + 3])
        parser.finish("length")

    openings, number = OPENINGS[name], list(OPENINGS).index(name)
    for at, opening in enumerate(openings):
        for unit in UNITS[(at + number) % (2 * len(openings)) :: 2 * len(openings)]:
            one, two = (operations(lambda: parse(opening + unit * (n // len(unit)))) for n in (300, 600))  # noqa: B023
            assert two <= 2.3 * one + 300, (opening, unit)
