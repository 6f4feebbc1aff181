r"""Expressions in plain words: without look-around and edges of words, as several that must all match, or as one.

`^(?!aws:)(?=.{1,9}$)[a-z:]+$` says `^[a-z:]+$`, one to nine characters, and nothing that begins with `aws:`. What
stands in front, and what is looked for behind the last character, is written on its own, so that the rest stays as
short as its author wrote it. Where that does not do, the whole expression becomes one automaton.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from collections.abc import Sequence as Row
from dataclasses import dataclass, replace
from functools import lru_cache

from dovetail.sdk.expressions.characters import ECMASCRIPT, Chars, Dialect
from dovetail.sdk.expressions.reading import (
    ANYTHING,
    Alternation,
    Edge,
    Look,
    Repeat,
    Sequence,
    Tree,
    UnreadableError,
    is_plain,
    lengths,
    read,
)
from dovetail_grammar.expressions.characters import RARE
from dovetail_grammar.expressions.meaning import Meaning
from dovetail_grammar.expressions.terms import Terms, TooLargeError
from dovetail_grammar.expressions.writing import text_of, write

MAX_KEPT = 512
"""Answers that are kept."""
NOTHING = r"^[^\s\S]$"
"""What no text matches."""
_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)
_LOOKING = re.compile(r"\(\?<?[=!]|\\[1-9bBk]")
_START, _END = Edge("^"), Edge("$")


@dataclass(frozen=True, slots=True)
class PlainExpression:
    """What an expression says.

    Attributes:
        parts: Expressions, all of which match a text; None where nothing plain is known to say it.
        work: What finding out took, in terms (`terms.MAX_WORK`).
    """

    parts: tuple[str, ...] | None
    work: int


@lru_cache(maxsize=MAX_KEPT)
def plainly(
    pattern: str, *, in_one: bool = False, without: Chars = RARE, dialect: Dialect | None = None
) -> PlainExpression:
    """Return an expression with look-around as one or several without.

    Args:
        pattern: The expression.
        in_one: In one expression.
        without: Characters that matching texts need not contain, because they are never written.
        dialect: How the expression is read, and what is returned. Default: ECMAScript's.
    """
    dialect = dialect or ECMASCRIPT
    writer = _Writer(without, dialect)
    front, rest = ((), pattern) if in_one else _split(pattern)
    try:
        tree = read(pattern, dialect)
        parts = _parts(tree) or [tree]
        if in_one and len(parts) > 1:
            return PlainExpression((writer.of(tree),), writer.work)
        written = [text for text in dict.fromkeys(map(writer.part, parts)) if text != "^"]
        return PlainExpression(tuple(written or ["^"]), writer.work)
    except UnreadableError:
        if not front:
            return PlainExpression(None, writer.work)
    except (TooLargeError, RecursionError):
        return PlainExpression(None, writer.work)
    found = [
        plainly(part, without=without, dialect=dialect) for part in front
    ]  # the rest as it was given: others may read it
    parts_of = [part for each in found for part in each.parts or ()]
    is_known = all(each.parts for each in found)
    return PlainExpression((rest, *parts_of) if is_known else None, writer.work + sum(each.work for each in found))


def _split(pattern: str) -> tuple[Row[str], str]:
    """Return what is looked for in front of an expression that has no other look-around, and the expression."""
    front, rest = [], pattern[1:]
    while rest.startswith(("(?=", "(?!")) and (end := next((at for at, level in _levels(rest) if level == 0), 0)):
        front.append(f"^{rest[:end]}")
        rest = rest[end:]
    is_choice = any(level == 0 and rest[at - 1] == "|" for at, level in _levels(rest))
    is_split = pattern.startswith("^") and not is_choice and not _LOOKING.search(rest)
    return (front, f"^{rest}") if is_split else ((), pattern)


def _levels(text: str) -> Iterator[tuple[int, int]]:
    """Yield where a token ends, and within how many groups that is."""
    level = 0
    for token in _TOKENS.finditer(text):
        level += {"(": 1, ")": -1}.get(token[0], 0)
        yield token.end(), level


@lru_cache(maxsize=MAX_KEPT)
def complement(pattern: str) -> tuple[str | None, int]:
    """Return an expression of the texts that do not contain a match of another, and the work it took, in terms.

    The expression is None where none is known. A cached answer reports the same work, so that sums of it are equal
    each time.
    """
    writer = _Writer((), ECMASCRIPT)
    try:
        return writer.of(read(pattern), is_not=True), writer.work
    except (UnreadableError, TooLargeError, RecursionError):
        return None, writer.work


def _parts(tree: Tree) -> list[Tree] | None:
    """Return what stands in front, the rest, and what is looked for behind the last character, each on its own."""
    given = list(tree.parts) if isinstance(tree, Sequence) else [tree]
    if given[:1] != [_START]:
        return None
    leads = 1
    while leads < len(given) and isinstance(ahead := given[leads], Look) and ahead.is_ahead:
        leads += 1
    ends, body = [], given[leads:]
    while len(body) > 1 and body[-1] == _END and isinstance(behind := body[-2], Look) and not behind.is_ahead:
        ends.append(Sequence((ANYTHING, behind, _END)))
        body = [*body[:-2], _END]
    whole = Sequence((_START, *body))
    most = lengths(whole)[1] if body[-1:] == [_END] else math.inf
    return [whole, *(Sequence((_START, _unbounded(part, most))) for part in given[1:leads]), *ends]


def _unbounded(tree: Tree, most: float) -> Tree:
    """Leave out bounds that texts of so many characters cannot meet: automata count by states."""
    if isinstance(tree, Repeat):
        part = _unbounded(tree.part, most)
        is_far = most <= tree.most < math.inf and lengths(tree.part)[0] >= 1
        return Repeat(part, tree.least, math.inf if is_far else tree.most)
    if isinstance(tree, Look):
        return replace(tree, part=_unbounded(tree.part, most))
    if isinstance(tree, Alternation):
        return Alternation(tuple(_unbounded(option, most) for option in tree.options))
    return Sequence(tuple(_unbounded(part, most) for part in tree.parts)) if isinstance(tree, Sequence) else tree


def _work(terms: Terms) -> int:
    return terms.work + terms.compared // 8


class _Writer:
    """Writes expressions, and counts what it takes."""

    def __init__(self, without: Chars, dialect: Dialect) -> None:
        self._without, self._word = without, dialect.word
        self.work = 0

    def part(self, tree: Tree) -> str:
        """Write one expression: as it stands, where it looks around at its ends only."""
        parts = list(tree.parts) if isinstance(tree, Sequence) else [tree]
        start = "^" if parts[:1] == [_START] else ""
        look = parts[1] if start and len(parts) == 2 else None
        if isinstance(look, Look) and look.is_ahead and not look.is_not:
            parts = [_START, *(look.part.parts if isinstance(look.part, Sequence) else (look.part,))]
        end = "$" if parts[-1:] == [_END] else ""
        inner = parts[len(start) : len(parts) - len(end)]
        if all(map(is_plain, inner)):
            return f"{start}{text_of(Sequence(tuple(inner)), self._without)}{end}"
        return self.of(tree)

    def of(self, tree: Tree, *, is_not: bool = False) -> str:
        """Write the texts in which an expression is found, or is not, as one automaton."""
        meaning = Meaning([tree], self._word)
        try:
            found = meaning.of(tree)
            automaton = meaning.terms.automaton(meaning.terms.other(found) if is_not else found)
        finally:
            self.work += _work(meaning.terms)
        text = write(automaton, meaning.classes, self._without)
        return NOTHING if text is None else f"^(?:{text})$"
