"""`MarkedCalls`: what readers share whose calls stand between marks, with text around them.

Text is read up to the next mark that counts where the reader is. What may be the beginning of one is held until more
text decides, and how far it was read is kept, so that no character is looked at twice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from dovetail.contracts.output import Malformed, ToolBody, ToolEvent
from dovetail.text.parsing.matcher import Matcher

BROKEN = "broken"
"""Where a reader is that found text which no call explains: it looks for the next call's mark."""


class MarkedCalls(ToolBody):
    """Reads text between marks. A subclass says which marks count, and what they and the text between them mean."""

    _at: str

    def __init__(self, marks: Mapping[str, Matcher], begins: Matcher | None) -> None:
        """Begin with nothing held.

        Args:
            marks: Those that count, by where the reader is.
            begins: The mark that begins a call, None where none does.
        """
        self._marks, self._begins = marks, begins
        self._out: list[ToolEvent] = []
        self._held = ""
        self._read_on = (0, 0)
        """How much of what is held was read, and the matcher's state behind it."""

    def close(self) -> list[ToolEvent]:
        """End the section: a call that was open is complete; one without arguments has none."""
        return self._finish(complete=True)

    def cut(self) -> list[ToolEvent]:
        """End the section: a call that was cut short keeps what it has."""
        return self._finish(complete=False)

    @abstractmethod
    def _finish(self, *, complete: bool) -> list[ToolEvent]:
        """End the section."""

    @abstractmethod
    def _resume(self) -> None:
        """Go on where a call's mark begins, behind text that belonged to none."""

    @abstractmethod
    def _text(self, text: str) -> None:
        """Take text between marks."""

    @abstractmethod
    def _mark(self, mark: str, start: int, end: int) -> int:
        """Take a mark that stands from `start` to `end`; return where to read on."""

    def _take_out(self) -> list[ToolEvent]:
        out, self._out = self._out, []
        return out

    def _goes_on_in_mark(self, text: str) -> bool:
        """Whether all of a new piece may still belong to the mark that has begun: then it is held, too."""
        if state := self._marks[self._at].follow(text, self._read_on[1]):
            self._held += text
            self._read_on = (len(self._held), state)
            return True
        return False

    def _read(self, text: str, pos: int) -> int:
        """Read up to the next mark that counts here, or as far as there certainly is none; return where."""
        found = self._marks[self._at]
        read, state = self._read_on
        end, state, length = found.scan(text, pos + read, state)
        self._read_on = (0, 0)
        cut = end - (length or found.held(state))
        self._text(text[pos:cut])
        if self._at == BROKEN:
            return cut
        if not length:
            self._held = text[cut:]
            self._read_on = (end - cut, state)
            return len(text)
        return self._mark(text[cut:end], cut, end)

    def _skip_noise(self, text: str, pos: int) -> int:
        """Give out text that belongs to no call, up to the mark of the next one; return where it stands."""
        found = self._begins
        if found is None:
            self._out.append(Malformed("tool_call", text[pos:]))
            return len(text)
        end, state, length = found.scan(text, pos, 0)
        cut = end - (length or found.held(state))
        if cut > pos:
            self._out.append(Malformed("tool_call", text[pos:cut]))
        if not length:
            self._held = text[cut:]
            return len(text)
        self._resume()
        return cut
