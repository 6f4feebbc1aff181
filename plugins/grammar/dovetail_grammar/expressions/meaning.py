r"""What texts an expression matches, as terms: look-around becomes what sets have in common and what they have not.

Read from the left, each part with what may follow it. `A(?!B)C` is `A` with those texts of `C` behind it that do not
begin with `B`; of `A(?<!B)C` it is `A` that must not end so. What repeats with look-around in it is a set that is
described with itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain

from dovetail.sdk.expressions.characters import WORD, Chars, others
from dovetail.sdk.expressions.reading import (
    ANYTHING,
    Alternation,
    Edge,
    Look,
    One,
    Repeat,
    Tree,
    UnreadableError,
    is_plain,
    lengths,
)
from dovetail.sdk.expressions.reading import Sequence as Parts
from dovetail_grammar.expressions.characters import both, classes
from dovetail_grammar.expressions.terms import Terms, TooLargeError

MAX_COPIES = 8
"""Times that a part with look-around in it is written out."""
MAX_READ = 1000
"""Rows of parts that are read: what looks around is read once for each way to get there."""
START, IN_WORD, OUTSIDE = "start", "word", "outside"
"""What stands before a place: nothing, a letter, digit or underscore, or something else."""
ANYWHERE = frozenset((START, IN_WORD, OUTSIDE))
Before = frozenset[str]


class Meaning:
    """The sets of texts of some expressions, over the same classes of characters."""

    def __init__(self, trees: Iterable[Tree], word: Chars = WORD) -> None:
        """Read the characters of all of them; `word` are those that words consist of."""
        self._word = word
        found = {word, *chain.from_iterable(map(_sets, trees))}
        self.classes: list[Chars] = classes(sorted(found))
        self.terms = Terms(len(self.classes))
        self._num_read = 0
        self._masks: dict[Chars, int] = {}
        self._words = self._mask(word)
        anything, rest = self.terms.anything, self._mask(others(word))
        self._ends = {
            IN_WORD: self.terms.cat(anything, self.terms.chars(self._words)),
            OUTSIDE: self.terms.cat(anything, self.terms.chars(rest)),
            START: self.terms.empty,
        }
        begins_word = self.terms.cat(self.terms.chars(self._words), anything)
        self._begins = {True: begins_word, False: self.terms.other(begins_word)}

    def of(self, tree: Tree) -> int:
        """Return the texts in which an expression is found.

        Raises:
            UnreadableError: It looks around in a way that is not read here.
            TooLargeError: It takes too many terms.
        """
        return self._after([ANYTHING, tree], self.terms.anything, frozenset((START,)))

    def _mask(self, chars: Chars) -> int:
        if chars not in self._masks:
            self._masks[chars] = sum(1 << i for i, own in enumerate(self.classes) if both(own, chars))
        return self._masks[chars]

    def _plain(self, tree: Tree) -> int:
        """Return the texts of an expression that does not look around."""
        if isinstance(tree, One):
            return self.terms.chars(self._mask(tree.chars))
        if isinstance(tree, Alternation):
            return self.terms.alt(map(self._plain, tree.options))
        if isinstance(tree, Repeat):
            return self.terms.repeat(self._plain(tree.part), tree.least, tree.most)
        return self._row(tree.parts if isinstance(tree, Parts) else ())

    def _row(self, parts: Sequence[Tree]) -> int:
        made = self.terms.empty
        for part in reversed(parts):
            made = self.terms.cat(self._plain(part), made)
        return made

    def _after(self, parts: Sequence[Tree], rest: int, before: Before) -> int:
        """Return the texts of some parts, with those of a set behind them.

        Args:
            parts: One after the other.
            rest: What comes behind them.
            before: What may stand before them.
        """
        self._num_read += 1
        if self._num_read > MAX_READ:
            raise TooLargeError("too many ways to look around")
        at = next((i for i, part in enumerate(parts) if not is_plain(part)), len(parts))
        front, behind = parts[:at], parts[at + 1 :]
        if at == len(parts):
            return self.terms.cat(self._row(front), rest)
        part = parts[at]
        if isinstance(part, Parts):
            return self._after([*front, *part.parts, *behind], rest, before)
        if isinstance(part, Alternation):
            branches = (self._after([*front, option, *behind], rest, before) for option in part.options)
            return self.terms.alt(list(branches))
        if isinstance(part, Repeat):
            return self._repeated(front, part, behind, rest, before)
        if isinstance(part, Edge):
            return self._edge(front, part.kind, behind, rest, before)
        if isinstance(part, Look):
            return self._look(front, part, behind, rest, before)
        raise UnreadableError("a part of no kind")

    def _repeated(self, front: Sequence[Tree], part: Repeat, behind: Sequence[Tree], rest: int, before: Before) -> int:
        if part.most <= MAX_COPIES:
            rows = [[part.part] * count for count in range(part.least, int(part.most) + 1)]
            return self.terms.alt([self._after([*front, *row, *behind], rest, before) for row in rows])
        if part.most < math.inf or part.least > MAX_COPIES or lengths(part.part)[0] == 0:
            raise UnreadableError("look-around in what repeats often, or may be empty")
        within = frozenset((IN_WORD, OUTSIDE))
        end = self._after(behind, rest, within)
        own = self.terms.unfolding(
            lambda own: self.terms.alt((self._after([part.part], own, within), end)),
            nullable=self.terms.is_nullable(end),
        )
        some = self._after([*front, *[part.part] * max(part.least, 1)], own, before)
        return some if part.least else self.terms.alt((some, self._after([*front, *behind], rest, before)))

    def _edge(self, front: Sequence[Tree], kind: str, behind: Sequence[Tree], rest: int, before: Before) -> int:
        terms = self.terms
        if kind == "$":
            ends = terms.is_nullable(self._after(behind, rest, _known(front, before, self._word)))
            return self._row(front) if ends else terms.nothing
        if kind == "^":
            if not terms.is_nullable(self._row(front)) or START not in before:
                return terms.nothing
            if before != {START}:
                raise UnreadableError("a start where it is not known whether one can be")
            return self._after(behind, rest, before)
        return terms.alt(
            terms.cat(row, self._beside(kind, behind, rest, ending)) for row, ending in self._texts_after(front, before)
        )

    def _beside(self, kind: str, behind: Sequence[Tree], rest: int, ending: str) -> int:
        """Return what follows the edge of a word, or what is none, by what stands before it."""
        begins_word = (ending == IN_WORD) != (kind == "b")
        return self.terms.both((self._begins[begins_word], self._after(behind, rest, frozenset((ending,)))))

    def _texts_after(self, front: Sequence[Tree], before: Before) -> Iterable[tuple[int, str]]:
        """Return texts of some parts, and what they end with, apart by that."""
        row = self._row(front)
        for ending in sorted(_known(front, before, self._word) - {START}):
            yield self.terms.both((row, self._ends[ending])), ending
        if self.terms.is_nullable(row):
            if len(before) != 1:
                raise UnreadableError("a place of which it is not known what stands before it")
            yield self.terms.empty, next(iter(before))

    def _look(self, front: Sequence[Tree], part: Look, behind: Sequence[Tree], rest: int, before: Before) -> int:
        terms, row = self.terms, self._row(front)
        if part.is_ahead:
            known = _known(front, before, self._word)
            if len(known) == 1 or not _asks_before(part.part, *behind):
                return terms.cat(row, self._ahead(part, behind, rest, known))
            text_parts = self._texts_after(front, before)
            return terms.alt(
                terms.cat(row, self._ahead(part, behind, rest, frozenset((end,)))) for row, end in text_parts
            )
        if _asks_after(part.part):
            raise UnreadableError("a look behind that asks what comes after it")
        if before == {START}:
            seen = self._after([ANYTHING, part.part], terms.empty, before)
        elif lengths(part.part)[1] <= sum(lengths(each)[0] for each in front):
            seen = terms.cat(terms.anything, self._after([part.part], terms.empty, ANYWHERE))
        else:
            raise UnreadableError("a look behind what is known")
        ends = terms.both((row, terms.other(seen) if part.is_not else seen))
        return terms.cat(ends, self._after(behind, rest, _known(front, before, self._word)))

    def _ahead(self, part: Look, behind: Sequence[Tree], rest: int, before: Before) -> int:
        seen = self._after([part.part], self.terms.anything, before)
        follows = self._after(behind, rest, before)
        return self.terms.both((self.terms.other(seen) if part.is_not else seen, follows))


def _known(front: Sequence[Tree], before: Before, word: Chars) -> Before:
    """Return what may stand behind some parts without look-around."""
    found: set[str] = set()
    for part in reversed(front):
        found |= _last(part, word)
        if lengths(part)[0]:
            return frozenset(found)
    return frozenset(found | before)


def _last(tree: Tree, word: Chars) -> set[str]:
    """Return what the last character of an expression's texts may be."""
    if isinstance(tree, One):
        parts = ((IN_WORD, word), (OUTSIDE, others(word)))
        return {kind for kind, members in parts if both(tree.chars, members)}
    if isinstance(tree, Alternation):
        return set().union(*(_last(option, word) for option in tree.options))
    if isinstance(tree, Repeat):
        return _last(tree.part, word) if tree.most else set()
    return set(_known(tree.parts, frozenset(), word)) if isinstance(tree, Parts) else set()


