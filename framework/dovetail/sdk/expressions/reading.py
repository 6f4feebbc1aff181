"""Regular expressions as trees, in ECMAScript's dialect, as JSON Schema says, or in one that is given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from dovetail.sdk.expressions.characters import ECMASCRIPT, Chars, Dialect, of, others, union

MAX_CHARS, MAX_DEPTH = 8000, 60
"""Of an expression, and groups within each other in it."""


class UnreadableError(ValueError):
    """What is no expression, or one that is no set of texts for us: back-references, properties of characters."""


@dataclass(frozen=True, slots=True)
class One:
    """One of some characters."""

    chars: Chars


@dataclass(frozen=True)
class Sequence:
    """One after the other."""

    parts: tuple[Tree, ...]

    @cached_property
    def is_plain(self) -> bool:
        """Whether nothing in it looks around."""
        return all(map(is_plain, self.parts))


@dataclass(frozen=True)
class Alternation:
    """One of several."""

    options: tuple[Tree, ...]

    @cached_property
    def is_plain(self) -> bool:
        """Whether nothing in it looks around."""
        return all(map(is_plain, self.options))


@dataclass(frozen=True)
class Repeat:
    """The same again; `most` may be infinite."""

    part: Tree
    least: int
    most: float

    @cached_property
    def is_plain(self) -> bool:
        """Whether nothing in it looks around."""
        return is_plain(self.part)


@dataclass(frozen=True, slots=True)
class Look:
    """What comes next, or came before, is, or is not, of an expression."""

    part: Tree
    is_ahead: bool
    is_not: bool


@dataclass(frozen=True, slots=True)
class Edge:
    r"""A place: `^`, `$`, `b` (between a word and something else) or `B`."""

    kind: str


Tree = One | Sequence | Alternation | Repeat | Look | Edge
ANYTHING = Repeat(One(((0, 0x10FFFF),)), 0, math.inf)


def is_plain(tree: Tree) -> bool:
    """Whether nothing in an expression looks around."""
    return isinstance(tree, One) or (not isinstance(tree, (Look, Edge)) and tree.is_plain)


def lengths(tree: Tree) -> tuple[float, float]:
    """Return the fewest and the most characters of an expression's texts."""
    if isinstance(tree, One):
        return 1, 1
    if isinstance(tree, Sequence):
        spans = [lengths(part) for part in tree.parts]
        return sum(low for low, _ in spans), sum(high for _, high in spans)
    if isinstance(tree, Alternation):
        spans = [lengths(part) for part in tree.options]
        return min(low for low, _ in spans), max(high for _, high in spans)
    if isinstance(tree, Repeat):
        low, high = lengths(tree.part)
        return low * tree.least, high * tree.most if high and tree.most else 0
    return 0, 0


def read(pattern: str, dialect: Dialect | None = None) -> Tree:
    """Read an expression, as ECMAScript does where no dialect is given.

    Raises:
        UnreadableError: See there.
    """
    if len(pattern) > MAX_CHARS:
        raise UnreadableError(f"an expression of {len(pattern)} characters")
    return _PatternReader(pattern, dialect or ECMASCRIPT).whole()


_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_LOOKS = {"?=": (True, False), "?!": (True, True), "?<=": (False, False), "?<!": (False, True)}


