"""Sets of characters: sorted, disjoint ranges of code points, first and last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Chars = tuple[tuple[int, int], ...]
LAST = 0x10FFFF
ALL: Chars = ((0, LAST),)


def union(ranges: Iterable[tuple[int, int]]) -> Chars:
    """Return the set of all characters in some ranges."""
    made: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(high, made[-1][1]))
        else:
            made.append((low, high))
    return tuple(made)


def others(chars: Chars) -> Chars:
    """Return all characters but some."""
    made, start = [], 0
    for low, high in chars:
        if low > start:
            made.append((start, low - 1))
        start = high + 1
    if start <= LAST:
        made.append((start, LAST))
    return tuple(made)


def of(text: str) -> Chars:
    """Return the characters of a text."""
    return union((ord(char), ord(char)) for char in text)


def ranges(chars: Chars) -> str:
    """Write a set as what stands between a class's brackets."""
    special, parts = r"\]^[-&~/", []
    for low, high in chars:
        last = "" if low == high else f"{'-' if high > low + 1 else ''}{escaped(high, special)}"
        parts.append(escaped(low, special) + last)
    return "".join(parts)


def escaped(code: int, special: str) -> str:
    """Write one character, behind a backslash where it is one of the `special` ones."""
    char = chr(code)
    if code < 0x20 or code == 0x7F:
        return f"\\x{code:02x}"
    return f"\\{char}" if char in special else char


DIGIT: Chars = ((48, 57),)
WORD = union(((48, 57), (65, 90), (95, 95), (97, 122)))
SPACE = of("\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff" + "".join(map(chr, range(0x2000, 0x200B))))
LINE_ENDS = of("\n\r\u2028\u2029")


@dataclass(frozen=True, eq=False)
class Dialect:
    r"""What an expression's `\d`, `\w`, `\s`, `.` and `\b` mean.

    Attributes:
        digit: The characters of `\d`.
        word: Those of `\w`; `\b` is between one and another character.
        space: Those of `\s`.
        line_ends: Those that `.` leaves out.
        has_empty_class: Whether `[]` is a class of no character; otherwise a bracket that is a class's first member
            is one of its characters.
    """

    digit: Chars
    word: Chars
    space: Chars
    line_ends: Chars
    has_empty_class: bool


ECMASCRIPT = Dialect(DIGIT, WORD, SPACE, LINE_ENDS, has_empty_class=True)
