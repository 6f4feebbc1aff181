"""`Scan`: reads JSON as it is generated, and knows where the items of an array have to differ.

What stands in such an array is kept without the whitespace between its tokens, and with one spelling of a number that
has ended, else as the model writes it. An item that has ended is compared as a value: its keys in any order.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Self

from dovetail_grammar.unique.locations import ValueShape

_SPACE = frozenset(b" \t\r\n")
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPEN, _CLOSE = frozenset(b"[{"), frozenset(b"]}")
_SPELLED = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\Z")
"""A number at the end of a text."""
_EXACT = 1 << 53
"""Whole numbers up to here are written without a point."""


class Mode(Enum):
    """What comes next."""

    VALUE = 0
    """A value, or the end of an array without any."""
    KEY = 1
    """A key, or the end of an object without any."""
    COLON = 2
    AFTER = 3
    """A comma, or the end of what is open."""
    STRING = 4
    """The rest of a string."""
    PLAIN = 5
    """The rest of a number, of `true`, `false` or `null`."""


class Items:
    """The items of one array so far, which only grow: who holds an older state of it takes a copy."""

    def __init__(self, *, is_mixed: bool = False) -> None:
        """Start without any."""
        self.is_mixed = is_mixed
        """Whether one may be what another may not."""
        self.texts: list[bytes] = []
        self.sorted: list[bytes] = []
        self.wide: dict[bytes, int] = {}
        """How far into an item there were many ways to go on."""
        self.continuations: dict[bytes, bytes] = {}
        """For beginnings of items, how one may go on that was none of them when it was found."""
        self.lengths: set[int] = set()
        self.longest = 0
        self._values: set[str] = set()

    def first(self, num: int) -> Items:
        """Return a copy of the first `num`."""
        made = Items(is_mixed=self.is_mixed)
        for text in self.texts[:num]:
            made.add(text, self.wide.get(text, 0))
        return made

    def has(self, value: str) -> bool:
        """Whether an item has this value."""
        return value in self._values

    def add(self, text: bytes, wide: int) -> None:
        """Add one."""
        self.texts.append(text)
        insort(self.sorted, text)
        self.wide[text] = 0 if self.is_mixed else wide
        self.lengths.add(len(text))
        self.longest = max(self.longest, len(text))
        self._values.add(value_of(text))

    def beginning(self, start: bytes) -> range:
        """Return where in `sorted` those are that begin so."""
        low = bisect_left(self.sorted, start)
        return range(low, bisect_left(self.sorted, start + b"\xff", low))  # which no text has

    def next_bytes(self, start: bytes) -> set[int]:
        """Return the bytes that come next in those that begin so."""
        found, place, size = set(), bisect_left(self.sorted, start), len(start)
        while place < len(self.sorted) and self.sorted[place].startswith(start):
            if len(self.sorted[place]) == size:
                place += 1
                continue
            byte = self.sorted[place][size]
            found.add(byte)
            place = bisect_left(self.sorted, start + bytes((byte + 1,)), place)
        return found


@dataclass(frozen=True, slots=True)
class ScanFrame:
    """An array or object that is open.

    Attributes:
        parent: What it stands in.
        is_object: Which of the two.
        shape: What is said of it; None for nothing.
        index: Of an array's item.
        items: Those that ended, where they have to differ; else None.
        tried: Those that ended while tokens were only tried out.
        start: Where in the scan's text the current item begins.
        depth: Of arrays with differing items, this one included.
    """

    parent: ScanFrame | None
    is_object: bool
    shape: ValueShape | None
    index: int
    items: Items | None
    tried: tuple[bytes, ...]
    start: int
    depth: int

    def has(self, text: bytes) -> bool:
        """Whether an item like this one has ended before."""
        value = value_of(text)
        return (self.items is not None and self.items.has(value)) or any(value_of(each) == value for each in self.tried)

    def next_bytes(self, text: bytes) -> set[int]:
        """Return the bytes that come next in items that begin with this text."""
        more = {each[len(text)] for each in self.tried if each.startswith(text) and each != text}
        return more if self.items is None else self.items.next_bytes(text) | more

    def is_near(self, text: bytes) -> bool:
        """Whether an item begins with this text."""
        if self.items is None:
            return False
        near = len(text) <= self.items.longest and len(self.items.beginning(text)) > 0
        return near or any(each.startswith(text) for each in self.tried)


class Scan:
    """The state between two tokens. `copy` before `feed`: a state that others hold stays as it is."""

    __slots__ = ("_escaped", "_is_key", "_shape", "frame", "is_trial", "mode", "repeats", "text", "wide")
    copied: ClassVar[tuple[str, ...]] = __slots__

    def __init__(self, shape: ValueShape | None) -> None:
        """Start at the beginning of a text."""
        self.mode = Mode.VALUE
        self.frame: ScanFrame | None = None
        self.text = b""
        self.repeats = False
        """Whether an item has ended that equals an earlier one."""
        self.is_trial = False
        self.wide = 0
        """How much of `text` was there when there last were many ways to go on."""
        self._shape = shape
        self._is_key = False
        self._escaped = False

    def copy(self, *, is_trial: bool = False) -> Self:
        """Return one to go on with; one to try tokens out leaves the arrays' items alone."""
        made = type(self).__new__(type(self))
        for name in self.copied:
            setattr(made, name, getattr(self, name))
        made.is_trial = is_trial
        return made

    def own(self, num_items: dict[int, int]) -> None:
        """Take copies of the items, which others may go on to add to, up to how many there were."""
        self.frame = _owned(self.frame, num_items)

    def num_items(self) -> dict[int, int]:
        """Return how many items there are in the arrays that are open, by depth."""
        return {frame.depth: len(frame.items.texts) for frame in self.frames() if frame.items is not None}

    def frames(self) -> Iterator[ScanFrame]:
        """Yield the arrays that are open and whose items differ, innermost first."""
        frame = self.frame
        while frame is not None and frame.depth:
            if frame.items is not None:
                yield frame
            frame = frame.parent

    def items(self) -> Iterator[tuple[ScanFrame, bytes]]:
        """Yield those arrays with the text of the item that has begun; empty where it has not."""
        for frame in self.frames():
            if frame is not self.frame or self.mode in (Mode.STRING, Mode.PLAIN):
                yield frame, self.text[frame.start :]
            elif self.mode is Mode.VALUE:
                yield frame, b""

    @property
    def is_watched(self) -> bool:
        """Whether it is within an array whose items differ."""
        return self.frame is not None and self.frame.depth > 0

    def is_near(self) -> bool:
        """Whether what has begun of an item begins an earlier one, too; not the nothing before the first item."""
        return self.is_zero() or any(frame.is_near(text) for frame, text in self.items())

    def is_zero(self) -> bool:
        """Whether an item ends in `-0` so far, and would begin an earlier one without the sign."""
        if self.mode is not Mode.PLAIN or not self.text.endswith(b"-0"):
            return False
        return any(frame.is_near(text[:-2] + b"0") for frame, text in self.items())

    def feed(self, data: bytes) -> int:
        """Read on; returns how far. Stops at an item that repeats an earlier one, and where the whole value ends."""
        place, size = 0, len(data)
        while place < size and not (self.repeats or (self.frame is None and self.mode is Mode.AFTER)):
            if self.mode is Mode.STRING:
                place = self._string(data, place)
                continue
            byte = data[place]
            if self.mode is Mode.PLAIN:
                if byte not in _SPACE and byte != _COMMA and byte not in _CLOSE:
                    self._keep(data[place : place + 1])
                    place += 1
                    continue
                self._end_value()
            elif byte not in _SPACE:
                self._structure(byte, data[place : place + 1])
                place += 1
                continue
            else:
                place += 1
        return place

    def _structure(self, byte: int, char: bytes) -> None:
        """Take a byte outside of strings and numbers, which is no whitespace."""
        if byte in _CLOSE:
            self._close(char)
        elif self.mode is Mode.AFTER:
            self._comma(char)
        elif self.mode is Mode.COLON:
            self._keep(char)
            self.mode = Mode.VALUE
        else:
            self._begin(byte, char)

    def _begin(self, byte: int, char: bytes) -> None:
        """Begin a key or a value."""
        frame = self.frame
        self._is_key = self.mode is Mode.KEY
        if frame is not None and frame.items is not None:
            if frame.depth == 1:
                self.text, self.wide = b"", 0
            self.frame = frame = replace(frame, start=len(self.text))
        elif self._is_key and not self.is_watched:
            self.text = b""
        if byte in _OPEN:
            self._keep(char)
            is_object = char == b"{"
            shape = self._shape
            items = Items(is_mixed=shape.is_mixed) if shape is not None and shape.is_unique and not is_object else None
            depth = (frame.depth if frame is not None else 0) + (items is not None)
            self.frame = ScanFrame(frame, is_object, self._shape, 0, items, (), 0, depth)
            self.mode = Mode.KEY if is_object else Mode.VALUE
            self._shape = None if is_object or self.frame.shape is None else self.frame.shape.item(0)
        else:
            self._keep(char)
            self.mode = Mode.STRING if byte == _QUOTE else Mode.PLAIN
            self._escaped = False

    def _string(self, data: bytes, place: int) -> int:
        """Take the rest of a string, as far as it is there; returns the place behind it."""
        at = place
        if self._escaped:
            at, self._escaped = at + 1, False
        while True:
            quote, back = data.find(_QUOTE, at), data.find(_BACKSLASH, at)
            if back >= 0 and (quote < 0 or back < quote):
                at = back + 2
                self._escaped = at > len(data)
                if at < len(data):
                    continue
                quote = -1
            if quote < 0:
                self._keep(data[place:])
                return len(data)
            self._keep(data[place : quote + 1])
            if self._is_key:
                self._end_key()
            else:
                self._end_value()
            return quote + 1

    def _keep(self, data: bytes) -> None:
        if self._is_key or (self.frame is not None and self.frame.depth):
            self.text += data

    def _end_key(self) -> None:
        frame = self.frame
        self.mode, self._is_key, self._shape = Mode.COLON, False, None
        if frame is not None and frame.shape is not None:
            begin = _key_start(self.text)
            self._shape = frame.shape.member(_name(self.text[begin:]))

    def _end_value(self) -> None:
        if self.mode is Mode.PLAIN:
            self.text = _one_spelling(self.text)
        self.mode = Mode.AFTER
        frame = self.frame
        if frame is None or frame.items is None:
            return
        text = self.text[frame.start :]
        if frame.has(text):
            self.repeats = True
        elif self.is_trial:
            self.frame = replace(frame, tried=(*frame.tried, text))
        else:
            frame.items.add(text, max(0, self.wide - frame.start))

    def _comma(self, char: bytes) -> None:
        self._keep(char)
        frame = self.frame
        if frame is None:
            return
        if frame.is_object:
            self.mode = Mode.KEY
            return
        self.mode = Mode.VALUE
        self._shape = None if frame.shape is None else frame.shape.item(frame.index + 1)
        self.frame = replace(frame, index=frame.index + 1)

    def _close(self, char: bytes) -> None:
        frame = self.frame
        if frame is None:
            return
        self.frame, self._is_key = frame.parent, False
        self._keep(char)
        self._end_value()
        if not self.is_watched:
            self.text = b""


