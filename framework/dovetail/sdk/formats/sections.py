"""`SectionParser`: sections of tool calls in a reply, for the parser of formats that markers describe.

A marker opens a section, which a `ToolBody` reads, or begins a call without one. The latter counts only where a call is
not merely named, and if it turns out to be whole; else its text is read again, as text. Noise in a section is held
for a while: if a call follows, it is content without the section's markers, else with them.
"""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, cast

from dovetail.contracts.output import Event, FormatSpec, Malformed, ToolArgs, ToolBody, ToolEvent, ToolStart
from dovetail.sdk.formats.detokenizer import TokenTables
from dovetail.sdk.formats.layout import FormatLayout, ReplyPhase, Role
from dovetail.sdk.formats.machine import IncrementalParser
from dovetail.sdk.formats.place import Place

PIECE = 1024
"""Characters of text without ids that are looked at in one go."""
MAX_DOUBTED = 1 << 20
"""Characters of calls that turned out to be none; behind them a call needs its section's marker."""
MAX_NOISE = 512
"""Characters of noise in a section that are held until it is known whether a call follows."""
CALLING = frozenset([Role.TOOL_START, Role.TOOL_TEXT, Role.TOOL_BARE, Role.BREAK])
"""Roles of markers that begin calls."""


class SectionParser(IncrementalParser):
    """What `FormatParser` does with calls.

    Attributes:
        patience: Characters of calls that may still turn out to be none.
    """

    def __init__(self, spec: FormatSpec, layout: FormatLayout, tokenizer: TokenTables | None, **given: Any) -> None:
        """Prepare; arguments as for `FormatParser`, and its layout."""
        super().__init__(layout, tokenizer, **given)
        self._tools, self._answer = spec.tools, spec.answer
        self._skip = self._tail = ""
        self._lead: list[str] | None = self._new_lead()
        self._body: ToolBody | None = None
        self._opening = ""
        self._explained = self._broken = False
        self._noise: list[str] = []
        self._noise_len = 0
        self._blank: list[str] | None = None
        """What stands in a section behind its marker, as long as that is only whitespace."""
        self._closer: list[str] = []
        self._in_doubt: tuple[ReplyPhase, Place, list[str] | None, str] | None = None
        """Of a section that may be none: phase and place before it, and what was held then, the lead and the tail."""
        self.patience = MAX_DOUBTED

    @abstractmethod
    def _sink_content(self, text: str) -> None:
        """Take text of the answer."""

    def _push(self, text: str) -> None:
        """As any parser, in pieces: what turns out to be no call is read again with what follows it."""
        for begin in range(0, len(text), PIECE):
            super()._push(text[begin : begin + PIECE])
        if not text and self._unread:
            text, self._unread = self._unread, ""
            self._seen -= len(text)
            views, self._views = self._views, self._layout.by_text  # a marker that was a token is text in it
            self._push(text)
            if self._views is not views:
                self._views = views
                self._hold_again()

    def _pass_call(self, piece: str) -> list[Event]:
        self.place.last = self.place.last if self._explained else piece  # else what was read last, behind calls
        events = self._body.feed(piece) if self._body is not None else []
        if not (events or self._in_doubt):
            return []
        if self._in_doubt is not None:
            self._tool_events(events)
            if self._body is not None and self._body.left is not None:
                self._passing = None
                self._end_doubt(self._body.left)
                self._push("")
            return self._drain()
        if len(events) == 1:
            kind = type(events[0])
            if kind is ToolArgs:
                return cast("list[Event]", events)
        self._tool_events(events)
        return self._drain()

    def _is_named(self, role: enum.Enum, marker: str) -> bool:
        """Whether the marker of a call is only named here: in code, quoted, or without its section within a line."""
        if self.place.is_quoted:
            self.place.hold_call()
            return True
        if role is Role.BREAK:
            return not self.place.begins_line
        if role is Role.TOOL_BARE or self._tools is None or marker not in self._tools.also:
            return False
        on_line = bool(self._tools.start or "\n" in self._tools.before_start)
        return self.patience < 0 or (on_line and not self.place.begins_line)

    def _take_inside_value(self, role: enum.Enum, marker: str) -> None:
        """A marker in a value is part of it; one that closes the section waits for what follows it."""
        self._sink_pending()
        if role is Role.TOOL_END:
            self._closer = [marker]
        else:
            self._feed_body(marker)

    def _sink_pending(self) -> None:
        """What looked like the section's end was part of a value."""
        text, self._closer = "".join(self._closer), []
        if text:
            self._feed_body(text)

    def _feed_body(self, text: str) -> None:
        if self._body is not None:
            self._tool_events(self._body.feed(text))

    def _open_section(self, marker: str, *, in_doubt: bool = False) -> None:
        """Begin a tool section. What was dropped before it comes back if the section holds no call."""
        if self._tools is None:
            raise RuntimeError("a tool marker matched without a tool format")
        self._opening = "".join(self._lead or ()) + self._tail + marker
        self._in_doubt = (self._phase, self.place, self._lead, self._tail) if in_doubt else None
        self._tail, self._lead, self._skip = "", None, ""
        self._explained = self._broken = False
        self._noise_len = 0
        self._blank = [] if marker else None
        self._body = self._tools.body(self._new_call)
        if not (in_doubt or self.place.begins_line):
            self._body.doubt_names()
        if marker:
            self.place.feed(marker)
        if in_doubt:
            self._body.doubt()
            self.place = Place(behind_call=True)
        self._phase = ReplyPhase.TOOL

    def _end_doubt(self, left: tuple[str, str]) -> None:
        """What a section in doubt has left belongs to no call: it is read again, with the mark of a call as text."""
        (phase, place, lead, tail), raw = self._in_doubt or (ReplyPhase.OUT, Place(), None, ""), left[0]
        self._body, self._in_doubt, self._closer = None, None, []
        self.patience -= len(raw)
        self._phase = ReplyPhase.OUT
        if self._explained or self._tools is None:
            self.place, self._lead = Place(behind_call=True), self._new_lead()
        else:
            self._phase, self.place = phase, place
            mark = next((text for text in self._tools.also if raw.startswith(text)), raw[:1])
            self._lead, self._tail, raw = lead, tail, raw[len(mark) :]
            if mark:
                self._sink_content(mark)
        self._opening, self._unread = "", raw + left[1]

    def _close_section(self, marker: str, *, cut: bool = False, is_last: bool = False) -> None:
        self._closer = []
        if self._body is not None:
            self._body.is_unended = not marker
            self._tool_events(self._body.cut() if cut else self._body.close())
            if self._in_doubt is not None and self._body.left is not None:
                self._end_doubt(self._body.left)
                return
        if not self._explained:
            self._end_noise(marker, is_named=is_last and not cut)
        elif marker:
            self.place = Place(behind_call=True)
        self._body = self._in_doubt = None
        self._phase = ReplyPhase.OUT
        self._lead = self._new_lead()

    def _end_noise(self, marker: str, *, is_named: bool) -> None:
        """Give out a section without a call, with its markers.

        One in which nothing but whitespace stands says nothing if it is closed; if it is not, it counts if it
        `is_named`.
        """
        if self._opening and marker and not "".join(self._noise).strip():
            self._noise, self._broken = [], False
        elif self._blank is not None and is_named and not (marker or self._broken):
            self._noise = ["".join(self._blank)]
        if self._noise:
            self._flush_noise(self._opening)
        if marker and self._broken:
            self._event(Malformed("tool_call", marker))
        if marker:
            self.place.feed(marker)

    def _tool_events(self, events: Iterable[ToolEvent]) -> None:
        for event in events:
            if type(event) is ToolArgs:
                self._event(event)
                continue
            if isinstance(event, Malformed) and self._opening:
                self._hold_noise(event.text)
                continue
            if isinstance(event, ToolStart):
                self._flush_noise("")
                self._explained, self.place = True, Place(behind_call=True)
            elif self._explained and isinstance(event, Malformed):
                self.place.feed(event.text)
            self._event(event)

    def _hold_noise(self, text: str) -> None:
        self._broken = True
        self._noise.append(text)
        self._noise_len += len(text if self._noise_len else text.lstrip())  # a blank section may be closed yet
        if self._noise_len > MAX_NOISE:
            self._flush_noise(self._opening)

    def _flush_noise(self, opening: str) -> None:
        """Give out what stands in the section before any call, as content, and forget what opened the section."""
        self._opening = ""
        if self._noise:
            self._event(Malformed("tool_call", opening + "".join(self._noise)))
            self._noise.clear()

    def _new_lead(self) -> list[str] | None:
        """Begin a stretch of content: whitespace at its start is held while it may stand before a marker."""
        marked = self._tools is not None or self._answer is not None
        if self._phase is ReplyPhase.OPEN or (self._phase is ReplyPhase.OUT and marked):
            return []
        return None
