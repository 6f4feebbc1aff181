"""Reads a JSON text in pieces that may end anywhere, and keeps of it what tells where it stands in its schema.

What is read was allowed by a grammar before: it is not judged again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from dovetail_grammar.local_schemas import Schemas

MAX_RAW = 256
"""Bytes of a string that counts letter by letter, or of a number, up to which it is followed."""
_SPACE = frozenset(b" \t\r\n")
_SCALAR = frozenset(b"-+.0123456789eEtrufalsn")
_QUOTE, _ESCAPE = b'"'[0], b"\\"[0]
_STOPS = re.compile(rb'["\\]')
_DIGITS = re.compile(rb"[0-9]+")

VALUE, ITEM_OR_END, KEY_OR_END, KEY, IN_KEY, COLON, STRING, SCALARS, AFTER = range(9)
"""What comes next, or goes on; `AFTER`: what may stand behind a value."""

Frame = tuple[Schemas, tuple[bytes, ...] | None]
"""An open container: what may hold for it, and an object's keys, or None for an array."""
Place = tuple[tuple[Frame, ...], int, Any]
START: Place = ((), VALUE, b"")
Counts = tuple[int, ...]
"""Of each open array, how many items were closed in it: kept beside a place, as what is read does not depend on it."""


class Change(NamedTuple):
    """What a text does to counts: so many of them stay, more items in the last of these, and then others."""

    kept: int
    more: int
    opened: Counts

    def of(self, counts: Counts) -> Counts:
        """Return the counts behind the text."""
        kept, more, opened = self
        return (*counts[: kept - 1], counts[kept - 1] + more, *opened) if more else counts[:kept] + opened


def schemas_at(root: Schemas, frames: Sequence[Frame]) -> Schemas:
    """Return what may hold for the value that stands or comes at a place."""
    if not frames:
        return root
    schemas, keys = frames[-1]
    return schemas.items if keys is None else schemas.value(json.loads(keys[-1]))


