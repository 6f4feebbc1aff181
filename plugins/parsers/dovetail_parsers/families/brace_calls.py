r"""`BraceCalls`: tool calls written as a name and braces, with strings between markers and keys without quotes.

```
call:get_weather{city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>]}
```

Becomes JSON while it is written: strings stream, other values come when they are complete. JSON's own strings are read
as well: nothing within their quotes means anything, if they are closed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from dovetail.contracts.output import Malformed, NewCall, ToolArgs, ToolBody, ToolEnd, ToolEvent
from dovetail.sdk.formats.call_grammar import Node, Tool, check_name, in_orders, sequence, text
from dovetail.sdk.formats.json_text import MAX_CUT_HEAD
from dovetail.sdk.formats.matcher import matcher
from dovetail.sdk.formats.reply_grammar import arguments_schema
from dovetail.sdk.formats.schema_types import (
    PYTHON_WORDS,
    cut_text,
    is_tool,
    properties_of,
    quoted,
    schemas_by_tool,
    types_of,
    value_text,
)
from dovetail.sdk.formats.tagged_values import tagged_value
from dovetail_parsers.families.headed_calls import MAX_HEAD, is_half_a_head

_OPENS = re.compile(r'\s*"')
_STOP = re.compile(r'["\\]')
_HEAD = re.compile(r"\s*(?:call:|:)?\s*([\w.:/\-]+)\s*")


@lru_cache(maxsize=16)
def _not_plain(quote: str) -> Callable[[str], re.Match[str] | None]:
    """Return what finds a character that may end a string, or is written in another way in JSON."""
    return re.compile(rf'[{re.escape(quote[0])}"\\\x00-\x1f]').search


class BraceCalls(ToolBody):
    """Reads calls one after the other."""

    def __init__(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]] = (), *, quote: str) -> None:
        """Prepare; `tools` for the types of values, `quote` stands on either side of a string."""
        self._schemas, self._tools = schemas_by_tool(tools), tools
        self._doubts_names = False
        self._schema: Mapping[str, Any] | None = None
        self._types: frozenset[str] = frozenset()
        self._string: list[str] | None = None
        self._new_call = new_call
        self._quote = quote
        self._outside = matcher((quote, ":", ",", "{", "}", "[", "]"))
        self._inside = matcher((quote,))
        self._not_plain = _not_plain(quote)
        self._out: list[ToolEvent] = []
        self._held = ""
        self._call: int | None = None
        self._head: list[str] = []
        self._stack: list[str] = []
        self._token: list[str] = []
        self._in_string = False
        self._plain: list[str] | None = None
        """What was read of a JSON string, from its quote on."""
        self._escaped = self._is_behind = False
        """Whether the last character of a JSON string begins an escape; whether one has ended, and nothing followed."""
        self._trusts_quotes = True
        self._at_key = False
        self._has_value = False
        """Whether what stands between two separators was given out: text beside it belongs to none."""
        self._lacks_value = False
        """Whether a key was given out whose value is still to come."""
        self._comma = ""
        """What goes out before the next item of a list or an object: a comma that nothing follows is none."""
        self._broken = False

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        is_string = self._in_string and self._string is None and not self._held
        if is_string and self._call is not None and text and self._not_plain(text) is None:
            return [ToolArgs(self._call, text)]
        text, self._held = self._held + text, ""
        pos = 0
        while pos < len(text):
            if self._broken:
                self._out.append(Malformed("tool_call", text[pos:]))
                break
            pos = self._read_head(text, pos) if self._call is None else self._read(text, pos)
        return self._take_out()

    def doubt_names(self) -> None:
        """The first call has a tool's name, or is none."""
        self._doubts_names = True

    def close(self) -> list[ToolEvent]:
        """End the section: a call that was open is complete."""
        return self._finish(complete=True)

    def _finish(self, *, complete: bool) -> list[ToolEvent]:
        if self._plain is not None:
            plain, self._plain = "".join(self._plain), None
            self._distrust(plain)
        held, self._held = self._held, ""
        if self._call is not None:
            self._text(held if self._in_string else "")  # half a marker is no value
            if self._string is not None:
                self._args((value_text if complete else cut_text)("".join(self._string), self._types))
            elif self._in_string:
                self._args('"' if complete else "")
            elif complete or not self._is_half_a_key():
                self._flush(is_over=complete)
            self._args("".join(reversed(self._stack)) if complete else "")
            self._out.append(ToolEnd(self._call))
        elif "".join(self._head).strip():
            self._out.append(Malformed("tool_call", "".join(self._head)))
        return self._take_out()

    def cut(self) -> list[ToolEvent]:
        """End the section, cut short: half a head is no content."""
        head = "".join(self._head)
        if self._call is None and _HEAD.fullmatch(head) and is_half_a_head(head):
            return []
        return self._finish(complete=False)

    def _is_half_a_key(self) -> bool:
        return self._at_key and sum(map(len, self._token)) <= MAX_CUT_HEAD

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends inside a string."""
        return self._in_string or self._plain is not None

    def _take_out(self) -> list[ToolEvent]:
        out, self._out = self._out, []
        return out

    def _read_head(self, text: str, pos: int) -> int:
        end = text.find("{", pos)
        self._head.append(text[pos:] if end < 0 else text[pos : end + 1])
        head = "".join(self._head)
        if end < 0:
            self._head[:] = [head]
            if len(head) > MAX_HEAD:
                self._break(head)
            return len(text)
        found = _HEAD.fullmatch(head[:-1])
        if found is None or (self._doubts_names and not is_tool(found[1], self._tools)):
            self._break(head)
            return end + 1
        self._doubts_names = False
        start = self._new_call(found[1])
        self._call = start.index
        self._schema = self._schemas.get(found[1])
        self._out += [start, ToolArgs(start.index, "{")]
        self._head.clear()
        self._stack, self._at_key = ["}"], True
        self._lacks_value, self._comma = False, ""
        return end + 1

    def _break(self, head: str) -> None:
        self._broken = True
        self._head.clear()
        self._out.append(Malformed("tool_call", head))

    def _read(self, text: str, pos: int) -> int:
        """Read up to the next character or marker that means something; return where."""
        if self._plain is not None:
            return self._read_plain(self._plain, text, pos)
        if self._is_behind:
            rest = text[pos:].lstrip()
            self._is_behind = not rest
            if rest and rest[0] not in ",:]}":
                plain = "".join(self._token).lstrip()
                self._token.clear()
                self._distrust(plain + text[pos:])
                return len(text)
        opened = _OPENS.match(text, pos) if self._trusts_quotes and not self._in_string else None
        if opened is not None and not any(part.strip() for part in self._token):
            self._token.append(opened[0][:-1])
            self._plain = ['"']
            return opened.end()
        found = self._inside if self._in_string else self._outside
        end, state, length = found.scan(text, pos, 0)
        cut = end - (length or found.held(state))
        self._text(text[pos:cut])
        if not length:
            self._held = text[cut:]
            return len(text)
        self._mark(text[cut:end])
        return end

    def _read_plain(self, read: list[str], text: str, pos: int) -> int:
        """Read a JSON string up to its closing quote, or as much of it as there is; return where."""
        begin, pos = pos, pos + self._escaped
        self._escaped = False
        while (found := _STOP.search(text, pos)) is not None:
            pos = found.end()
            if found[0] == '"':
                self._token.append("".join([*read, text[begin:pos]]))
                self._plain, self._is_behind = None, True
                return pos
            self._escaped = pos == len(text)
            pos += 1
        read.append(text[begin:])
        return len(text)

    def _distrust(self, text: str) -> None:
        """Read once more what began as a JSON string and is none: no such quote means anything any more."""
        self._trusts_quotes = False
        self._token.append(text[0])
        self._out = self.feed(text[1:])

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._string is not None:
            self._string.append(text)
        elif self._in_string:
            self._args(quoted(text)[1:-1])
        else:
            self._token.append(text)

    def _mark(self, mark: str) -> None:
        if mark == self._quote:
            if not self._in_string:
                self._stray()
            self._in_string = not self._in_string
            self._quoted_value()
        elif mark == ":":
            if self._at_key:
                if self._has_value:
                    self._stray()
                if self._has_value:
                    self._stray()
                self._end_key(_key_of("".join(self._token).strip()))
            else:
                self._token.append(mark)
        elif mark in "{[":
            self._stray()
            self._item(mark)
            self._stack.append("}" if mark == "{" else "]")
            self._at_key, self._has_value, self._comma = mark == "{", False, ""
        elif mark == ",":
            self._flush()
            self._at_key, self._has_value = self._stack[-1] == "}", False
        else:
            self._close_one()

    def _end_key(self, key: str) -> None:
        if not self._has_value:
            self._item(quoted(key))
        self._token.clear()
        self._args(": ")
        self._comma, self._lacks_value = "", True
        self._at_key = self._has_value = False
        if len(self._stack) == 1:
            self._types = types_of(properties_of(self._schema).get(key), self._schema)

    def _item(self, json: str) -> None:
        """Give out the beginning of a key or a value, behind the comma that is due."""
        self._args(self._comma + json)
        self._comma, self._lacks_value = ", ", False

    def _quoted_value(self) -> None:
        """Begin or end a string; one where the schema wants none comes when it is complete."""
        self._has_value = True
        if self._in_string:
            buffers = len(self._stack) == 1 and self._types and "string" not in self._types and not self._at_key
            self._string = [] if buffers else None
            self._item("" if buffers else '"')
        elif self._string is not None:
            self._args(value_text("".join(self._string), self._types))
            self._string = None
        else:
            self._args('"')

    def _close_one(self) -> None:
        self._flush()
        self._args(self._stack.pop())
        self._at_key, self._has_value, self._comma = False, True, ", "
        if not self._stack and self._call is not None:
            self._out.append(ToolEnd(self._call))
            self._call = None

    def _stray(self) -> None:
        """Text beside a value, or where a key should end, belongs to none: it goes out as it came."""
        text = "".join(self._token)
        self._token.clear()
        if text.strip():
            self._out.append(Malformed("tool_call", text))

    def _flush(self, *, is_over: bool = True) -> None:
        """Give out a value without quotes; a key without any gets an empty one, unless it may still have come."""
        if self._at_key or self._has_value:
            self._stray()
            return
        text = "".join(self._token).strip()
        self._token.clear()
        if not text:
            if self._lacks_value and is_over:
                self._item('""' if len(self._stack) == 1 and "string" in self._types else "null")
            return
        text = PYTHON_WORDS.get(text, text)
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            text = quoted(text.strip("\"'"))
        self._item(text)

    def _args(self, json: str) -> None:
        if self._call is not None and json:
            self._out.append(ToolArgs(self._call, json))


def _key_of(text: str) -> str:
    """Read a key, with quotes or without."""
    try:
        found = json.loads(text) if text[:1] == '"' else None
    except ValueError:
        found = None
    return found if isinstance(found, str) else text.strip("\"'")


_KEY = re.compile(r"[^\s\"'{}\[\],:](?:[^\n\"'{}\[\],:]*[^\s\"'{}\[\],:])?")
"""A key without quotes that is read back before a colon."""


def brace_arguments(tool: Tool, quote: str, section_end: str) -> Node:
    """Describe a call's arguments between braces: keys without quotes, strings between `quote`, else JSON."""
    schema = arguments_schema(tool)
    items = {}
    for name, declared in properties_of(schema).items():
        check_name(tool, name, is_read=_KEY.fullmatch(name) is not None)
        found = tagged_value(declared, schema, (quote, section_end), is_quoted=True)
        options: list[Node] = [sequence(text(f"{name}:"), value) for value in found.others]
        if found.string is not None:
            options.append({"type": "tag", "begin": f"{name}:{quote}", "content": found.string, "end": quote})
        items[name] = options[0] if len(options) == 1 else {"type": "or", "elements": options}
    return in_orders(items, schema, ",")
