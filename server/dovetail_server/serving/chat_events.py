"""What a chat client gets to see of a choice; a stream and a full reply apply the same wishes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.contracts.output import Event, ReasoningDelta, ToolArgs, ToolEnd, ToolStart
from dovetail.text.parsing.output import ToolCall
from dovetail.text.parsing.stream import OutputStream


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatView:
    """The request's wishes about what is shown."""

    include_reasoning: bool = True
    parallel_tool_calls: bool = True

    def events(self, events: Sequence[Event]) -> Sequence[Event]:
        """Return the events that are shown."""
        if self.include_reasoning and self.parallel_tool_calls:
            return events
        return [event for event in events if self._shows(event)]

    def reasoning(self, output: OutputStream) -> str | None:
        """Return the reasoning of a full reply."""
        return output.reasoning if self.include_reasoning else None

    def tool_calls(self, output: OutputStream) -> Sequence[ToolCall]:
        """Return the tool calls of a full reply."""
        return output.tool_calls if self.parallel_tool_calls else output.tool_calls[:1]

    def _shows(self, event: Event) -> bool:
        if isinstance(event, ReasoningDelta):
            return self.include_reasoning
        if isinstance(event, ToolStart | ToolArgs | ToolEnd):
            return self.parallel_tool_calls or event.index == 0
        return True
