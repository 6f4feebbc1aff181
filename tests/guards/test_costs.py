"""What a request costs has not grown, and no more code lines are there than the limits say."""

from __future__ import annotations

import code_lines
import costs
import pytest
import request_costs

SIGN = "if it is wanted, `python tests/guards/costs.py PART --write` signs it"


def test_requests_cost_what_is_on_record() -> None:
    """A chat request, one in Anthropic's words and a line of a batch pass no more rooms, files and calls."""
    names = ("chat, streamed", "messages, streamed", request_costs.BATCH_LINE)
    found = costs.grown(costs.recorded()["requests"], request_costs.measure(names))
    assert not found, f"{SIGN}: {found}"


def test_no_package_has_more_code_lines_than_its_limit() -> None:
    """Comments, docstrings and blank lines are free."""
    found = costs.over(costs.recorded()["lines"], costs.lines())
    assert not found, f"{SIGN}: {found}"


@pytest.mark.parametrize(
    ("source", "num"),
    [
        ('"""Doc."""\n\n# why\nx = 1\n"""What x is,\nin two lines."""\n', 1),
        ('def f():\n    """Doc."""\n    return """a\nb"""\n', 3),
        ('try:\n    x = 1\nexcept E:\n    """Doc."""\nelse:\n    y = [\n        # none\n    ]\n', 6),
    ],
)
def test_code_lines_are_counted(source: str, num: int) -> None:
    """A string that is a statement documents, one that is a value is code; brackets are code."""
    assert code_lines.code_lines(source.encode()) == num


def test_rooms_are_folders_of_the_core_and_files_of_the_server() -> None:
    """Each plugin is a room; two calls in a row in one room are no change."""
    files = (
        "server/dovetail_server/start/app.py",
        "server/dovetail_server/routes/files.py",
        "framework/dovetail/text/chat/x.py",
    )
    events = [request_costs.Event(file, "f") for file in (*files, files[-1], "plugins/parsers/dovetail_parsers/p.py")]
    assert [request_costs.room(event.file) for event in events] == [
        "server/start", "server/routes", "text/chat", "text/chat", "plugin/p.py",
    ]  # fmt: skip
    assert request_costs.changes(events) == 3


def test_only_what_grew_needs_a_signature() -> None:
    """Less is welcome, a tolerance is one, memory is only shown, and what is not on record is new."""
    old = {"chat": {"changes there": 100, "calls there": 100, "MiB": 5}}
    assert costs.grown(old, {"chat": {"changes there": 102, "calls there": 108, "MiB": 50}}) == []
    assert costs.grown(old, {"chat": {"changes there": 104}, "more": {"files": 1}}) == [
        "chat: changes there 104, on record 100",
        "more: files 1, on record nothing",
    ]