class _PatternReader:
    def __init__(self, text: str, dialect: Dialect) -> None:
        self._text, self._at, self._depth = text, 0, 0
        self._dialect = dialect
        named = {"d": dialect.digit, "w": dialect.word, "s": dialect.space}
        self._classes = named | {name.upper(): others(chars) for name, chars in named.items()}

    def whole(self) -> Tree:
        found = self._choice()
        if self._at < len(self._text):
            self._fail("a parenthesis that closes none")
        return found

    def _fail(self, why: str) -> NoReturn:
        raise UnreadableError(f"{why} at character {self._at + 1}")

    def _takes(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _next(self) -> str:
        if self._at >= len(self._text):
            self._fail("the end comes too early")
        self._at += 1
        return self._text[self._at - 1]

    def _choice(self) -> Tree:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail("groups within too many others")
        options = [self._sequence()]
        while self._takes("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _sequence(self) -> Tree:
        parts: list[Tree] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._part()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, part: Tree) -> Tree:
        counts = self._counts()
        if counts is None:
            return part
        self._takes("?")  # which text is found, not whether one is
        if isinstance(part, (Look, Edge)) or self._counts() is not None:
            self._fail("a repetition of nothing")
        return Repeat(part, *counts)

    def _counts(self) -> tuple[int, float] | None:
        for sign, counts in (("*", (0, math.inf)), ("+", (1, math.inf)), ("?", (0, 1.0))):
            if self._takes(sign):
                return counts
        end = self._text.find("}", self._at)
        if not self._text.startswith("{", self._at) or end < 0:
            return None
        low, comma, high = self._text[self._at + 1 : end].partition(",")
        if not (low.isdecimal() and (not high or high.isdecimal())):
            return None
        self._at = end + 1
        least, most = int(low), float(int(high) if high else math.inf if comma else int(low))
        if most < least:
            self._fail("a range that ends before it begins")
        return least, most

    def _part(self) -> Tree:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return One(self._class())
        if char in "^$":
            return Edge(char)
        if char == ".":
            return One(others(self._dialect.line_ends))
        if char == "\\":
            return self._escaped()
        if char in "*+?" or (char == "{" and not self._dialect.has_empty_class):
            self._fail("a repetition of nothing")
        return One(of(char))

    def _group(self) -> Tree:
        look = next((sign for sign in _LOOKS if self._takes(sign)), None)
        if look is None and self._takes("?<"):
            end = self._text.find(">", self._at)
            if end < 0 or not self._text[self._at : end].isidentifier():
                self._fail("a group without a name")
            self._at = end + 1
        elif look is None and not self._takes("?:") and self._takes("?"):
            self._fail("a group of a kind that ECMAScript does not know")
        inner = self._choice()
        if not self._takes(")"):
            self._fail("a group that does not end")
        return inner if look is None else Look(inner, *_LOOKS[look])

    def _escaped(self) -> Tree:
        if self._takes("b"):
            return Edge("b")
        if self._takes("B"):
            return Edge("B")
        found = self._escape()
        return One(found if isinstance(found, tuple) else of(found))

    def _escape(self) -> str | Chars:
        char = self._next()
        if char in self._classes:
            return self._classes[char]
        if char == "x" or (char == "u" and not self._text.startswith("{", self._at)):
            return self._numbered(2 if char == "x" else 4)
        if char == "u":
            end = self._text.find("}", self._at)
            digits = self._text[self._at + 1 : max(end, self._at + 1)]
            self._at = end + 1
            return self._character(digits)
        if char in _CONTROLS and not (char == "0" and self._text[self._at : self._at + 1].isdecimal()):
            return _CONTROLS[char]
        if char.isalnum():
            self._fail("an escape that is not read here")
        return char

    def _numbered(self, count: int) -> str:
        digits = self._text[self._at : self._at + count]
        self._at += len(digits)
        if len(digits) < count:
            self._fail("a number that is too short")
        return self._character(digits)

    def _character(self, digits: str) -> str:
        try:
            code = int(digits, 16)
            if 0xD800 <= code <= 0xDFFF:
                self._fail("half a character")
            return chr(code)
        except (ValueError, OverflowError):
            self._fail("no number of a character")

    def _class(self) -> Chars:
        is_not = self._takes("^")
        ranges: list[tuple[int, int]] = []
        is_member = not self._dialect.has_empty_class
        while is_member or not self._takes("]"):
            is_member = False
            first = self._member()
            if isinstance(first, tuple) or not self._text.startswith("-", self._at):
                ranges += first if isinstance(first, tuple) else of(first)
                continue
            self._at += 1
            if self._text.startswith("]", self._at):
                ranges += of(first + "-")
                continue
            last = self._member()
            if isinstance(last, tuple):
                ranges += (*of(first + "-"), *last)
            elif last < first:
                self._fail("a range that ends before it begins")
            else:
                ranges.append((ord(first), ord(last)))
        found = union(ranges)
        return others(found) if is_not else found

    def _member(self) -> str | Chars:
        char = self._next()
        if char != "\\":
            return char
        if self._takes("b"):
            return "\b"
        return "-" if self._takes("-") else self._escape()
