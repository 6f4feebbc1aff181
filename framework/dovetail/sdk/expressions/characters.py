"""Sets of characters: sorted, disjoint ranges of code points, first and last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations, pairwise

Chars = tuple[tuple[int, int], ...]
LAST = 0x10FFFF
ALL: Chars = ((0, LAST),)
_SURROGATES: Chars = ((0xD800, 0xDFFF),)


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


def both(first: Chars, second: Chars) -> Chars:
    """Return what two sets have in common."""
    return others(union((*others(first), *others(second))))


def of(text: str) -> Chars:
    """Return the characters of a text."""
    return union((ord(char), ord(char)) for char in text)


def classes(sets: Iterable[Chars]) -> list[Chars]:
    """Return the coarsest sets that make up all characters and tell none of some sets' members apart."""
    bounds = sorted({0, LAST + 1, *(edge for chars in sets for low, high in chars for edge in (low, high + 1))})
    owners: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    known = list(sets)
    at = [0] * len(known)
    for low, after in pairwise(bounds):
        member = []
        for index, chars in enumerate(known):
            while at[index] < len(chars) and chars[at[index]][1] < low:
                at[index] += 1
            member.append(at[index] < len(chars) and chars[at[index]][0] <= low)
        owners.setdefault(tuple(member), []).append((low, after - 1))
    return [union(ranges) for ranges in owners.values()]


@lru_cache(maxsize=1024)
def usual(chars: Chars, without: Chars) -> Chars:
    """Return a set without rarely written characters, unless it has all that JSON writes with an escape."""
    return chars if both(chars, _ESCAPED) == _ESCAPED else both(chars, others(without))


@lru_cache(maxsize=1024)
def written(chars: Chars) -> str:
    """Write a set as a character or a class that every dialect reads alike."""
    chars = both(chars, others(_SURROGATES))
    rest = both(others(chars), others(_SURROGATES))
    if _NAMES and len(chars) > _FEW and (known := _NAMES.get(both(chars, _BEYOND_ASCII))):
        return _by_name(chars, *known)
    if not rest:
        return r"[\s\S]"
    if len(chars) == 1 and chars[0][0] == chars[0][1]:
        return _one(chars[0][0], r"\^$.|?*+()[]{}/")
    return f"[{ranges(chars)}]" if not chars or chars[-1][1] < LAST else f"[^{ranges(rest)}]"


def ranges(chars: Chars) -> str:
    """Write a set as what stands between a class's brackets."""
    special, parts = r"\]^[-&~/", []
    for low, high in chars:
        last = "" if low == high else f"{'-' if high > low + 1 else ''}{_one(high, special)}"
        parts.append(_one(low, special) + last)
    return "".join(parts)


def _one(code: int, special: str) -> str:
    char = chr(code)
    if code < 0x20 or code == 0x7F:
        return f"\\x{code:02x}"
    return f"\\{char}" if char in special else char


_ESCAPED: Chars = ((34, 34), (92, 92))
DIGIT: Chars = ((48, 57),)
WORD = union(((48, 57), (65, 90), (95, 95), (97, 122)))
SPACE = of("\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff" + "".join(map(chr, range(0x2000, 0x200B))))
LINE_ENDS = of("\n\r\u2028\u2029")
_NAMES: dict[Chars, tuple[str, Chars]] = {}
"""Large sets, by their part beyond ASCII, with what `unicode_dialect` calls them within a class."""
_FEW = 16
_BEYOND_ASCII: Chars = ((0x80, LAST),)


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


@lru_cache(maxsize=1)
def unicode_dialect() -> Dialect:
    """Return what Rust's expressions mean, and Python's but for a few characters: the classes of Unicode."""
    digit, word, space = (_with_property(said) for said in (r"\p{Nd}", _UNICODE_WORD, r"\p{White_Space}"))
    parts = {
        r"\d": digit,
        r"[\w&&\D]": both(word, others(digit)),
        r"\s": space,
        r"[^\w\s]": others(union((*word, *space))),
    }
    for num in range(1, len(parts)):
        for some in combinations(parts, num):
            chars = both(union(chain.from_iterable(parts[name] for name in some)), others(_SURROGATES))
            _NAMES[both(chars, _BEYOND_ASCII)] = "".join(some), chars
    return Dialect(digit, word, space, of("\n"), has_empty_class=False)


_UNICODE_WORD = r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]"


def _by_name(chars: Chars, name: str, named: Chars) -> str:
    """Write a set that differs from a named one in some characters of ASCII."""
    more, missing = ranges(both(chars, others(named))), ranges(both(named, others(chars)))
    return f"[{more}[{name}&&[^{missing}]]]" if missing else f"[{more}{name}]"


def _with_property(expression: str) -> Chars:
    """Return the characters that an expression of one character matches."""
    import regex  # takes a while to import, and few expressions need it

    text = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000))))  # others have none
    return union(
        (ord(found[0][0]), ord(found[0][-1])) for found in regex.finditer(f"{expression}+", text, concurrent=True)
    )


RARE = union(((0, 8), (0x0B, 0x0C), (0x0E, 0x1F)))
"""Control characters that nobody writes."""
