"""Sets of characters compared and written: in expressions that every library reads alike."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain, combinations, pairwise

from dovetail.sdk.expressions.characters import LAST, Chars, Dialect, escaped, of, others, ranges, union

_SURROGATES: Chars = ((0xD800, 0xDFFF),)


def both(first: Chars, second: Chars) -> Chars:
    """Return what two sets have in common."""
    return others(union((*others(first), *others(second))))


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
        return escaped(chars[0][0], r"\^$.|?*+()[]{}/")
    return f"[{ranges(chars)}]" if not chars or chars[-1][1] < LAST else f"[^{ranges(rest)}]"


_ESCAPED: Chars = ((34, 34), (92, 92))
_NAMES: dict[Chars, tuple[str, Chars]] = {}
"""Large sets, by their part beyond ASCII, with what `unicode_dialect` calls them within a class."""
_FEW = 16
_BEYOND_ASCII: Chars = ((0x80, LAST),)


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