def _one_spelling(text: bytes) -> bytes:
    """Return a text whose last number is written in one way: `1.0` and `1e0` as 1, `-0` as 0."""
    found = _SPELLED.search(text)
    if found is None or (found[0].lstrip(b"-").isdigit() and found[0] != b"-0"):
        return text
    value = float(found[0])
    if not math.isfinite(value):
        return text
    short = str(int(value)) if value.is_integer() and abs(value) < _EXACT else repr(value)
    return text[: found.start()] + short.encode()


def _owned(frame: ScanFrame | None, num_items: dict[int, int]) -> ScanFrame | None:
    if frame is None or not frame.depth:
        return frame
    items = frame.items.first(num_items[frame.depth]) if frame.items is not None else None
    return replace(frame, parent=_owned(frame.parent, num_items), items=items)


def _key_start(text: bytes) -> int:
    """Return where the string begins that a text ends with."""
    at = len(text) - 1
    while True:
        at = text.rfind(b'"', 0, at)
        before = at
        while before > 0 and text[before - 1] == _BACKSLASH:
            before -= 1
        if at < 0 or (at - before) % 2 == 0:
            return max(at, 0)


def _name(text: bytes) -> str:
    try:
        name = json.loads(text)
    except ValueError:
        return text.decode(errors="replace")
    return name if isinstance(name, str) else ""


def value_of(text: bytes) -> str:
    """Return a value in one way of writing it, which is equal for values that are equal."""
    try:
        return json.dumps(json.loads(text, parse_int=_number, parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return text.decode(errors="replace")


def _number(text: str) -> float:
    return float(text) + 0.0  # of two zeros it makes one
