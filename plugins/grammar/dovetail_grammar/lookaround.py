r"""Expressions with look-around at their ends, as several without, all of which a text must match.

`^(?!aws:)(?=.{1,9}$)[a-z:]+$` says `^[a-z:]+$`, at most nine characters, and no `aws:` in front. Libraries without
look-around can enforce each of these. What may be looked for is little: some literal texts in front, one or two
characters anywhere, one at the end, whitespace alone; or, of what must be there, any expression.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MAX_TEXTS = 64
"""Literal texts that one look-ahead stands for."""
ANY = r"[\s\S]*"
_AROUND = re.compile(r"\(\?<?[=!]")
_ELEMENT = re.compile(r"\\[-.\\/*+?()\[\]{}|^$!#%&,:;<=>@~\"'` ]|\[(?:[^\]\\^|-]+|-)\]|[A-Za-z0-9_ /:@!#%&,;<=>~\"'`-]")
_CHARACTER = re.compile(r"\\?[-./_:@!#%&,;<=>~ a-zA-Z0-9]|\\[*+?()\[\]{}|^$]|\[[^\]\\^]+\]")
_GROUP = re.compile(r"\((?:\?:)?([^()]*)\)(\$?)(?:\.\*)?")


def without_lookaround(pattern: str) -> list[str] | None:
    """Return expressions that together say what one with look-around says; None where that cannot be told."""
    if not pattern.startswith("^"):
        return None
    rest, made = pattern[1:], []
    while rest.startswith(("(?=", "(?!")):
        end = _closing(rest)
        if end is None:
            return None
        found = (_ahead if rest[2] == "=" else _not_ahead)(rest[3:end])
        if found is None:
            return None
        made.append(found)
        rest = rest[end + 1 :]
    behind = re.search(r"\(\?<!(\[?\\?[^()\[\]\\]+\]?)\)\$$", rest)
    if behind is not None and _CHARACTER.fullmatch(behind[1]):
        made.append(f"^(?:{ANY}{_but(behind[1])})?$")
        rest = rest[: behind.start()] + "$"
    if _AROUND.search(rest) or _has_choice(rest):
        return None
    return [f"^{rest}", *made] if made else None


def without_lookaround_in_one(pattern: str) -> str:
    """Return one expression that says what a pattern with look-around says; the pattern where that takes several."""
    parts = [part for part in without_lookaround(pattern) or [] if part not in ("^", "^.*", "^.*$")]
    return parts[0] if len(parts) == 1 else pattern


def _closing(text: str) -> int | None:
    """Return where the group that a text begins with ends."""
    depth = 0
    for token in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()]", text, re.DOTALL):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return token.start()
    return None


def _has_choice(text: str) -> bool:
    """Whether a `|` stands outside all groups: then `^` is of the first alternative only."""
    depth = 0
    for token in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", text, re.DOTALL):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0 and token[0] == "|":
            return True
    return False


def _ahead(inner: str) -> str | None:
    end = "$" if inner.endswith("$") and not inner.endswith("\\$") else ""
    inner = inner[: len(inner) - len(end)].removeprefix("^")
    if _AROUND.search(inner) or re.search(r"(?<!\\)[$^]", re.sub(r"\[\^", "[", inner)) or (end and _has_choice(inner)):
        return None
    return f"^(?:{inner}){end}"


def _not_ahead(inner: str) -> str | None:
    """Write what no text begins with as what texts are."""
    inner = inner.removeprefix("^")
    if inner in (r"\s*$", r"\s+$"):
        return r"\S" if inner == r"\s*$" else rf"^(?:{ANY}\S{ANY})?$"
    if inner.startswith(".*"):
        return _not_within(inner[2:])
    if (group := _GROUP.fullmatch(inner)) is not None and (group[2] or not group[1].endswith("$")):
        inner = "|".join(option.removesuffix("$") + group[2] for option in group[1].split("|"))
    texts = _Texts()
    for option in inner.split("|"):
        is_whole = option.endswith("$") and not option.endswith("\\$")
        found = _literals(option.removesuffix("$") if is_whole else option.removesuffix(".*"))
        if not found or not all(found):
            return None
        for text in found:
            texts.add(text, is_whole=is_whole)
    return f"^{texts.others()}$"


def _not_within(inner: str) -> str | None:
    r"""Write what stands nowhere in texts, or not at their end. `.` sees no newline: those are left out."""
    if inner.endswith("$") and _CHARACTER.fullmatch(inner[:-1]):
        return f"^(?:.*{_but(inner[:-1])})?$"
    inner = inner.removesuffix(".*")
    inner = re.sub(r"^(\[[^\]]+\]|\\?[^\\\[\]])\{2\}$", r"\1\1", inner)
    found = _CHARACTER.findall(inner)
    if "".join(found) != inner or len(found) not in (1, 2):
        return None
    first, last = found[0], found[-1]
    if len(found) == 1:
        return f"^{_but(first, newline=True)}*$"
    if first == last:
        return f"^(?:{_but(first, newline=True)}|{first}{_but(first, newline=True)})*{first}?$"
    if _set(first) & _set(last):
        return None
    neither = "[^" + _inside(first) + _inside(last) + r"\n]"
    return f"^(?:{_but(first, newline=True)}|{first}+{neither})*{first}*$"


def _set(element: str) -> set[str]:
    return {chr(i) for i in range(128) if re.fullmatch(element, chr(i))}


def _inside(element: str) -> str:
    """Write a character, or a class of some, as part of a class."""
    return element[1:-1] if element.startswith("[") else re.escape(element.removeprefix("\\"))


def _but(element: str, *, newline: bool = False) -> str:
    return f"[^{_inside(element)}{chr(92) + 'n' if newline else ''}]"


def _literals(text: str) -> list[str] | None:
    """Return the texts that an expression of characters and small classes stands for."""
    parts = _ELEMENT.findall(text)
    if "".join(parts) != text:
        return None
    options = [part[1:-1] if part.startswith("[") else part.removeprefix("\\") for part in parts]
    total = 1
    for option in options:
        total *= len(option)
    return ["".join(chars) for chars in itertools.product(*options)] if total <= MAX_TEXTS else None


@dataclass
class _Texts:
    """Literal texts by their characters.

    Attributes:
        is_front: A text ends here that none of the others may begin with.
        is_whole: A text ends here that none of the others may be.
        after: By the next character.
    """

    is_front: bool = False
    is_whole: bool = False
    after: dict[str, _Texts] = field(default_factory=dict)

    def add(self, text: Sequence[str], *, is_whole: bool) -> None:
        """Add a text."""
        node = self
        for char in text:
            node = node.after.setdefault(char, _Texts())
        node.is_whole = node.is_whole or is_whole
        node.is_front = node.is_front or not is_whole

    def others(self) -> str:
        """Write all other texts, from here on."""
        kept: Iterable[tuple[str, _Texts]] = ((c, n) for c, n in self.after.items() if not n.is_front)
        ways = [re.escape(char) + node.others() for char, node in kept]
        if self.after:
            ways.append(f"[^{''.join(map(re.escape, self.after))}]{ANY}")
        else:
            ways.append(r"[\s\S]" + ANY)
        return f"(?:{'|'.join(ways)})" + ("" if self.is_whole else "?")
