"""`MarkedCalls`: what readers share whose calls stand between marks, with text around them.

Text is read up to the next mark that counts where the reader is. What may be the beginning of one is held until more
text decides, and how far it was read is kept, so that no character is looked at twice.

A call is in doubt that begins outside of a section, or behind text that belongs to none: a model may have named the
mark only. It counts if its name is a tool's and it ends; until then nothing of it is given out, and where it does not
count it is text, as it came. One of another name counts in a section that begins a line or follows a call, if it ends.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.output import Malformed, NewCall, ToolArgs, ToolBody, ToolEnd, ToolEvent, ToolStart
from dovetail.sdk.formats.matcher import Matcher
from dovetail.sdk.formats.place import Place
from dovetail.sdk.formats.schema_types import is_tool

BROKEN = "broken"
"""Where a reader is that found text which no call explains: it looks for the next call's mark."""


class MarkedCalls(ToolBody):
    """Reads text between marks. A subclass says which marks count, and what they and the text between them mean."""

    _at: str

    def __init__(
        self,
        new_call: NewCall,
        tools: Sequence[Mapping[str, Any]],
        marks: Mapping[str, Matcher],
        begins: Matcher | None,
    ) -> None:
        """Begin with nothing held.

        Args:
            new_call: Numbers the calls.
            tools: As OpenAI writes them: a call in doubt names one of them.
            marks: Those that count, by where the reader is.
            begins: The mark that begins a call, None where none does.
        """
        self._new_call, self._tools = new_call, tools
        self._marks, self._begins = marks, begins
        self._out: list[ToolEvent] = []
        self._call: int | None = None
        self._raw: list[str] = []
        """Text that no call explains yet, or that of a call in doubt."""
        self._is_outside = self._is_doubtful = self._doubts_names = False
        self._certain: list[ToolEvent] = []
        """What was said before a call that is in doubt."""
        self._place = Place(behind_call=True)
        self._held = ""
        self._read_on = (0, 0)
        """How much of what is held was read, and the matcher's state behind it."""

    def close(self) -> list[ToolEvent]:
        """End the section: a call that was open is complete; one without arguments has none."""
        return self._finish(complete=True)

    def cut(self) -> list[ToolEvent]:
        """End the section: a call that was cut short keeps what it has."""
        return self._finish(complete=False)

    def doubt(self) -> None:
        """Every call of this section is in doubt, and what belongs to none ends it."""
        self._is_outside = self._is_doubtful = True

    def doubt_names(self) -> None:
        """The first call has a tool's name, or is none."""
        self._doubts_names = True

    @abstractmethod
    def _finish(self, *, complete: bool) -> list[ToolEvent]:
        """End the section."""

    @abstractmethod
    def _resume(self) -> None:
        """Go on where a call's mark begins, behind text that belonged to none."""

    @abstractmethod
    def _text(self, text: str) -> None:
        """Take text between marks."""

    def _breaks_behind(self, text: str, pos: int, end: int) -> int:
        """Return up to where text from `pos` to a mark is taken: behind a character that no call explains.

        What follows it is looked at for the mark of the next call, however the text was cut. Asked where no call that
        is certain has begun.
        """
        return end

    @abstractmethod
    def _mark(self, mark: str, start: int, end: int) -> int:
        """Take a mark that stands from `start` to `end`; return where to read on."""

    def _take_out(self) -> list[ToolEvent]:
        if self._is_held:
            out, self._certain = self._certain, []
        else:
            out, self._out = self._out, []
        return out

    _is_held = False
    """Whether a call in doubt has begun."""

    def _begin_call(self, name: str, call_id: str | None = None) -> int | None:
        """Begin a call; return its index, -1 while it is in doubt. None: it is no call."""
        is_known = is_tool(name, self._tools)
        if not is_known and (self._is_doubtful or self._doubts_names):
            return None
        if is_known and not self._is_doubtful:
            start, self._doubts_names = self._new_call(name, call_id), False
            self._raw.clear()
        else:
            start = ToolStart(-1, call_id or "", name)
            self._certain, self._out, self._is_held = self._out, [], True
        self._out.append(start)
        return start.index

    def _settle(self) -> None:
        """A call has ended: it counts if it was in doubt, and the next is so only outside of a section."""
        if self._is_held:
            start, *said = self._out
            if isinstance(start, ToolStart):
                start = self._new_call(start.name, start.id or None)
                text = "".join([event.json for event in said if isinstance(event, ToolArgs)])
                beside = [event for event in said if isinstance(event, Malformed)]
                arguments = [ToolArgs(start.index, text)] if text else []
                self._certain += [start, *arguments, *beside, ToolEnd(start.index)]
            self._out, self._certain, self._is_held = self._certain, [], False
            self._raw.clear()
        self._is_doubtful, self._doubts_names = self._is_outside, False

    def _break(self) -> None:
        """Give up on what was read since the last call: it goes out as it came, up to the mark of the next."""
        self._at = BROKEN
        self._call = None
        if self._is_held:
            self._out, self._certain, self._is_held = self._certain, [], False
        raw = "".join(self._raw)
        self._raw.clear()
        if self._is_outside:
            self.left = (raw, "")
        elif raw:
            self._give_noise(raw)

    def _give_noise(self, text: str) -> None:
        self._place.feed(text)
        self._out.append(Malformed("tool_call", text))

    def _goes_on_in_mark(self, text: str) -> bool:
        """Whether all of a new piece may still belong to the mark that has begun: then it is held, too."""
        if state := self._marks[self._at].follow(text, self._read_on[1]):
            self._held += text
            self._read_on = (len(self._held), state)
            return True
        return False

    def _read(self, text: str, pos: int) -> int:
        """Read up to the next mark that counts here, or as far as there certainly is none; return where."""
        found, (read, state) = self._marks[self._at], self._read_on
        end, state, length = found.scan(text, pos + read, state)
        self._read_on = (0, 0)
        cut = end - (length or (state and found.held(state)))
        if cut > pos + 1 and (self._call is None or self._is_held):
            cut_short = self._breaks_behind(text, pos, cut)
            if cut_short < cut:
                self._text(text[pos:cut_short])
                return cut_short
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
        if self.left is not None:
            self.left = (self.left[0], self.left[1] + text[pos:])
            return len(text)
        if found is None:
            self._give_noise(text[pos:])
            return len(text)
        end, state, length = found.scan(text, pos, 0)
        cut = end - (length or found.held(state))
        if cut > pos:
            self._give_noise(text[pos:cut])
        if not length:
            self._held = text[cut:]
            return len(text)
        if self._place.is_quoted:
            self._give_noise(text[cut:end])
            return end
        self._is_doubtful = True
        self._resume()
        return cut
