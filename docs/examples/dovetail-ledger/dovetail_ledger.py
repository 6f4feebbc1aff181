"""Tool calls as lines of a ledger, read and enforced by what Dovetail's own formats stand on: `dovetail.sdk.formats`.

    <ledger>get_weather
    - city: Paris
    - days: 3
    </ledger>

A value has no quotes: the tool's schema says of which type it is. A string ends with its line, so one of several lines
is written as JSON. Strings are passed on as they are generated, other values when their line ends.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts import (
    FormatSpec,
    GrammarSpec,
    Malformed,
    NewCall,
    ToolArgs,
    ToolBody,
    ToolEnd,
    ToolEvent,
    ToolFormat,
    ToolParser,
)
from dovetail.sdk.formats.call_grammar import calls_grammar, name_of, tagged_arguments
from dovetail.sdk.formats.schema_types import STRING, properties_of, quoted, schemas_by_tool, types_of, value_text
from dovetail.sdk.formats.tags import Tags

START, END = "<ledger>", "</ledger>"
TAGS = Tags(call=(START, "\n"), call_end=END, key=("- ", ": "), value_end="\n")
NAME = re.compile(r"\s*([\w.:/-]{1,128})\s*")
KEY = re.compile(r"- ([^:\n]{1,128}): ")
LONGEST_KEY = 132


class Ledger(ToolParser):
    """Calls as lines, one call in a section."""

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers, and the reader of what stands between them."""
        return replace(spec, tools=ToolFormat(START, END, body=lambda new_call: LedgerCall(new_call, tools)))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool) -> GrammarSpec:
        """Calls as the format has them: every value is one that the tool's schema allows."""
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (f"{START}{name_of(tool)}\n", tagged_arguments(tool, TAGS, section_end=END), END),
            separator="\n",
            trigger=START,
        )


class LedgerCall(ToolBody):
    """Reads one call."""

    def __init__(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> None:
        self._new_call, self._schemas = new_call, schemas_by_tool(tools)
        self._schema: Mapping[str, Any] = {}
        self._index = -1  # the call's, -1 before its name
        self._line: list[str] = []
        self._length = 0
        self._streams = False  # whether the line is a string's, which is passed on
        self._keys: set[str] = set()
        self._is_broken = False  # whether the first line is no name, so that nothing of the section is a call

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends within a line, where the end marker is text."""
        return self._index >= 0 and (self._streams or self._length > 0)

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        events: list[ToolEvent] = []
        while text and not self._is_broken:
            piece, newline, text = text.partition("\n")
            events += self._take(piece)
            events += self._end_line(newline) if newline else []
        return [*events, Malformed("tool_call", text)] if text else events

    def close(self) -> list[ToolEvent]:
        """The section is over: a call whose name was read is whole."""
        events = self._end_line()
        return events + ([ToolArgs(self._index, "}"), ToolEnd(self._index)] if self._index >= 0 else [])

    def cut(self) -> list[ToolEvent]:
        """The output ended within the call: it keeps what it has."""
        text = "".join(self._line)
        return [ToolEnd(self._index)] if self._index >= 0 else [Malformed("tool_call", text)] if text.strip() else []

    def _take(self, piece: str) -> list[ToolEvent]:
        """Take a part of a line."""
        if self._streams:
            return [ToolArgs(self._index, quoted(piece)[1:-1])] if piece else []
        self._line.append(piece)
        self._length += len(piece)
        if self._index < 0 or self._length - len(piece) > LONGEST_KEY:
            return []
        line = "".join(self._line)
        key = KEY.match(line)
        if key is None or key[1] in self._keys or line.startswith('"', key.end()) or key.end() == len(line):
            return []
        if types_of(properties_of(self._schema).get(key[1]), self._schema) != STRING:
            return []
        self._streams = True
        return [ToolArgs(self._index, self._begin(key[1]) + quoted(line[key.end() :])[:-1])]

    def _end_line(self, newline: str = "") -> list[ToolEvent]:
        """A line is whole."""
        line, streamed = "".join(self._line), self._streams
        self._line, self._length, self._streams = [], 0, False
        if streamed:
            return [ToolArgs(self._index, '"')]
        if self._index < 0:
            return self._name(line, newline) if line.strip() else []
        key = KEY.match(line)
        if key is None or key[1] in self._keys:
            return [Malformed("tool_call", line + newline)] if line.strip() else []
        types = types_of(properties_of(self._schema).get(key[1]), self._schema)
        return [ToolArgs(self._index, self._begin(key[1]) + _value(line[key.end() :], types))]

    def _name(self, line: str, newline: str) -> list[ToolEvent]:
        name = NAME.fullmatch(line)
        if name is None:
            self._is_broken = True
            return [Malformed("tool_call", line + newline)]
        call = self._new_call(name[1])
        self._index, self._schema = call.index, self._schemas.get(name[1], {})
        return [call, ToolArgs(call.index, "{")]

    def _begin(self, key: str) -> str:
        self._keys.add(key)
        return f"{', ' if len(self._keys) > 1 else ''}{quoted(key)}: "


def _value(text: str, types: frozenset[str]) -> str:
    """Return JSON for a value; a string that is written as JSON is read so."""
    if types == STRING and text.startswith('"'):
        try:
            return json.dumps(str(json.loads(text)), ensure_ascii=False)
        except ValueError:
            return quoted(text)
    return value_text(text, types)
