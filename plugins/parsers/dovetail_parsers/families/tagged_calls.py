"""`TaggedCalls`: tool calls written with tags around names and values, as XML-like formats do.

```
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
```

A value is text without quotes or escapes; its type comes from the tool's schema, or from the tags where they say it.
Strings stream while they are written, other types come when their tag closes. A closing tag counts only if what
follows it can follow it, so a value may hold text that looks like its own closing tag; in a list or an object, no tag
counts within quotes that are closed. Closing tags may be missing: the tag of another key ends a value where it names a
parameter of the tool that has not been given.
Text that belongs to no call is `Malformed`, and reading goes on at the next call's tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from dovetail.contracts.output import Malformed, NewCall, ToolArgs, ToolEnd, ToolEvent
from dovetail.sdk.formats.schema_types import (
    CONTAINERS,
    STRING,
    cut_text,
    properties_of,
    quoted,
    schemas_by_tool,
    types_of,
    value_text,
)
from dovetail.sdk.formats.tags import CDATA_START, Tags, matchers, spellings
from dovetail_parsers.families.headed_calls import MAX_HEAD, is_half_a_head
from dovetail_parsers.families.marked_calls import MarkedCalls

# What the text of a value between tags means, once it is complete or cut short: for `TaggedCalls`.

_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
_WRAPPERS = frozenset(["arguments", "input", "parameters", "properties"])
"""Keys under which models put all arguments at times, as JSON."""
_OBJECT = frozenset(["object"])


def is_wrapper(key: str, known: Mapping[str, Any]) -> bool:
    """Whether all arguments may stand under a key, which is none of the tool's `known` parameters."""
    return key in _WRAPPERS and bool(known) and key not in known


def unwrap(text: str, schema: Mapping[str, Any] | None) -> tuple[str, int] | None:
    """Return the members' JSON text and the number of arguments that one value holds.

    None: it holds no object of the tool's parameters alone, which `schema` describes.
    """
    text = text.strip()
    if text.startswith("{"):
        text = value_text(text, _OBJECT)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not found.keys() <= properties_of(schema).keys():
        return None
    return text[1:-1].strip(), len(found)


def whole_value(text: str, types: frozenset[str], *, cdata: bool) -> str:
    """Return the JSON text of a value of one of some types; `cdata`: it may stand in a CDATA section."""
    found = _CDATA.fullmatch(text) if cdata else None
    return value_text(found[1] if found else cut_value(text, cdata=cdata) if text.strip() else text, types)


def cut_value(text: str, *, cdata: bool) -> str:
    """Return what is there of a value that was cut short, without the beginning of its CDATA section."""
    inner = text.lstrip()
    if not cdata or not (inner.startswith(CDATA_START) or CDATA_START.startswith(inner)):
        return text
    return inner[len(CDATA_START) :].removesuffix(">").removesuffix("]").removesuffix("]")


_NAME = re.compile(r"[.:/\-]*\w[\w.:/\-]*")  # `...` stands for one in prose
_IN_NAME = re.compile(r"[\w.:/\-]")
_SPACE = re.compile(r"\s*")
_PRINTED = re.compile(r"\S")
_ANY = frozenset(["null", "boolean", "integer", "number", "array", "object"])
At = Literal["call", "name", "params", "key", "gap", "value", "confirm", "broken"]


