"""Python calls that are not quite Python: what the tool's schema says is understood, in every chunking."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from dovetail.contracts.output import FormatSpec, ToolFormat
from dovetail.sdk.formats.output import fold, make_parser
from dovetail_parsers.families.pythonic_calls import PythonicCalls

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "deep": {"type": "object"},
    "on": {"type": "boolean"},
    "any": {},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "w", "parameters": {"properties": PROPERTIES}}}
]
SPEC = FormatSpec(
    tools=ToolFormat("<S>", "</S>", body=lambda new: PythonicCalls(new, TOOLS), before_start="", bare="[")
)
CASES = {
    "[w(city=Rome, days=3)]": {"city": "Rome", "days": 3},
    "[w(city=Rome, Italy, on=True)]": {"city": "Rome, Italy", "on": True},
    '[w(city=the "old" town\n& more, days=3)]': {"city": 'the "old" town\n& more', "days": 3},
    '[w(city="the "old" town", days=3)]': {"city": 'the "old" town', "days": 3},
    "[w(days='3', on='True')]": {"days": 3, "on": True},
    "[w(deep=\"{'a': [1, None]}\")]": {"deep": {"a": [1, None]}},
    "[w(city=3)]": {"city": "3"},
    "[w(any='3')]": {"any": "3"},
    '[w(city="Rome"days=3deep={"a": 1}on=true)]': {"city": "Rome", "days": 3, "deep": {"a": 1}, "on": True},
    "[w(city=Rome)]": {"city": "Rome"},
    "[w(city='don't stop', days=3)]": {"city": "don't stop", "days": 3},
    "[w(city='it\\'s \\\\n, don't ' )]": {"city": "it's \\n, don't "},
    "[w(any=['don't', {'k's': 'a 'b' c'}])]": {"any": ["don't", {"k's": "a 'b' c"}]},
    '[w(city="5" tall"days=3)]': {"city": '5" tall', "days": 3},
}


def read(text: str, size: int) -> Any:
    parser = make_parser(SPEC, make_id=lambda: "id")
    events = [event for at in range(0, len(text), size) for event in parser.feed((), text[at : at + size])]
    return fold([*events, *parser.finish("stop")])


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("size", [1, 2, 5, 999])
def test_what_the_schema_explains(text: str, size: int) -> None:
    """Words without quotes, quotes within quotes, numbers in quotes, and commas that are missing."""
    reply = read(text, size)
    assert reply.content is None
    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [("w", CASES[text])]


@pytest.mark.parametrize("text", ["[w(days=soon)] so", "[f(a=soon)] so", "[w(city=Rome, days=soon)] so", "[w(city=Ro"])
@pytest.mark.parametrize("size", [1, 999])
def test_what_nothing_explains_is_content(text: str, size: int) -> None:
    """Whole where no argument of the call was understood; nothing is lost."""
    reply = read(text, size)
    assert text.endswith(reply.content)
    assert "soon" in reply.content or reply.content == text


def test_a_megabyte_without_commas_is_quick() -> None:
    """Only a few places are tried, and no more arguments than the tool has."""
    reply = read('[w(city="x"' + 'days="y"' * 100_000 + ")]", 4096)
    assert len((reply.content or "") + "".join(call.arguments for call in reply.tool_calls)) > 100_000


def test_many_strings_in_one_piece_are_linear() -> None:
    """A long text that comes at once is not searched anew from each quote to its end."""

    def spent(size: int) -> float:
        parser = make_parser(SPEC)
        begin = time.process_time()
        parser.feed((), "[w(city='a 'b," + "x, '" * (size // 4))
        parser.finish("stop")
        return time.process_time() - begin

    assert spent(2_000_000) < 100 * min(spent(100_000) for _ in range(3))  # 20 times; 400 if it were searched anew
