"""Sets of characters: sorted, disjoint ranges of code points, first and last."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

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
RARE = union(((0, 8), (0x0B, 0x0C), (0x0E, 0x1F)))
"""Control characters that nobody writes."""