class TaggedCalls(MarkedCalls):
    """Reads calls one after the other."""

    def __init__(
        self, new_call: NewCall, tags: Tags, tools: Sequence[Mapping[str, Any]] = (), *, name: str | None = None
    ) -> None:
        """Prepare.

        Args:
            new_call: Numbers the calls.
            tags: The format's.
            tools: As OpenAI writes them, for the types of values.
            name: The function's, where it stands outside of the section: then this is one call's arguments.
        """
        marks = matchers(tags)
        super().__init__(new_call, tools, marks, marks["call"] if tags.call[0] else None)
        self._tags = tags
        self._schema: Mapping[str, Any] | None = None
        self._meant = dict(tags.spelled)
        self._plain = not_plain(tags)
        self._followers = followers(tags)
        self._first: At = "call" if tags.call[0] else "name"
        self._at: At = self._first
        self._head: list[str] = []
        self._head_len = 0
        self._num_keys = 0
        self._left: set[str] = set()
        self._types = STRING
        self._streams = True
        self._value: list[str] = []
        self._quotes: Quotes | None = None
        """Of a value that is a list or an object, as far as it is read."""
        self._trusts_quotes = self._is_blank = True
        self._wrapper = ""
        """The key of a value that may hold all arguments: nothing of it was given out."""
        self._newline = ""
        self._at_start = False
        self._closer = ""
        self._gap: list[str] = []
        self._space: list[str] = []
        if name is not None:
            self._start(name)

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        is_value = self._at == "value" and self._streams and not (self._held or self._newline or self._at_start)
        if is_value and text and self._call is not None and self._plain(text) is None:
            piece = ToolArgs(self._call, text)
            if not self._is_held:
                return [piece]
            self._raw.append(text)
            self._out.append(piece)
            return []
        if self._read_on[1] and self._goes_on_in_mark(text):  # no call where nothing is held
            return []
        text, self._held = self._held + text, ""
        pos = 0
        while pos < len(text):
            if self._at == "broken":
                pos = self._skip_noise(text, pos)
            else:
                pos = self._confirm(text, pos) if self._at == "confirm" else self._read(text, pos)
        return self._take_out()

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends inside a value."""
        return self._at == "value" or (self._at == "confirm" and (bool(self._held) or self._awaits_key))

    @property
    def _awaits_key(self) -> bool:
        """Whether what is to be confirmed is the tag of another key."""
        return self._meant.get(self._closer, self._closer) == self._tags.key[0]

    def _finish(self, *, complete: bool) -> list[ToolEvent]:
        events = self._close_quotes()
        held, self._held = self._held, ""
        if self._at == "confirm" and (held or (complete and self._awaits_key)):
            self._unconfirmed()
        if held:
            (self._give_noise if self._at == "broken" else self._text)(held)
        if self._at == "name" and complete and not self._tags.call[0]:
            name = self._tags.read_name("".join(self._head))
            if not self.is_unended or name in schemas_by_tool(self._tools):  # else a word behind a marker in prose
                self._start(name)
        if self._is_held and (self._at == "value" or not complete or not (self._num_keys or not self._tags.call_end)):
            self._break()  # in doubt, and not ended
        elif self._call is None:
            if self._at != "broken" and "".join(self._raw).strip() and (complete or not self._begins_call()):
                self._break()
        else:
            if self._at == "confirm" or (self._at == "value" and complete):
                self._end_value()
            elif self._at == "value" and not self._streams:
                if self._wrapper:
                    self._give_key(self._wrapper)
                self._args(cut_text(cut_value("".join(self._value), cdata=self._tags.cdata), self._types))
            elif self._at in ("key", "gap") and (raw := "".join(self._head)) and (complete or not is_half_a_head(raw)):
                self._give_lone_key()
            self._end_call(complete=complete)
        return [*events, *self._take_out()]

    def _close_quotes(self) -> list[ToolEvent]:
        """Read on from the first tag within quotes that nothing closed: it counts then, and no quotes do any more."""
        at = self._quotes.first if self._at == "value" and self._quotes is not None and self._quotes.is_open else None
        self._trusts_quotes = self._trusts_quotes and at is None
        if at is None or self._is_held:
            return []
        text, self._held = "".join(self._value) + self._newline + self._held, ""
        self._value, self._newline, self._quotes, self._is_blank = [], "", None, False
        self._value_text(text[:at])
        return self.feed(text[at:])  # not kept: a call in doubt behind it would take it along when it breaks

    def _begins_call(self) -> bool:
        """Whether what was read is the beginning of a call, of which nothing is worth showing."""
        head = "".join(self._head)
        return (
            self._at == "name"
            and is_half_a_head(head)
            and (bool(self._tags.call[0]) or _NAME.fullmatch(head.strip()) is not None)
        )

    def _resume(self) -> None:
        self._begin_head("call")

    def _text(self, text: str) -> None:
        """Take text between tags."""
        if not text:
            return
        if self._call is None or self._is_held:
            self._raw.append(text)
        if self._at == "value":
            self._value_text(text)
        elif self._at in ("name", "key"):
            self._head.append(text)
            self._head_len += len(text)
            if self._call is None and self._head_len > MAX_HEAD:
                self._break()
        elif self._call is not None:
            self._stray(text)
        elif not text.isspace():
            self._break()

    def _breaks_behind(self, text: str, pos: int, end: int) -> int:
        if self._at in ("name", "key"):
            return min(end, pos + MAX_HEAD + 1 - self._head_len) if self._call is None else end
        found = _PRINTED.search(text, pos, end) if self._at != "value" else None
        return end if found is None else found.end()

    def _stray(self, text: str) -> None:
        """Text between the tags of a call belongs to none: it goes out, without the whitespace around it."""
        if text.isspace():
            self._space.append(text)
            return
        if self._is_held:
            self._break()
            return
        kept = text.rstrip()
        self._out.append(Malformed("tool_call", "".join([*self._space, kept])))
        self._space[:] = [text[len(kept) :]]

    def _mark(self, mark: str, start: int, end: int) -> int:
        """Take a tag that stands from `start` to `end`; return where to read on."""
        tags = self._tags
        self._space.clear()
        if self._call is None or self._is_held:
            self._raw.append(mark)
        tag = self._meant.get(mark, mark)
        if self._at == "call":
            self._begin_head("name")
        elif self._at == "name":
            self._start(tags.read_name("".join(self._head)))
            return start if self._call is not None and not tags.call[0] else end
        elif self._at == "key" and mark == tags.key[1] and tags.value_start:
            self._at = "gap"
        elif (self._at == "key" and mark == tags.key[1]) or (self._at == "gap" and tag == tags.value_start):
            self._begin_value()
        elif self._at in ("key", "gap") and self._is_held:
            self._break()
        elif self._at == "value" and self._quotes is not None and self._quotes.is_open:
            self._quotes.note(len(self._newline))
            self._value_text(mark)
        elif self._at == "value":
            self._at, self._closer = "confirm", mark
        else:
            if self._at in ("key", "gap"):
                self._give_lone_key()
            if tag == tags.key[0]:
                self._begin_head("key")
            else:
                self._end_call(complete=True)
        return end

    def _begin_head(self, at: At) -> None:
        self._at = at
        self._head.clear()
        self._head_len = 0

    def _start(self, name: str) -> None:
        if _NAME.fullmatch(name) is None:
            self._break()
            return
        self._call = self._begin_call(name)
        if self._call is None:
            self._break()
            return
        self._schema = schemas_by_tool(self._tools).get(name)
        self._left = set(properties_of(self._schema))
        self._num_keys = 0
        self._at = "params"

    def _give_lone_key(self) -> None:
        """Give out a key without a value, or the beginning of one: it is no argument."""
        first, last = self._tags.key
        self._out.append(Malformed("tool_call", first + "".join(self._head) + last * (self._at == "gap")))

    def _begin_value(self) -> None:
        self._at = "value"
        key, is_string = self._tags.read_key("".join(self._head))
        self._left.discard(key)
        known = properties_of(self._schema)
        self._wrapper = key if is_wrapper(key, known) else ""
        if not self._wrapper:
            self._give_key(key)
        self._types = types_of(known.get(key), self._schema)
        if not self._types and is_string is not None:
            self._types = STRING if is_string else _ANY
        self._value.clear()
        self._quotes, self._is_blank = None, True
        self._newline, self._at_start = "", self._tags.newlines
        self._streams = self._types == STRING and not self._tags.cdata and not self._wrapper
        if self._streams:
            self._args('"')

    def _give_key(self, key: str) -> None:
        self._args(("{" if not self._num_keys else ", ") + quoted(key) + ": ")
        self._num_keys += 1

    def _unwrap(self) -> bool:
        """Give out arguments of the tool that stand in one value. False: it holds none, and its key was given out."""
        found = unwrap(cut_value("".join(self._value), cdata=self._tags.cdata), self._schema)
        if found is None:
            self._give_key(self._wrapper)
            return False
        members, num_members = found
        if num_members:
            self._args(("{" if not self._num_keys else ", ") + members)
        self._num_keys += num_members
        return True

    def _value_text(self, text: str) -> None:
        """Take text of a value: drop the newline at its start, keep back the one that may end it."""
        if self._at_start:
            self._at_start = False
            text = text.removeprefix("\n")
        text, self._newline = self._newline + text, ""
        if self._tags.newlines and text.endswith("\n"):
            text, self._newline = text[:-1], "\n"
        if not self._streams:
            self._value.append(text)
            self._follow(text)
        elif text:
            self._args(quoted(text)[1:-1])

    def _follow(self, text: str) -> None:
        """Follow the quotes of a value that begins as a list or an object does."""
        if self._is_blank and (first := text.lstrip()[:1]):
            self._is_blank = False
            if first in "[{" and self._trusts_quotes and self._types & CONTAINERS and "string" not in self._types:
                self._quotes, text = Quotes(), "".join(self._value)
        if self._quotes is not None:
            self._quotes.feed(text)

    def _confirm(self, text: str, pos: int) -> int:
        """See whether what follows a closing tag may follow it."""
        after = pos
        if text[pos].isspace() and (space := _SPACE.match(text, pos)) is not None:
            after = space.end()
            self._gap.append(text[pos:after])
            if self._is_held:
                self._raw.append(text[pos:after])
            if after == len(text):
                return after
        tags = self._tags
        if self._awaits_key:
            return self._confirm_key(text, pos, after)
        followers = self._followers[self._closer == tags.value_end]
        if text.startswith(followers.tags, after):
            self._end_value()
            if self._closer != tags.value_end:
                self._end_call(complete=True)
        elif text[after:] in followers.beginnings:
            self._held = text[after:]
            return len(text)
        else:
            self._unconfirmed()
        return after

    def _confirm_key(self, text: str, pos: int, after: int) -> int:
        """See whether a key's tag in a value names a parameter: then the value lacks its closing tag."""
        rest = text[after : after + max(map(len, self._left), default=0) + 1]
        names = [name for name in self._left if rest.startswith(name) and len(rest) > len(name)]
        if any(not _IN_NAME.match(rest[len(name) :]) for name in names):
            self._end_value()
            self._begin_head("key")
            return after
        if any(name.startswith(rest) for name in self._left):
            self._held = text[after:]
            return len(text)
        self._unconfirmed()
        return after

    def _unconfirmed(self) -> None:
        """The closing tag was part of the value."""
        self._at = "value"
        self._value_text(self._closer)
        if gap := "".join(self._gap):
            self._value_text(gap)
        self._gap.clear()

    def _end_value(self) -> None:
        if not (self._wrapper and self._unwrap()):
            text = "".join(self._value)
            self._args('"' if self._streams else whole_value(text, self._types, cdata=self._tags.cdata))
        self._gap.clear()
        self._at = "params"

    def _end_call(self, *, complete: bool) -> None:
        if self._call is None:
            return
        if complete:
            self._args("}" if self._num_keys else "{}")
        self._out.append(ToolEnd(self._call))
        self._call = None
        self._settle()
        self._space.clear()
        self._begin_head(self._first)

    def _args(self, json: str) -> None:
        if self._call is not None and json:
            self._out.append(ToolArgs(self._call, json))


