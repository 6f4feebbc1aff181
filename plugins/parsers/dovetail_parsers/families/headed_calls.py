"""`HeadedCalls`: tool calls written as a head, which holds the name, and arguments as JSON text behind it.

```
<begin> HEAD <stop> {"city": "Paris"} <end> <begin> …
```

Every marker is optional for the reader: models leave them out. The arguments' text passes through while it is
generated; where it ends is found by a scanner that is exact about strings and nesting, so that a marker in a string is
text, and one outside of them ends arguments that lack a bracket. Text that belongs to no call is `Malformed`, and
reading goes on at the next marker of a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from dovetail.contracts.output import NewCall, ToolArgs, ToolEnd, ToolEvent
from dovetail.sdk.formats.json_text import MAX_CUT_HEAD, JsonText
from dovetail.sdk.formats.matcher import matcher
from dovetail_parsers.families.marked_calls import MarkedCalls

MAX_HEAD = 512
"""Characters of the longest head; longer text is no call."""
FENCE = "```"

Head = tuple[str, str | None]
"""Name and id of a call; None for an id that the model does not write."""
At = Literal["between", "head", "open", "value", "plain", "tail", "broken"]
READ: tuple[At, ...] = ("between", "head", "plain", "tail")
"""Where text is read up to the next mark."""


def is_half_a_head(text: str) -> bool:
    """Whether text at which the output was cut short may be half a head or a tag: then it is not worth showing."""
    return len(text) <= MAX_CUT_HEAD and len(text.split()) <= 2


class HeadedCalls(MarkedCalls):
    """Reads calls one after the other. Arguments that are no JSON object pass as written; none are `{}`."""

    def __init__(
        self,
        new_call: NewCall,
        *,
        read_head: Callable[[str], Head | None],
        stops: Sequence[str],
        begin: str = "",
        end: str = "",
        is_fenced: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Prepare.

        Args:
            new_call: Numbers the calls.
            read_head: Takes name and id from a head; None: it is none.
            stops: Texts that end a head. Besides, the `{` of the arguments does.
            begin: Marker before a call, if there is one.
            end: Marker behind a call, if there is one.
            is_fenced: A fence ends arguments that lack a bracket, as a marker does.
            tools: As OpenAI writes them, of which a call in doubt names one.
        """
        found = matcher(tuple(dict.fromkeys(text for text in (begin, *stops, "{", end) if text)))
        super().__init__(new_call, tools, dict.fromkeys(READ, found), matcher((begin,)) if begin else None)
        self._read_head = read_head
        self._begin, self._end = begin, end
        self._stops = frozenset(stops)
        self._ends = tuple(filter(None, (begin, end, FENCE if is_fenced else "")))
        self._blanks = "` \t\r\n" if is_fenced else " \t\r\n"
        self._breaks = "".join(sorted({text[0] for text in self._ends} & {"<", "`"}))
        self._is_marked = False
        self._at: At = "between"
        self._head: list[str] = []
        self._head_len = 0
        self._value = JsonText("{")

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        pos = 0
        if self._at == "value" and not (self._held or self._is_held) and self._call is not None:
            piece, end = self._value.take(text, 0)
            if end < 0:
                return [ToolArgs(self._call, piece)] if piece else []
            pos = self._after_value(piece, text, end)
        else:
            if self._read_on[1] and self._goes_on_in_mark(text):  # no call where nothing is held
                return []
            text, self._held = self._held + text, ""
        while pos < len(text):
            if self._at == "broken":
                pos = self._skip_noise(text, pos)
                continue
            if self._at == "open":
                pos = self._open(text, pos)
            elif self._at == "value":
                pos = self._read_value(text, pos)
            else:
                pos = self._read(text, pos)
        return self._take_out()

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends inside a string of the arguments."""
        return self._at == "value" and self._value.in_string

    def _finish(self, *, complete: bool) -> list[ToolEvent]:
        held, self._held = self._held, ""
        if held and self._at in ("value", "broken"):
            if self._at == "broken":
                self._give_noise(held)
            else:
                self._out.append(ToolArgs(self._call or 0, held))
        elif held:
            self._text(held)
        if self._is_held:
            self._raw += [held] if self._at == "value" else []
            self._break()  # in doubt, and not ended
        elif self._at == "plain" or (self._at == "open" and complete):
            self._end_plain()
        elif self._at in ("open", "value"):
            if rest := self._value.rest():
                self._out.append(ToolArgs(self._call or 0, rest))
            self._out.append(ToolEnd(self._call or 0))
        elif self._at == "head" and "".join(self._head).strip() and (complete or not self._may_go_on()):
            self._break()
        return self._take_out()

    def _may_go_on(self) -> bool:
        """Whether a head that nothing ends may be half a head."""
        return self._is_marked and is_half_a_head("".join(self._head))

    def _resume(self) -> None:
        self._at = "between"

    def _text(self, text: str) -> None:
        """Take text between markers."""
        if not text:
            return
        if self._at == "plain":
            self._head.append(text)
            self._raw += [text] if self._is_held else []
            return
        self._raw.append(text)
        if self._at == "tail":
            if text.strip(self._blanks):
                self._break()
            return
        if self._at == "between" and not text.isspace():
            self._begin_head(is_marked=False)
        if self._at == "head":
            self._head.append(text)
            self._head_len += len(text)
            if self._head_len > MAX_HEAD:
                self._break()

    def _mark(self, mark: str, start: int, end: int) -> int:
        """Take a marker that stands from `start` to `end`; return where to read on."""
        if mark in (self._begin, self._end):
            self._end_call()
            if self._at == "broken":
                return self._mark_of_noise(mark, start, end)
            self._raw[:] = [mark] if mark == self._begin or self._call is None else []
            if mark == self._begin:
                self._begin_head(is_marked=True)
            return end
        if self._at == "head":
            return start if self._start_or_break(mark) and mark == "{" else end
        self._text(mark)
        return end

    def _mark_of_noise(self, mark: str, start: int, end: int) -> int:
        """Take the mark behind text that turned out to be none of a call."""
        if self.left is not None or mark == self._begin:
            return start
        self._give_noise(mark)
        return end

    def _begin_head(self, *, is_marked: bool) -> None:
        self._at, self._is_marked = "head", is_marked
        self._head.clear()
        self._head_len = 0

    def _end_call(self) -> None:
        """A marker ends what came before: arguments that are no JSON, a head without arguments, or noise."""
        if self._at == "head" and "".join(self._head).strip():
            if self._is_marked or not self._begin:
                self._start_or_break()
            else:
                self._break()
        if self._at in ("plain", "open"):
            self._end_plain()
        if self._at != "broken":
            self._at = "between"

    def _start_or_break(self, mark: str = "") -> bool:
        head = self._read_head("".join(self._head))
        self._call = self._begin_call(*head) if head is not None and head[0] else None
        if self._is_held and mark != "{":
            self._raw.append(mark)
        if self._call is None:
            self._raw.append(mark)
            self._break()
            return False
        self._head.clear()
        self._at = "open"
        return True

    def _open(self, text: str, pos: int) -> int:
        """Find the first character of the arguments."""
        begin = pos
        while pos < len(text) and text[pos].isspace():
            pos += 1
        self._raw += [text[begin:pos]] if self._is_held and pos > begin else []
        if pos < len(text):
            if text[pos] in "{[":
                self._at, self._value = "value", JsonText(text[pos], breaks=self._breaks)
            else:
                self._at = "plain"
        return pos

    def _read_value(self, text: str, pos: int) -> int:
        piece, end = self._value.take(text, pos)
        self._raw += [text[pos : end if end >= 0 else len(text)]] if self._is_held else []
        if end < 0:
            if piece:
                self._out.append(ToolArgs(self._call or 0, piece))
            return len(text)
        return self._after_value(piece, text, end)

    def _after_value(self, piece: str, text: str, end: int) -> int:
        """Take the last of a value, which ends at `end`; return where to read on."""
        if piece:
            self._out.append(ToolArgs(self._call or 0, piece))
        if self._value.interrupted:
            return self._interrupted(text, end)
        if self._is_held and not self._has_arguments():
            self._break()
            return end
        self._out.append(ToolEnd(self._call or 0))
        self._settle()
        self._at = "tail"
        return end

    def _has_arguments(self) -> bool:
        """Whether what was read of a call in doubt are arguments."""
        try:
            found = json.loads("".join([event.json for event in self._out if isinstance(event, ToolArgs)]))
        except (ValueError, RecursionError):
            return False
        return isinstance(found, dict)

    def _interrupted(self, text: str, pos: int) -> int:
        """See whether what stands outside of the arguments' strings is a marker, which ends them; return where."""
        self._value.interrupted = False
        rest = text[pos:]
        for mark in self._ends:
            if rest.startswith(mark):
                if self._is_held:
                    self._break()
                    return pos
                self._out.append(ToolEnd(self._call or 0))
                self._at = "tail" if mark == FENCE else "between"
                return pos if mark == FENCE else self._mark(mark, pos, pos + len(mark))
        if any(mark.startswith(rest) for mark in self._ends):
            self._held = rest
            return len(text)
        self._out.append(ToolArgs(self._call or 0, rest[0]))
        self._raw += [rest[0]] if self._is_held else []
        return pos + 1

    def _end_plain(self) -> None:
        """End a call whose arguments are no object or list: they pass as written, without the space around them."""
        text = "".join(self._head).strip()
        if self._is_held and text:
            self._break()
            return
        self._out += [ToolArgs(self._call or 0, text or "{}"), ToolEnd(self._call or 0)]
        self._settle()
        self._head.clear()
        self._at = "tail"
