"""`PerCall`: a section whose calls stand between markers of their own, each read by a reader of its own."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.contracts.output import Malformed, ToolBody, ToolEvent, ToolStart
from dovetail.sdk.formats.matcher import matcher
from dovetail.sdk.formats.place import Place


class PerCall(ToolBody):
    """Cuts a section into calls; text between them is `Malformed`.

    A marker inside a value is part of it, unless the next call, or nothing, follows the marker that ends one.
    """

    def __init__(self, make: Callable[[], ToolBody], begin: str, end: str) -> None:
        """Prepare; `make` makes the reader of one call, which stands between `begin` and `end`."""
        self._make, self._begin = make, begin
        self._matcher = matcher((begin, end))
        self._held = ""
        self._closer = ""
        self._space = ""
        self._body: ToolBody | None = None
        self._ended: ToolBody | None = None
        """The reader that took text last."""
        self._is_doubtful = self._doubts_names = self._is_named = self._has_calls = False
        self._mark_of_it = ""
        self._place = Place(behind_call=True)

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        text, self._held = self._held + text, ""
        events: list[ToolEvent] = []
        pos = 0
        while pos < len(text):
            end, state, length = self._matcher.scan(text, pos, 0)
            cut = end - (length or self._matcher.held(state))
            events += self._text(text[pos:cut])
            if self._is_over(text[cut:]):
                break
            if not length:
                self._held = text[cut:]
                break
            events += self._mark(text[cut:end])
            pos = end
            if self._is_over(text[end:]):
                break
        return events

    def doubt(self) -> None:
        """Its calls are in doubt."""
        self._is_doubtful = True

    def doubt_names(self) -> None:
        """Its first call must name a tool."""
        self._doubts_names = True

    def _new_body(self, space: str) -> ToolBody:
        body, self._is_named, self._mark_of_it = self._make(), False, space + self._begin
        if self._is_doubtful:
            body.doubt()
        if self._doubts_names and not self._has_calls:
            body.doubt_names()
        return body

    def _is_over(self, rest: str) -> bool:
        """Whether what was read last belongs to no call, where calls are in doubt; `rest` was not read."""
        if self.left is None and self._ended is not None and self._ended.left is not None:
            self.left = self._begin + self._ended.left[0], self._ended.left[1]
        if self.left is not None:
            self.left = self.left[0], self.left[1] + rest
        return self.left is not None

    def close(self) -> list[ToolEvent]:
        """End the section."""
        return self._finish(complete=True)

    def cut(self) -> list[ToolEvent]:
        """End the section, cut short."""
        return self._finish(complete=bool(self._closer))

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends inside a value."""
        return self._body is not None and not self._closer and self._body.inside_value

    def _finish(self, *, complete: bool) -> list[ToolEvent]:
        held, self._held = self._held, ""
        events = self._text(held)
        if self._body is None and self._space and not self._has_calls:
            events.append(Malformed("tool_call", self._space))
        self._closer = ""
        if self._body is not None:
            events += self._noted(self._body.close() if complete else self._body.cut())
            self._body = None
        self._is_over("")
        return events

    def _text(self, text: str) -> list[ToolEvent]:
        if not text:
            return []
        if self._body is None:
            text = self._space + text
            kept = text.rstrip()
            self._space = text[len(kept) :]
            if kept and self._is_doubtful:
                self.left = (text, "")
                return []
            if not kept:
                return []
            self._place.feed(kept)
            return [Malformed("tool_call", kept)]
        if self._closer and text.isspace():
            self._closer += text
            return []
        closer, self._closer = self._closer, ""
        return self._noted(self._body.feed(closer + text))

    def _noted(self, events: list[ToolEvent]) -> list[ToolEvent]:
        """Look what a call that has no name yet says instead: what opens code or a quotation there holds behind it."""
        for at, event in enumerate(events):
            if isinstance(event, Malformed) and not self._is_named:
                events[at] = Malformed(event.kind, self._mark_of_it + event.text)
                self._place.feed(self._mark_of_it + event.text)
                self._mark_of_it = ""
            self._is_named |= isinstance(event, ToolStart)
        self._has_calls |= self._is_named
        return events

    def _mark(self, mark: str) -> list[ToolEvent]:
        body = self._body
        if body is None:
            space, self._space = self._space, ""
            if mark != self._begin and self._is_doubtful:
                self.left = (space + mark, "")
                return []
            if mark != self._begin or self._place.is_quoted:
                self._place.feed(space + mark)
                return [Malformed("tool_call", space + mark)]
            self._body = self._ended = self._new_body(space)
            return []
        if body.inside_value and not (self._closer and mark == self._begin):
            closer, self._closer = self._closer, ""
            events = body.feed(closer) if closer else []
            if mark == self._begin:
                return [*events, *body.feed(mark)]
            self._closer = mark
            return events
        closer, self._closer = self._closer, ""
        events, self._body = self._noted(body.close()), None
        if body.left is not None:
            self.left = self._begin + body.left[0], body.left[1] + closer + mark
        elif not (self._is_named or self._mark_of_it or self._is_doubtful):  # as its beginning was, its end is shown
            events += self._text(closer if mark == self._begin else closer + mark)
        if mark == self._begin and self.left is None:
            events += self._mark(mark)
        return events
