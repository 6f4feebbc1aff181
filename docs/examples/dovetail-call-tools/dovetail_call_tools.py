"""Tool calls written as `<call>get_weather({"city": "Paris"})</call>`.

The arguments are one JSON object, or nothing. They pass through as they are generated: only where the object ends is
found out here, by counting brackets outside of strings.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts import (
    FormatSpec,
    Malformed,
    NewCall,
    ToolArgs,
    ToolBody,
    ToolEnd,
    ToolEvent,
    ToolFormat,
    ToolParser,
)

NAME = re.compile(r"\s*([\w.-]+)\s*")


class CallTools(ToolParser):
    """Calls between `<call>` and `</call>`, one in each."""

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers, and the reader of what stands between them."""
        return replace(spec, tools=ToolFormat("<call>", "</call>", body=CallBody))


class CallBody(ToolBody):
    """Reads `name({…})`. Until the object opens, everything is kept: it may turn out to be no call."""

    def __init__(self, new_call: NewCall) -> None:
        self._new_call = new_call
        self._at = "name"
        self._raw: list[str] = []
        self._index = 0
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends inside a JSON string, where an end marker is text."""
        return self._at == "object" and self._in_string

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        events: list[ToolEvent] = []
        start = 0
        for place, char in enumerate(text):
            if self._at == "object":
                if self._ends(char):
                    events += [ToolArgs(self._index, text[start : place + 1]), ToolEnd(self._index)]
                    self._at, start = "tail", place + 1
            elif self._at != "broken":
                self._raw.append(char)
                events += self._begin(char)
                start = place + 1
        if self._at == "object" and start < len(text):
            events.append(ToolArgs(self._index, text[start:]))
        if self._at == "broken" and start < len(text):
            events.append(Malformed("tool_call", text[start:]))
        return events

    def close(self) -> list[ToolEvent]:
        """The section is over: a call that was cut short keeps what it has, other text is no call."""
        if self._at == "object":
            return [ToolEnd(self._index)]
        raw = "".join(self._raw)
        return [Malformed("tool_call", raw)] if self._at in ("name", "open") and raw.strip() else []

    def _begin(self, char: str) -> list[ToolEvent]:
        """Take a character outside of the object."""
        if self._at == "name" and char == "(":
            self._at = "open"
        elif self._at == "open" and char in "{)":
            name = NAME.fullmatch("".join(self._raw).partition("(")[0])
            if name is not None:
                call = self._new_call(name[1])
                self._index = call.index
                self._raw.clear()
                if char == ")":
                    self._at = "tail"
                    return [call, ToolArgs(call.index, "{}"), ToolEnd(call.index)]
                self._at, self._depth = "object", 1
                return [call, ToolArgs(call.index, "{")]
            return self._break()
        elif (self._at == "open" or (self._at == "tail" and char != ")")) and not char.isspace():
            return self._break()
        return []

    def _break(self) -> list[ToolEvent]:
        raw, self._at = "".join(self._raw), "broken"
        return [Malformed("tool_call", raw)]

    def _ends(self, char: str) -> bool:
        """Take a character of the object; True if it is its last one."""
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = char == "\\"
            self._in_string = char != '"'
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return not self._depth
