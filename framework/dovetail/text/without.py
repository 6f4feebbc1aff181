"""`Without`: a reader of a tool section that does not see certain markers in it."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.contracts.tools import ToolBody, ToolEvent
from dovetail.text.matcher import matcher


class Without(ToolBody):
    """Drops markers that mean nothing to the reader inside, such as those around one call of a list.

    A marker inside a value is part of it, and what may still become one is held back.
    """

    def __init__(self, body: ToolBody, markers: Sequence[str]) -> None:
        """Prepare; `body` reads what is left."""
        self._body = body
        self._matcher = matcher(tuple(markers))
        self._held = ""
        self._state = 0

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        if not self._held and self._matcher.begins(text) is None:
            return self._body.feed(text)
        read, state = len(self._held), self._state if self._held else 0
        text, self._held = self._held + text, ""
        events: list[ToolEvent] = []
        pos = 0
        while pos < len(text):
            end, state, length = self._matcher.scan(text, pos + read, state)
            read = 0
            cut = end - (length or self._matcher.held(state))
            events += self._body.feed(text[pos:cut]) if cut > pos else []
            if not length:
                self._held, self._state = text[cut:], state
                break
            if self._body.inside_value:
                events += self._body.feed(text[cut:end])
            pos = end
        return events

    def close(self) -> list[ToolEvent]:
        """End the section."""
        return [*self._rest(), *self._body.close()]

    def cut(self) -> list[ToolEvent]:
        """End the section, cut short."""
        return [*self._rest(), *self._body.cut()]

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends inside a value."""
        return self._body.inside_value

    def _rest(self) -> list[ToolEvent]:
        held, self._held = self._held, ""
        return self._body.feed(held) if held else []
