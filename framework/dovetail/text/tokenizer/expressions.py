r"""Whether a regular expression splits any text in linear time: read off the expression, not tried.

Tokenizers split by Oniguruma's expressions, which go back and try again; for some, a text of 30 characters takes
minutes. Those that models are published with look alike: alternatives of classes of characters, each repeated at most
once, such as `\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`. Of such a one, an attempt at one place

- never goes back over a repetition if nothing that may fail follows it: what was read is then part of the match;
- reads a repetition in vain only if something behind it fails. The next alternative must then begin alike and repeat
  the same class, and so on until one that cannot fail: so what was read in vain is part of the match that follows.

Hence every character is read a bounded number of times. Where alternatives read one repetition in vain, and no other
reads it as well, as in `\s+$`, the time grows with the square of the text. Whatever is written in another way counts as
worse.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

MAX_CHOICES = 64
"""Ways through an alternative beside its repetitions."""
FEW_CHOICES = 2
"""The same of one that reads a repetition in vain, at every place of it."""
MANY = 64
"""Repetitions from which on they count as without bound."""
_ATOM = re.compile(
    r"\\[pP]\{\^?[\w ]+\}|\\x\{[0-9A-Fa-f]+\}|\\x[0-9A-Fa-f]{1,2}|\\u[0-9A-Fa-f]{4}"
    r"|\\[^0-9a-zA-Z]|\\[rntfvsSdDwWhHbBAzZ]|[^\\()\[\]|*+?{}]",
    re.DOTALL,
)
_QUANTIFIER = re.compile(r"(\*|\+|\?|\{(\d*)(,?)(\d*)\})([+?]?)")
_OPENING = re.compile(r"\((\?(?:[i]*:|>|=|!))?")
_SPACE, _NO_SPACE_BEHIND = r"\s", r"(?!\S)"


class _OtherError(Exception):
    """The expression is written in a way that is not looked through."""


@dataclass(frozen=True, slots=True)
class _Item:
    text: str
    least: int = 1
    most: float = 1
    is_look: bool = False
    num_choices: int = 1

    @property
    def repeats(self) -> bool:
        return self.most > MANY

    @property
    def choices(self) -> float:
        return self.num_choices * (1 if self.repeats else self.most - self.least + 1)


_Branch = list[_Item]


def is_linear(source: str, *, finds_nothing: bool = True) -> bool:
    """Whether splitting by an expression takes time in proportion to any text; see `num_failed_reads`."""
    return num_failed_reads(source, finds_nothing=finds_nothing) == 0


def num_failed_reads(source: str, *, finds_nothing: bool = True) -> int | None:
    """Return how many alternatives of an expression read a repetition in vain: each adds time with the text's square.

    None where it may take still longer.

    Args:
        source: The expression.
        finds_nothing: Whether it may match the empty text. Replacing that makes a text longer, and the library panic.
    """
    if len(source) > 1 << 14:
        return None
    try:
        at, branches = _alternatives(source, 0)
        if at < len(source):
            return None
        if not finds_nothing and any(_cannot_fail(branch) for branch in branches):
            return None
        return sum(_fails_to_read(branches, number) for number in range(len(branches)))
    except (_OtherError, RecursionError):
        return None


def _alternatives(source: str, at: int) -> tuple[int, list[_Branch]]:
    """Read alternatives up to the end or a closing parenthesis."""
    branches: list[_Branch] = [[]]
    while at < len(source) and source[at] != ")":
        if source[at] == "|":
            branches.append([])
            at += 1
            continue
        at, item = _quantified(source, *_item(source, at))
        branches[-1].append(item)
    return at, branches


def _item(source: str, at: int) -> tuple[int, _Item]:
    if source[at] == "[":
        end = _class_end(source, at)
        return end, _Item(source[at:end])
    if source[at] == "(":
        return _group(source, at)
    if (found := _ATOM.match(source, at)) is None:
        raise _OtherError
    return found.end(), _Item(found[0])


def _class_end(source: str, at: int) -> int:
    """Return where a class ends, whose brackets may nest."""
    depth, first = 0, True
    while at < len(source):
        char = source[at]
        if char == "\\":
            at += 1
        elif char == "[":
            depth += 1
        elif char == "]":
            if first:
                raise _OtherError  # which is a bracket in some syntaxes, and the end in others
            depth -= 1
            if depth == 0:
                return at + 1
        first = char == "[" or (first and char == "^")
        at += 1
    raise _OtherError


def _group(source: str, at: int) -> tuple[int, _Item]:
    """Read a group of alternatives without repetitions."""
    opening = _OPENING.match(source, at)
    if opening is None or (opening[1] is None and source.startswith("(?", at)):
        raise _OtherError
    end, branches = _alternatives(source, opening.end())
    if end >= len(source) or any(item.most > 1 or item.is_look for branch in branches for item in branch):
        raise _OtherError
    choices = sum(math.prod(item.choices for item in branch) for branch in branches)
    if choices > MAX_CHOICES:
        raise _OtherError
    text = source[at : end + 1]
    least = 0 if any(all(item.least == 0 for item in branch) for branch in branches) else 1
    return end + 1, _Item(text, least=least, is_look=opening[1] in ("?=", "?!"), num_choices=int(choices))


def _quantified(source: str, at: int, item: _Item) -> tuple[int, _Item]:
    found = _QUANTIFIER.match(source, at)
    if found is None:
        return at, item
    sign, low, comma, high, suffix = found.groups()
    least, most = {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1)}.get(sign) or _counts(low, comma, high)
    is_single = not item.text.startswith("(")
    if (most > 1 and not is_single) or item.is_look or suffix == "?" or (suffix and sign[0] == "{"):
        raise _OtherError
    if _QUANTIFIER.match(source, found.end()):
        raise _OtherError
    return found.end(), _Item(item.text, min(least, item.least), most, num_choices=item.num_choices)


def _counts(low: str, comma: str, high: str) -> tuple[int, float]:
    if not low and not high:
        raise _OtherError  # which is a text
    least = int(low or 0)
    return least, (int(high) if high else math.inf) if comma else least


def _fails_to_read(branches: list[_Branch], number: int) -> bool:
    """Whether an alternative reads a repetition in vain that the next ones do not read as well.

    Raises:
        _OtherError: It reads two, or may be read in very many ways.
    """
    branch = branches[number]
    choices = math.prod(item.choices for item in branch)
    failing = [at for at, item in enumerate(branch) if item.repeats and not _cannot_fail(branch[at + 1 :])]
    if choices > MAX_CHOICES or len(failing) > 1:
        raise _OtherError
    # One that leaves a space for what follows, by `(?!\S)`, goes back by one character at most.
    if not failing or (failing == [0] and [item.text for item in branch] == [_SPACE, _NO_SPACE_BEHIND]):
        return False
    at = failing[0]
    following = branches[number + 1] if number + 1 < len(branches) else []
    is_read_again = (
        following[:at] == branch[:at]
        and len(following) > at
        and following[at].text == branch[at].text
        and following[at].repeats
        and following[at].least <= 1
        and not _fails_to_read(branches, number + 1)
    )
    if not is_read_again and choices > FEW_CHOICES:
        raise _OtherError
    return not is_read_again


def _cannot_fail(rest: _Branch) -> bool:
    return all(item.least == 0 and not item.is_look for item in rest)
