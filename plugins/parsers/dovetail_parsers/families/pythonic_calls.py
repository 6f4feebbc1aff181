"""`PythonicCalls`: tool calls written as a list of Python calls, `[f(a=1, b="x"), g()]`.

An argument reaches the client as JSON when it is complete. Values are read by `python_literals`; nothing is evaluated.
Positional arguments take their names from the tool's schema, in its order. With the schema's help more is understood:

| written | becomes |
|---|---|
| `city=Rome, Italy, days=3` | `"Rome, Italy"`, for a parameter that may be a string |
| `city="the "old" town"`, `city='don't stop'` | a string: a quote ends one only before what may follow a value |
| `days="3"` | `3`, for one that may not |
| `city=3` | `"3"`, for one that must be |
| `city="Rome"days=3` | two arguments |
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Literal

from dovetail.contracts.output import Malformed, NewCall, ToolArgs, ToolBody, ToolEnd, ToolEvent
from dovetail.sdk.formats.call_grammar import Node, Tool, check_name, in_orders, sequence, text
from dovetail.sdk.formats.json_text import MAX_CUT_HEAD
from dovetail.sdk.formats.python_literals import literal_json
from dovetail.sdk.formats.reply_grammar import arguments_schema
from dovetail.sdk.formats.schema_types import (
    STRING,
    is_tool,
    properties_of,
    quoted,
    schemas_by_tool,
    types_of,
    value_text,
)
from dovetail.sdk.formats.tagged_values import json_value

_NAME = re.compile(r"[^\W\d][\w.\-]*")
_KEYWORD = re.compile(r"\s*([^\W\d][\w.\-]*)\s*=(?!=)(.*)", re.DOTALL)
_KEY = re.compile(r"(\w*)([ \t]*)(={0,2})")
_BEFORE_STRING = re.compile(r"(?:^|[=:,(\[{'\"])\s*[rRuU]?$")
_MAX_RUN = 16
_IN_STRING = {"'": re.compile(r"['\\]"), '"': re.compile(r"[\"\\]")}
_STRUCTURE = re.compile(r"[\"'()\[\]{},]")
_MAX_NAME = 256
_MAX_TRIES = 8
"""Places where an argument may end without a comma that are looked at."""
_MAX_GAP = 64
"""Blanks behind a quote that are waited through to see whether it ends a string."""
At = Literal["start", "name", "argument", "after", "end", "broken"]


class PythonicCalls(ToolBody):
    """Reads one list of calls, or calls one after the other. What is neither is `Malformed`."""

    def __init__(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._new_call = new_call
        self._tools = tools
        self._doubts_names = False
        self._out: list[ToolEvent] = []
        self._at: At = "start"
        self._raw: list[str] = []
        self._name = ""
        self._part: list[str] = []
        self._in_list = False
        self._call: int | None = None
        self._num_arguments = 0
        self._text_key = ""
        self._text_parts: list[str] = []
        self._depth = 0
        self._quote = ""
        self._held = ""
        """A quote that may end a string, and blanks and the beginning of a name behind it."""
        self._run = ""
        """What stands since the last sign of an argument: a string begins where a value may."""
        self._escaped = False
        self._failed = False
        self._explained = False

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        text, self._held = self._held + text, ""
        pos = 0
        while pos < len(text) and not self._held:
            if self._at == "broken":
                self._out.append(Malformed("tool_call", text[pos:]))
                break
            begin = pos
            pos = self._argument(text, pos) if self._at == "argument" else self._between(text, pos)
            self._raw.append(text[begin:pos])
            if self._failed:
                self._break()
            elif self._explained:
                self._raw.clear()
            self._explained = False
        return self._take_out()

    def doubt_names(self) -> None:
        """The first call has a tool's name, or is none."""
        self._doubts_names = True

    def close(self) -> list[ToolEvent]:
        """End the section: a call that was cut short keeps what it has."""
        self._take_held()
        if self._call is not None and "".join(self._raw).strip():
            self._break()
        elif self._call is not None:
            self._out.append(ToolEnd(self._call))
        elif self._at not in ("end", "broken") and "".join(self._raw).strip(" \t\r\n,"):
            self._break()
        return self._take_out()

    def cut(self) -> list[ToolEvent]:
        """End the section, cut short: a text keeps its beginning; half of another argument is none, and no content."""
        self._take_held()
        is_given = self._at == "argument" and self._add_beginning("".join(self._part))
        if is_given or (self._call is not None and len("".join(self._raw)) <= MAX_CUT_HEAD):
            self._raw.clear()
        return self.close()

    def _add_beginning(self, text: str) -> bool:
        """Give out the beginning of a text that was cut off. False: what was cut off is none."""
        if self._text_key:
            key, value = self._text_key, ",".join([*self._text_parts, text])
        else:
            found = _KEYWORD.fullmatch(text)
            if found is None:
                return False
            key, value = found[1], found[2]
        types = types_of(properties_of(self._schema).get(key), self._schema)
        value = value.lstrip()
        if value[:1] not in ("'", '"') or (types and "string" not in types):
            return False
        json_text = literal_json(value)
        if json_text is None:
            cut = literal_json(value + value[0]) or literal_json(value.rstrip("\\") + value[0]) or quoted(value[1:])
            json_text = cut[:-1]
        self._start()
        self._args(("{" if not self._num_arguments else ", ") + quoted(key) + ": " + json_text)
        return True

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends inside a quoted value."""
        return bool(self._quote and not self._held)

    def _take_held(self) -> None:
        """Nothing follows what is held: it is what it looks like."""
        held, self._held = self._held, ""
        self._part.append(held)
        self._raw.append(held)

    def _take_out(self) -> list[ToolEvent]:
        out, self._out = self._out, []
        return out

    def _between(self, text: str, pos: int) -> int:
        """Read one character outside of arguments."""
        if self._at == "name":
            return self._read_name(text, pos)
        char = text[pos]
        if char.isspace():
            return pos + 1
        if self._at == "start" and char == "[" and not self._part:
            self._part.append(char)
            self._in_list = True
        elif (
            self._at in ("start", "after")
            and (char.isalpha() or char == "_")
            and (self._at == "start" or self._part or not self._in_list)
        ):
            self._at = "name"
            self._part.clear()
            return pos
        elif self._at == "after" and char == "," and not self._part:
            self._part.append(char)
        elif self._at == "after" and char == "]":
            self._at, self._explained = "end", True
        else:
            self._failed = True
        return pos + 1

    def _read_name(self, text: str, pos: int) -> int:
        end = text.find("(", pos)
        piece = text[pos:] if end < 0 else text[pos:end]
        self._name = "".join([*self._part, piece])
        self._part[:] = [self._name]
        if len(self._name) > _MAX_NAME or _NAME.fullmatch(self._name) is None:
            self._failed = True
        elif end >= 0:
            self._failed = self._doubts_names and not is_tool(self._name, self._tools)
            self._doubts_names = False
            self._part.clear()
            self._at, self._num_arguments, self._depth, self._run = "argument", 0, 0, ""
            return end + 1
        return pos + len(piece)

    def _argument(self, text: str, pos: int) -> int:
        """Read an argument up to the comma or bracket behind it, or as much of it as there is; return where."""
        begin = pos
        while pos < len(text):
            if self._escaped:
                self._escaped = False
                pos += 1
                continue
            found = self._next_stop(text, pos)
            if found < 0:
                break
            char = text[found]
            self._run, pos = (self._run + text[pos:found])[-_MAX_RUN:], found + 1
            if char == "\\":
                self._escaped = True
            elif self._quote:
                ends = self._ends_string(text, pos)
                if ends is None:
                    self._held = text[found:]
                    self._part.append(text[begin:found])
                    return found
                if ends:
                    self._quote = ""
                else:
                    self._part.append(text[begin:found] + "\\")
                    begin = found
            elif char in "\"'":
                self._quote = char if _BEFORE_STRING.search(self._run) else ""
            elif char in ",)" and not self._depth:
                self._part.append(text[begin : pos - 1])
                self._end_argument(char)
                return pos
            elif char != ",":
                self._depth += 1 if char in "([{" else -1
            self._run = char
        self._part.append(text[begin:])
        self._run = (self._run + text[pos:])[-_MAX_RUN:]
        return len(text)

    def _ends_string(self, text: str, pos: int) -> bool | None:
        """Whether a quote before `pos` ends a string, and is no apostrophe in it; None where the text is too short."""
        rest = text[pos : pos + _MAX_GAP + _MAX_NAME]
        follows = rest.lstrip()
        if not follows:
            return None if len(rest) < _MAX_GAP else True
        if follows[0] in ",)]}:\"'":
            return True
        names = properties_of(self._schema)
        found = _KEY.match(follows)
        name, blank, sign = found.groups() if found else ("", "", "")
        if len(follows) < _MAX_NAME and not follows[len(name + blank + sign) :]:
            is_begun = name in names if blank or sign else any(known.startswith(name) for known in names)
            return None if is_begun and len(sign) < 2 else False
        return name in names and sign == "="

    def _next_stop(self, text: str, pos: int) -> int:
        """Return where the next character stands that means something, or -1."""
        found = (_IN_STRING[self._quote] if self._quote else _STRUCTURE).search(text, pos)
        return found.start() if found else -1

    def _end_argument(self, char: str) -> None:
        text = "".join(self._part)
        self._part.clear()
        if text.strip():
            self._add(text)
        elif char == ",":
            self._failed = True
        if not self._failed and char == ")":
            self._end_text()
            self._end_call()

    def _add(self, text: str) -> None:
        """Add an argument to the call."""
        found = _KEYWORD.fullmatch(text)
        if found is None and self._text_key:
            self._text_parts.append(text)  # a comma in a text without quotes
            return
        self._end_text()
        names = [*properties_of(self._schema)]
        if found:
            key, value = found[1], found[2]
        else:
            key = names[self._num_arguments] if self._num_arguments < len(names) else ""
            value = text
        if not key:
            self._failed = True
            return
        self._add_value(key, value)

    def _add_value(self, key: str, text: str, depth: int = 0) -> None:
        types = types_of(properties_of(self._schema).get(key), self._schema)
        value = literal_json(text)
        if value is not None:
            if value[:1] == '"' and types and "string" not in types:
                value = value_text(json.loads(value), types)
            elif types == STRING and value[:1] not in '"[{n':
                value = quoted(text.strip())
            self._add_json(key, value)
        elif not self._add_two(key, text, depth):
            if "string" not in types and (types or text.lstrip()[:1] not in ("'", '"')):
                self._failed = True
                return
            if (inner := _unquoted(text.strip())) is not None:
                self._add_json(key, quoted(inner))
            else:
                self._text_key, self._text_parts = key, [text]

    def _add_two(self, key: str, text: str, depth: int) -> bool:
        """Add arguments that no comma stands between, no more than the tool has."""
        names = [*properties_of(self._schema)]
        if depth >= len(names):
            return False
        pattern = re.compile(rf"(?<=[\w\"'\])}}])({'|'.join(map(re.escape, names))})\s*=(?!=)")
        for found in islice(pattern.finditer(text), _MAX_TRIES):
            value = literal_json(text[: found.start()])
            if value is not None:
                self._add_json(key, value)
                self._add_value(found[1], text[found.end() :], depth + 1)
                return True
        return False

    def _add_json(self, key: str, value: str) -> None:
        self._start()
        self._explained = True
        self._args(("{" if not self._num_arguments else ", ") + quoted(key) + ": " + value)
        self._num_arguments += 1

    def _end_text(self) -> None:
        """Add a text without quotes: the next argument begins, or the call ends."""
        if self._text_key:
            key, self._text_key = self._text_key, ""
            text = ",".join(self._text_parts).strip()
            inner = _unquoted(text)
            self._add_json(key, quoted(text if inner is None else inner))

    @property
    def _schema(self) -> Mapping[str, Any] | None:
        return schemas_by_tool(self._tools).get(self._name)

    def _start(self) -> None:
        if self._call is None:
            start = self._new_call(self._name)
            self._call = start.index
            self._out.append(start)

    def _args(self, json: str) -> None:
        if self._call is not None:
            self._out.append(ToolArgs(self._call, json))

    def _end_call(self) -> None:
        self._start()
        self._args("}" if self._num_arguments else "{}")
        if self._call is not None:
            self._out.append(ToolEnd(self._call))
        self._call, self._at, self._explained = None, "after", True

    def _break(self) -> None:
        """Give up: what no call explains goes out as it came, and so will the rest."""
        self._at = "broken"
        if self._call is not None:
            self._out.append(ToolEnd(self._call))
            self._call = None
        if raw := "".join(self._raw):
            self._out.append(Malformed("tool_call", raw))
        self._raw.clear()


def _unquoted(text: str) -> str | None:
    """Return what stands between the quotes around a text, whatever quotes are in it; None where there are none."""
    return text[1:-1] if len(text) > 1 and text[0] in "\"'" and text[0] == text[-1] else None


def keyword_arguments(tool: Tool) -> Node:
    """Describe a call's arguments as Python's keywords with JSON values, which the parser of Python calls reads too."""
    schema = arguments_schema(tool)
    items: dict[str, Node] = {}
    for name, declared in properties_of(schema).items():
        check_name(tool, name, is_read=_NAME.fullmatch(name) is not None)
        items[name] = sequence(text(f"{name}="), json_value(declared, schema))
    return in_orders(items, schema, ", ")
