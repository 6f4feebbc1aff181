"""`JsonCalls`: tool calls written as JSON objects, `{"name": …, "arguments": …}`, read as they stream.

The arguments' text passes through while it is generated, byte for byte where it is JSON (see `json_text.py` for what is
not). Only the wrapper is interpreted, by a small scanner that is exact about strings and nesting and does not validate
the arguments: a client gets what the model wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from dovetail.contracts.output import Malformed, NewCall, ToolArgs, ToolBody, ToolEnd, ToolEvent
from dovetail.sdk.formats.json_text import MAX_CUT_HEAD, JsonText
from dovetail.sdk.formats.schema_types import PYTHON_WORDS, is_tool

_BETWEEN = re.compile(r"[\s,;\[\]}]*")
_BEFORE_FIRST = re.compile(r"[\s\[]*")
_LIST_END = re.compile(r"(?:[\s,;]*[\]}])*")
_SPACE = re.compile(r"\s*")
_SPACE_COMMA = re.compile(r"[\s,]*")
_SEPARATORS = ", \t\r\n"
_NO_KEY = re.compile(r"[{}\[\]\n]")
"""Stands in no key of a call: what holds one is text behind a quotation mark, and is kept where it is cut short."""

_WRAPPER_KEYS = ("type", "id", "index", "function")
"""Keys of OpenAI's own around a call."""
At = Literal["object", "key", "key_text", "colon", "value", "stream", "buffer", "broken"]