class Followers(NamedTuple):
    """What may follow a closing tag, and all that any of it may begin with."""

    tags: tuple[str, ...]
    beginnings: frozenset[str]


@lru_cache(maxsize=64)
def followers(tags: Tags) -> tuple[Followers, Followers]:
    """Return what may follow the end of a call, and that of a value."""
    one, two = spellings(tags, (tags.call[0],)), spellings(tags, (tags.key[0], tags.call_end))
    begun = [frozenset(tag[:size] for tag in group for size in range(1, len(tag))) for group in (one, two)]
    return Followers(one, begun[0]), Followers(two, begun[1])


@lru_cache(maxsize=64)
def not_plain(tags: Tags) -> Callable[[str], re.Match[str] | None]:
    """Return what finds a character of a string value that may begin a tag, or is written in another way in JSON."""
    firsts = "".join(re.escape(tag[0]) for tag in (tags.value_end, tags.call_end, tags.key[0]) if tag)
    return re.compile(rf'[{firsts}"\\\x00-\x1f]').search


_QUOTED = re.compile(r"""([^"']*)(?:["'](?:\s+[\w.:-]+\s*=\s*(?:"[^"<>\n]*(?:"|\Z)|'[^'<>\n]*(?:'|\Z)))*+\s*)?""")
"""A name, the quotation mark behind it, and attributes. The last value may lack its mark, which the tag's end holds."""


