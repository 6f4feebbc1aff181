"""A full reply: the fold of an output parser's events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dovetail.contracts.output import ContentDelta, Event, Malformed, ReasoningDelta, ToolArgs, ToolStart


@dataclass(slots=True)
class ToolCall:
    """A call as folded from its events."""

    id: str
    name: str
    _parts: list[str] = field(default_factory=list, repr=False)

    @property
    def arguments(self) -> str:
        """The arguments' JSON text, as far as it was generated."""
        if len(self._parts) > 1:
            self._parts[:] = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def add(self, json: str) -> None:
        """Append to the arguments."""
        self._parts.append(json)


@dataclass(slots=True)
class Folded:
    """A full reply. Absent parts are None."""

    reasoning: str | None
    content: str | None
    tool_calls: list[ToolCall]


def fold(events: Iterable[Event]) -> Folded:
    """Put a reply together. What no format explains is content."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    for event in events:
        if isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        elif isinstance(event, (ContentDelta, Malformed)):
            content.append(event.text)
        elif isinstance(event, ToolStart):
            calls.append(ToolCall(event.id, event.name))
        elif isinstance(event, ToolArgs):
            calls[event.index].add(event.json)
    return Folded("".join(reasoning) or None, "".join(content) or None, calls)
