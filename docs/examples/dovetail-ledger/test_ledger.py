"""The conformance kit, what a call's values become, and what its grammar allows."""

import json
from typing import Any

from dovetail_ledger import Ledger, LedgerCall

from dovetail.contracts import ToolArgs, ToolEnd, ToolStart
from dovetail_testing import Sample, ToolParserConformance

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"enum": ["metric", "imperial"]},
                    "where": {"type": "object"},
                },
                "required": ["city"],
            },
        },
    }
]


class TestLedger(ToolParserConformance):
    name = "ledger"
    samples = (
        Sample("<ledger>f\n- a: 1\n</ledger>", tool_calls=[("f", '{"a": 1}')]),
        Sample("Well.\n<ledger>f\n</ledger>", content="Well.", tool_calls=[("f", "{}")]),
        Sample("<ledger>a.b\n- x: [1, {}]\n</ledger><ledger>c\n- y: two words\n</ledger>",
               tool_calls=[("a.b", '{"x": [1, {}]}'), ("c", '{"y": "two words"}')]),
        Sample("<ledger>no call\n</ledger>", content="<ledger>no call\n</ledger>"),
    )  # fmt: skip


def read(*pieces: str) -> Any:
    """The arguments of a call of `f` that comes in pieces."""
    body = LedgerCall(lambda name, call_id=None: ToolStart(0, "id", name), TOOLS)
    events = [event for piece in pieces for event in body.feed(piece)] + body.close()
    assert isinstance(events[-1], ToolEnd)
    return json.loads("".join(event.json for event in events if isinstance(event, ToolArgs)))


def test_the_schema_says_what_a_value_is() -> None:
    """Whatever the text looks like, and however it is cut."""
    text = 'f\n- city: 007 "Bond" </ledger>\n- days: 3\n- units: metric\n- where: {"at": [1, 2]}\n'
    wanted = {"city": '007 "Bond" </ledger>', "days": 3, "units": "metric", "where": {"at": [1, 2]}}
    assert read(text) == read(*text) == wanted
    assert read('f\n- city: "two\\nlines"\n') == {"city": "two\nlines"}


def test_its_grammar_holds_the_schema() -> None:
    """A line for each property, an enum's words alone, and nothing else required."""
    source = json.loads(Ledger().grammar(TOOLS, "required", strict=True, parallel=False).source)
    text = json.dumps(source)
    assert '"begin": "<ledger>f\\n"' in text
    assert all(f'"- {name}: "' in text for name in ("city", "days", "units", "where"))
    assert "metric|imperial" in text or '"metric"' in text
