"""Whether the events of a reply tell a consistent story of its tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dovetail.contracts.output import ContentDelta, Event, Malformed, ReasoningDelta, ToolArgs, ToolEnd, ToolStart
from dovetail_testing.checks import check, fail
from dovetail_testing.samples import Sample


def check_events(events: Sequence[Event], sample: Sample) -> None:
    """Check order, numbering and ends; where the sample states its calls, that their arguments are valid JSON."""
    where = f"in the reply to {sample.text!r}"
    arguments: list[str] = []
    live: set[int] = set()
    for event in events:
        if isinstance(event, ToolStart):
            check(
                event.index == len(arguments),
                f"wrong tool index: call {len(arguments)} has index {event.index} {where}",
            )
            check(isinstance(event.name, str) and bool(event.name), f"call {event.index} has no name {where}")
            check(bool(event.id), f"call {event.index} has no id {where}")
            arguments.append("")
            live.add(event.index)
        elif isinstance(event, ToolArgs):
            check(
                event.index in live, f"wrong tool index: arguments for call {event.index}, which is not open, {where}"
            )
            arguments[event.index] += event.json
        elif isinstance(event, ToolEnd):
            check(event.index in live, f"call {event.index} ends twice or never began {where}")
            live.discard(event.index)
        elif isinstance(event, ReasoningDelta | ContentDelta | Malformed):
            check(bool(event.text), f"an empty {type(event).__name__} is sent {where}")
        else:
            fail(f"{event!r} is no event of the contract {where}")
    check(not live, f"calls {sorted(live)} are never ended {where}")
    _check_json(arguments, sample)


def _check_json(arguments: Sequence[str], sample: Sample) -> None:
    for number, (name, declared) in enumerate(sample.tool_calls):
        if number >= len(arguments) or not is_json(declared):
            continue
        check(
            is_json(arguments[number]),
            f"the argument deltas of call {number} ({name}) add up to {arguments[number]!r}, which is not valid JSON",
        )


def is_json(text: str) -> bool:
    """Whether `text` is JSON."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
