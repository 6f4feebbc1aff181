"""`Aside`: what looks like a call within thinking, until it is known whether thinking went on.

Models begin a call without closing their thinking, and they think about calls. Both look alike until the thinking is
closed, and an answer follows, or the reply is over. Meanwhile the text is held, and read as if it were the answer's.
"""

from __future__ import annotations

from dovetail.contracts.output import ContentDelta, Event, Malformed, ToolEnd
from dovetail.sdk.formats.sections import SectionParser


class Aside:
    """Text within thinking from the marker of a call on.

    Attributes:
        marker: What it begins with.
        end: The marker that closed the thinking, and the whitespace behind it; empty before.
    """

    def __init__(self, marker: str, reader: SectionParser | None) -> None:
        """Begin; `reader` reads it as an answer. None: there are no calls, and it may be an answer itself."""
        self.marker = marker
        self._reader = reader
        self._parts: list[str] = []
        self._events: list[Event] = []
        self.end = ""
        self.feed(marker)

    @property
    def text(self) -> str:
        """All of it, before the thinking's end."""
        return "".join(self._parts)

    @property
    def patience(self) -> int:
        """Of its reader."""
        return 0 if self._reader is None else self._reader.patience

    @property
    def is_none(self) -> bool:
        """Whether it certainly is no call: its marker is followed by something else."""
        return bool(self._events) and isinstance(self._events[0], (ContentDelta, Malformed))

    def feed(self, text: str) -> None:
        """Take more text."""
        self._parts.append(text)
        if self._reader is not None:
            self._events += self._reader.feed((), text)

    def calls(self, reason: str) -> list[Event] | None:
        """Return the calls and the text beside them, at the end of the response; None: they belong to the reasoning.

        Calls that were cut short count only behind one that is whole. Where the thinking was closed behind them, they
        count as nothing follows.
        """
        if self._reader is None:
            return None if self.end else [ContentDelta(self.text)]
        is_whole = any(isinstance(event, ToolEnd) for event in self._events)
        self._events += self._reader.finish(reason)
        if not self._events or self.is_none or not (is_whole or (reason == "stop" and not self.end)):
            return None
        return self._events
