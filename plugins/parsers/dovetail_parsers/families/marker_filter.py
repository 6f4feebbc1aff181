"""`MarkerFilter`: a reader of a tool section that does not see certain markers in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.contracts.output import Malformed, ToolBody, ToolEnd, ToolEvent, ToolStart
from dovetail.sdk.formats.matcher import matcher

MAX_NOISE = 512
"""Characters that are held until it is known whether a call follows."""


class MarkerFilter(ToolBody):
    """Drops markers that mean nothing to the reader inside, such as those around one call of a list.

    A marker inside a value is part of it, and what may still become one is held back. Where no call follows, the
    markers come back with the text around them.
    """

    def __init__(self, body: ToolBody, markers: Sequence[str], *, is_open: bool = False) -> None:
        """Prepare.

        Args:
            body: Reads what is left.
            markers: Those that it does not see.
            is_open: Only the output's end closes the section, so text behind its calls is an answer, with its markers.
        """
        self._body, self._is_open = body, is_open
        self._in_answer = False
        self._matcher = matcher(tuple(markers))
        self._held = ""
        self._state = 0
        self._has_call = False
        self._noise: list[str] = []
        self._num_noise = 0
        self._with_markers: list[str] = []
        self._is_noise = False
        """Whether what came so far is too long for the noise before a call."""
        self._is_doubtful = False
        self._dropped: list[str] = []
        """The markers since the last call, where calls are in doubt."""

    def doubt(self) -> None:
        """Its calls are in doubt."""
        self._is_doubtful = True
        self._body.doubt()

    def doubt_names(self) -> None:
        """Its first call must name a tool."""
        self._body.doubt_names()

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        has_none = self._in_answer or self._matcher.begins(text) is None
        if not self._held and has_none and not self._is_doubtful:
            return self._feed(text)
        read, state = len(self._held), self._state if self._held else 0
        text, self._held = self._held + text, ""
        events: list[ToolEvent] = []
        pos = 0
        while pos < len(text):
            end, state, length = self._matcher.scan(text, pos + read, state)
            read = 0
            cut = end - (length or self._matcher.held(state))
            events += self._feed(text[pos:cut]) if cut > pos else []
            if self._body.left is not None:
                raw, rest = self._body.left
                self.left = "".join(self._dropped) + raw, rest + text[cut:]
                break
            if not length:
                self._held, self._state = text[cut:], state
                break
            if self._is_doubtful and not self._body.inside_value:
                self._dropped.append(text[cut:end])
            if self._body.inside_value or self._in_answer:
                events += self._feed(text[cut:end])
            elif self._is_noise:
                events.append(Malformed("tool_call", text[cut:end]))
            elif not self._has_call:
                self._with_markers.append(text[cut:end])
            pos = end
        return events

    def close(self) -> list[ToolEvent]:
        """End the section."""
        return self._finish(self._body.close)

    def cut(self) -> list[ToolEvent]:
        """End the section, cut short."""
        return self._finish(self._body.cut)

    def _finish(self, finish: Callable[[], list[ToolEvent]]) -> list[ToolEvent]:
        events = [*self._rest(), *self._taken(finish()), *self._shown()]
        if self._body.left is not None:
            self.left = "".join(self._dropped) + self._body.left[0], self._body.left[1]
        return events

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends inside a value."""
        return self._body.inside_value

    def _rest(self) -> list[ToolEvent]:
        held, self._held = self._held, ""
        return self._feed(held) if held else []

    def _feed(self, text: str) -> list[ToolEvent]:
        events = self._body.feed(text)
        if events and (not self._has_call or self._is_doubtful):
            return self._taken(events)
        self._in_answer = self._in_answer or (self._is_open and any(type(event) is Malformed for event in events))
        return events

    def _taken(self, events: list[ToolEvent]) -> list[ToolEvent]:
        """Hold the noise before the first call, and what was dropped between."""
        if self._is_noise and len(events) == 1 and type(events[0]) is Malformed:
            return events
        taken: list[ToolEvent] = []
        for event in events:
            if isinstance(event, Malformed) and not self._has_call:
                self._noise.append(event.text)
                self._with_markers.append(event.text)
                self._num_noise += len(event.text)
                self._is_noise = self._num_noise > MAX_NOISE
                taken += self._shown() if self._is_noise else []
                continue
            if isinstance(event, ToolEnd):
                self._dropped.clear()
            if isinstance(event, ToolStart) and not self._has_call:
                self._has_call, self._is_noise = True, False
                taken += [Malformed("tool_call", "".join(self._noise))] if self._noise else []
            self._in_answer = self._in_answer or (self._is_open and isinstance(event, Malformed))
            taken.append(event)
        return taken

    def _shown(self) -> list[ToolEvent]:
        """Return what is held with the markers in it: it is no beginning of a call."""
        if self._has_call or not self._noise:
            return []
        text = "".join(self._with_markers)
        self._noise.clear()
        self._with_markers.clear()
        return [Malformed("tool_call", text)]