class JsonCalls(ToolBody):
    """Reads one or several calls, one after the other or in a list.

    Either key may come first. Arguments in a string that holds a JSON object are unwrapped; absent or null arguments
    are `{}`, or the object's other keys where it has any; any other value passes as written. A call may stand under
    the key `function`. Other keys beside the arguments mean nothing. An object without a name, or text that is no
    object, is `Malformed`.
    """

    def __init__(
        self,
        new_call: NewCall,
        *,
        name_key: str | None = "name",
        arguments_keys: Sequence[str] = ("arguments", "parameters"),
        known: Collection[str] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Prepare.

        Args:
            new_call: Numbers the calls.
            name_key: Key of the function's name. None: the object's only key is the name, and its value the arguments.
            arguments_keys: Keys of its arguments.
            known: For calls without markers, which look like any JSON: the tools' names. An object is a call then if
                it begins with a key of calls and has arguments, or no arguments and a known name.
            tools: As OpenAI writes them: where names are in doubt, the first call has one of theirs. None: any counts.
        """
        self._new_call, self._tools = new_call, tools
        self._doubts_names = False
        self._known = known
        self._name_key = name_key
        self._arguments_keys = arguments_keys
        self._call_keys = {name_key, *arguments_keys, *_WRAPPER_KEYS}
        self._out: list[ToolEvent] = []
        self._num_calls = 0
        self._at: At = "object"
        self._value = JsonText('"')
        self._raw: list[str] = []
        self._buffer: list[str] = []
        self._begin_object()

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        pos = 0
        if self._at == "broken":
            return [Malformed("tool_call", text)] if text else []
        if self._at == "stream" and self._call is not None:
            piece, pos = self._value.take(text, 0)
            if pos < 0:
                return [ToolArgs(self._call, piece)] if piece else []
            self._pass_on(piece)
            self._end_value()
        while pos < len(text):
            self._explained = False
            end = self._read(text, pos)
            if self._explained:
                self._raw.clear()
            elif self._call is None or self._at != "stream":
                self._raw.append(text[pos:end])
            if self._failed:
                self._break()
                self._out += [Malformed("tool_call", text[end:])] if end < len(text) else []
                break
            pos = end
        return self._take_out()

    def doubt_names(self) -> None:
        """The first call has a tool's name, or is none."""
        self._doubts_names = self._tools is not None

    def close(self) -> list[ToolEvent]:
        """End the section: a call that is not whole keeps what it has, what belongs to none of it is `Malformed`."""
        return self._finish(complete=True)

    def _finish(self, *, complete: bool) -> list[ToolEvent]:
        if self._at == "broken":
            return []
        if self._call is not None:
            self._end_cut_call(complete=complete)
        elif (raw := "".join(self._raw)) and (_BETWEEN.fullmatch(raw) is None or not (self._num_calls or "]" in raw)):
            self._out.append(Malformed("tool_call", raw))
        return self._take_out()

    def cut(self) -> list[ToolEvent]:
        """End the section, cut short: the beginning of a call that has no name yet is no content."""
        if self._call is None and self._at != "broken" and self._begins_call():
            return []
        return self._finish(complete=False)

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends inside a JSON string."""
        return self._at in ("key_text", "stream", "buffer") and self._value.in_string

    def _take_out(self) -> list[ToolEvent]:
        out, self._out = self._out, []
        return out

    def _end_cut_call(self, *, complete: bool) -> None:
        if self._at == "stream":
            self._pass_on(self._value.rest())
        elif self._at in ("buffer", "key_text", "colon"):
            text = "".join(self._buffer) + self._value.rest()
            if self._at == "buffer" and self._key in self._arguments_keys and not self._has_arguments:
                self._pass_on(text)
            elif (raw := "".join(self._raw).strip(_SEPARATORS)) and self._is_kept(text, complete=complete):
                self._out.append(Malformed("tool_call", raw))  # none is left where the key is the call's name
        self._out.append(ToolEnd(self._call or 0))

    def _is_kept(self, text: str, *, complete: bool) -> bool:
        """Whether a key or value at the end of a section is text that no call explains."""
        if self._at == "buffer":
            return complete
        return not self._begins_key(text.strip("\"'")) if complete else _NO_KEY.search(text) is not None

    def _begins_key(self, text: str) -> bool:
        """Whether a text is the beginning of a key of calls."""
        return any(key is not None and key.startswith(text) for key in self._call_keys)

    def _begins_call(self) -> bool:
        """Whether the text so far can only be the beginning of a call, of which nothing is worth showing."""
        if self._early or self._others or (self._at == "buffer" and self._key != self._name_key):
            return False
        if sum(map(len, self._buffer)) > MAX_CUT_HEAD:
            return False
        if self._known is None:
            return True
        if self._first_key != self._name_key:
            return False
        name = "".join(self._buffer)[1:] if self._at == "buffer" else self._name
        return any(known.startswith(name) for known in self._known)

    def _begin_object(self) -> None:
        self._call: int | None = None
        self._name = self._first_key = ""
        self._key = ""
        self._has_arguments = False
        self._failed = self._explained = False
        self._early: list[str] = []
        self._others: dict[str, str] = {}
        self._depth = 0
        self._raw.clear()

    def _break(self) -> None:
        """Give up on the section: what no call explains goes out as it came, and so will the rest."""
        self._at = "broken"
        raw = "".join(self._raw)
        if self._call is not None:
            self._out.append(ToolEnd(self._call))
            self._call, raw = None, raw.lstrip(_SEPARATORS)
        elif self._num_calls:
            raw = _LIST_END.sub("", raw, count=1)
        if raw:
            self._out.append(Malformed("tool_call", raw))
        self._raw.clear()

    def _read(self, text: str, pos: int) -> int:
        """Read one element of the wrapper, or as much of it as there is; return where it ends."""
        if self._at in ("stream", "buffer", "key_text"):
            return self._read_value(text, pos)
        spaces = {"object": _BETWEEN if self._num_calls else _BEFORE_FIRST, "key": _SPACE_COMMA}.get(self._at, _SPACE)
        found = spaces.match(text, pos)
        pos = found.end() if found else pos
        if pos == len(text):
            return pos
        char = text[pos]
        if self._at == "object" and char == "{":
            self._at = "key"
        elif self._at == "key" and char == "}":
            self._end_object()
        elif self._at == "key" and char in "\"'":
            self._begin_value("key_text", char)
            return pos
        elif self._at == "colon" and char == ":":
            self._at = "value"
        elif self._at == "value" and char == "{" and self._key == "function" and self._call is None:
            self._at, self._depth = "key", self._depth + 1
        elif self._at == "value":
            streams = char in "{[" and self._key in self._arguments_keys and not self._has_arguments
            self._begin_value("stream" if streams else "buffer", char)
            return pos
        else:
            self._failed = True
            return pos
        return pos + 1

    def _begin_value(self, at: At, first: str) -> None:
        self._explained = at == "stream" and self._call is not None
        self._at = at
        self._value = JsonText(first)
        self._buffer = []

    def _read_value(self, text: str, pos: int) -> int:
        piece, end = self._value.take(text, pos)
        if self._at == "stream":
            self._pass_on(piece)
        else:
            self._buffer.append(piece)
        if end < 0:
            return len(text)
        self._end_value()
        return end

    def _pass_on(self, piece: str) -> None:
        if not piece:
            return
        if self._call is None and self._name:
            self._announce()
        if self._call is not None:
            self._out.append(ToolArgs(self._call, piece))
        else:
            self._early.append(piece)

    def _end_value(self) -> None:
        at, self._at = self._at, "key"
        self._explained = at != "key_text" and self._call is not None
        if at == "stream":
            self._has_arguments = True
            return
        raw = "".join(self._buffer)
        raw = PYTHON_WORDS.get(raw, raw)
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            self._failed, self._explained = True, False
            return
        if at == "key_text":
            self._take_key(value)
        elif self._key == self._name_key and self._call is None and not self._name:
            self._start(value)
        elif self._key in self._arguments_keys and not self._has_arguments:
            self._has_arguments = True
            self._pass_on(_arguments(raw, value))
        elif self._key not in _WRAPPER_KEYS:
            self._others[self._key] = raw

    def _take_key(self, key: str) -> None:
        self._key, self._at = key, "colon"
        if self._name_key is None and self._call is None:
            self._arguments_keys = (key,)
            self._start(key)
            return
        self._failed = self._known is not None and not self._first_key and key not in self._call_keys
        self._first_key = self._first_key or key

    def _start(self, name: object) -> None:
        if not isinstance(name, str) or not name or (self._doubts_names and not is_tool(name, self._tools or ())):
            self._failed = True
            return
        self._doubts_names = False
        self._name = name
        if self._known is None or self._early:
            self._announce()

    def _announce(self) -> None:
        """The object is a call: say so, and give out arguments that came before the name."""
        start = self._new_call(self._name)
        self._call = start.index
        self._num_calls += 1
        self._explained = True
        self._out.append(start)
        if self._early:
            self._out.append(ToolArgs(self._call, "".join(self._early)))
            self._early.clear()

    def _end_object(self) -> None:
        if self._depth:
            self._depth -= 1
            return
        if self._call is None and self._name and self._known is not None and self._name in self._known:
            self._announce()
        if self._call is None:
            self._failed = True
            return
        if not self._has_arguments:
            others = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {raw}" for key, raw in self._others.items())
            self._out.append(ToolArgs(self._call, "{" + others + "}"))
        self._out.append(ToolEnd(self._call))
        self._begin_object()
        self._at, self._explained = "object", True


def _arguments(raw: str, value: object) -> str:
    """Return the text of arguments that are no object or list."""
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        try:
            if isinstance(json.loads(value), dict):
                return value
        except (ValueError, RecursionError):
            return raw
    return raw