class JsonReader:
    """Goes on from a place with what the library has allowed."""

    def __init__(self, root: Schemas, place: Place) -> None:
        self._root = root
        frames, self.phase, self.part = place
        self.frames = list(frames)
        self._num_arrays = self._kept = sum(keys is None for _, keys in frames)
        self._counts = [0] * self._kept

    @property
    def place(self) -> Place:
        """Where the text stands now."""
        return tuple(self.frames), self.phase, self.part

    @property
    def change(self) -> Change | None:
        """What was read does to counts; None for nothing."""
        kept, counts = self._kept, self._counts
        more = counts[kept - 1] if kept else 0
        if not more and kept == self._num_arrays == len(counts):
            return None
        return Change(kept, more, tuple(counts[kept:]))

    def read(self, data: bytes) -> int | None:
        """Go on; returns up to where, or None where what is written is too long to be followed."""
        at, end = 0, len(data)
        while at < end:
            if self.phase == STRING or self.phase == IN_KEY:
                at = self._in_quotes(data, at)
            elif self.phase == SCALARS and data[at] in _SCALAR:
                self.part = self._collapsed(self.part + data[at : at + 1])
                at += 1
            elif not self._is_taken(data[at]):
                return at
            else:
                at += 1
            if len(self.part if isinstance(self.part, bytes) else self.part[1]) > MAX_RAW:
                return None
        return at

    def _is_taken(self, byte: int) -> bool:
        """Take a byte outside strings and scalars."""
        if self.phase == SCALARS:
            self._close()
        if byte in _SPACE:
            # All whitespace counts alike, but for that around the whole text, which may be another text's beginning.
            self.part += b" " if self.frames else bytes((byte,))
            return True
        written, self.part = self.part, b""
        if self._steps(byte):
            return True
        self.part = written
        return False

    def _steps(self, byte: int) -> bool:
        """Take what is no whitespace there."""
        phase = self.phase
        if phase in (VALUE, ITEM_OR_END) and byte != b"]"[0]:
            return self._begins(byte)
        if byte == _QUOTE and phase in (KEY, KEY_OR_END):
            self.phase, self.part = IN_KEY, b'"'
            return True
        if byte == b":"[0] and phase == COLON:
            self.phase = VALUE
            return True
        if not self.frames:
            return False
        is_array = self.frames[-1][1] is None
        if byte == b","[0] and phase == AFTER:
            self.phase = VALUE if is_array else KEY
            return True
        if byte == b"]"[0] and is_array and phase in (AFTER, ITEM_OR_END):
            self._end()
            return True
        if byte == b"}"[0] and not is_array and phase in (AFTER, KEY_OR_END):
            self._end()
            return True
        return False

    def _begins(self, byte: int) -> bool:
        """Take the first byte of a value."""
        held = schemas_at(self._root, self.frames)
        if byte == _QUOTE:
            self.phase, self.part = STRING, b'"' if held.reads_strings else (0, b"")
        elif byte == b"{"[0]:
            self.frames.append((held, ()))
            self.phase = KEY_OR_END
        elif byte == b"["[0]:
            self.frames.append((held, None))
            self._counts.append(0)
            self.phase = ITEM_OR_END
        elif byte in _SCALAR:
            self.phase, self.part = SCALARS, self._collapsed(bytes((byte,)))
        else:
            return False
        return True

    def _end(self) -> None:
        if self.frames.pop()[1] is None:
            self._counts.pop()
            self._kept = min(self._kept, len(self._counts))
        self._close()

    def _close(self) -> None:
        """A value is complete: of an array it counts."""
        self.phase, self.part = AFTER, b""
        if self.frames and self.frames[-1][1] is None:
            self._counts[-1] += 1

    def _collapsed(self, number: bytes) -> bytes:
        """Write a number that is free in its shortest form that may go on alike."""
        if schemas_at(self._root, self.frames).reads_numbers:
            return number
        return _DIGITS.sub(lambda run: b"0" if run[0][:1] == b"0" and not _is_behind(run) else b"1", number)

    def _in_quotes(self, data: bytes, at: int) -> int:
        """Go on in a string or a key; returns up to where."""
        if _is_escaping(self.part if isinstance(self.part, bytes) else self.part[1]):
            self._write(data[at : at + 1])
            return at + 1
        stop = _STOPS.search(data, at)
        until = len(data) if stop is None else stop.start()
        if until > at:
            self._write(data[at:until])
        if stop is None:
            return until
        if data[until] == _ESCAPE:
            self._write(b"\\")
        elif self.phase == STRING:
            self._close()
        else:
            schemas, keys = self.frames[-1]
            self.frames[-1] = (schemas, (*(keys or ()), self.part + b'"'))
            self.phase, self.part = COLON, b""
        return until + 1

    def _write(self, text: bytes) -> None:
        """Add to a string or key what is no quote that ends it."""
        if isinstance(self.part, bytes):
            self.part += text
            return
        count, rest = self.part
        if rest[:1] == b"\\" or text[:1] == b"\\":
            # From the first escape on everything counts as it is written.
            self.part = (count, rest + text)
            return
        bounds = schemas_at(self._root, self.frames).lengths
        if bounds:
            count = min(count + sum(byte & 0xC0 != 0x80 for byte in text), bounds[-1] + 1)
        self.part = (count, _unfinished(rest + text))


def _is_behind(run: re.Match[bytes]) -> bool:
    """Whether digits are a fraction's or an exponent's, where a zero in front says nothing."""
    before = run.string[: run.start()]
    return before[-1:] in (b".", b"e", b"E", b"+") or before[-2:-1] in (b"e", b"E")


def _is_escaping(text: bytes) -> bool:
    """Whether the next byte is the one behind a backslash."""
    return (len(text) - len(text.rstrip(b"\\"))) % 2 == 1


def _unfinished(text: bytes) -> bytes:
    """Return the bytes at the end that begin a character whose others are to come."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & 0xC0 != 0x80:
            needs = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return text[-back:] if needs > back else b""
    return text[-3:]