def before_attributes(text: str) -> str:
    """Read a name in quotes without attributes behind it; all of the text if anything else stands there."""
    found = _QUOTED.fullmatch(text)
    return (text if found is None else found[1]).strip()


def key_before_attributes(text: str) -> tuple[str, bool | None]:
    """Read a key in quotes without attributes behind it, as the schema says more of its value than they do."""
    return before_attributes(text), None


_QUOTES = re.compile(r'\\.|"', re.DOTALL)


class Quotes:
    """Follows the strings of JSON that arrives in pieces.

    Attributes:
        is_open: Whether what was read ends inside a string.
        first: The place that was noted first since that string began.
    """

    __slots__ = ("_escaped", "_num_read", "first", "is_open")

    def __init__(self) -> None:
        self.is_open = self._escaped = False
        self.first: int | None = None
        self._num_read = 0

    def feed(self, text: str) -> None:
        """Read on."""
        end = int(self._escaped)
        for found in _QUOTES.finditer(text, end):
            end = found.end()
            if found[0] == '"':
                self.is_open, self.first = not self.is_open, None
        if text:
            self._escaped = text.endswith("\\") and end < len(text)
            self._num_read += len(text)

    def note(self, num_behind: int) -> None:
        """Keep the position `num_behind` characters behind the text read, if it is the first in the string."""
        if self.first is None:
            self.first = self._num_read + num_behind