def _children(tree: Tree) -> Sequence[Tree]:
    if isinstance(tree, (Repeat, Look)):
        return (tree.part,)
    return tree.options if isinstance(tree, Alternation) else tree.parts if isinstance(tree, Parts) else ()


def _sets(tree: Tree) -> Iterable[Chars]:
    if isinstance(tree, One):
        yield tree.chars
    for part in _children(tree):
        yield from _sets(part)


def _asks_before(*trees: Tree) -> bool:
    """Whether what stands before a place matters to what is found there."""
    edges = (isinstance(tree, Edge) and tree.kind != "$" for tree in trees)
    behind = (isinstance(tree, Look) and not tree.is_ahead for tree in trees)
    return any(edges) or any(behind) or any(_asks_before(*_children(tree)) for tree in trees)


def _asks_after(tree: Tree, follows: float = 0) -> bool:
    """Whether what is found may depend on what stands behind it; at least `follows` characters are known to follow."""
    if isinstance(tree, Edge):
        return tree.kind == "$" or (tree.kind != "^" and not follows)
    if isinstance(tree, Parts):
        least = [lengths(part)[0] for part in tree.parts]
        return any(_asks_after(part, follows + sum(least[i:])) for i, part in enumerate(tree.parts, 1))
    return (isinstance(tree, Look) and tree.is_ahead) or any(_asks_after(part, follows) for part in _children(tree))
