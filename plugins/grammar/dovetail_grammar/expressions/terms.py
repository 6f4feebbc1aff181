"""Sets of texts as terms, and automata of them by derivatives: what may come after each character.

Source: J. Brzozowski, Derivatives of regular expressions, Journal of the ACM 11 (1964); S. Owens, J. Reppy and
A. Turon, Regular-expression derivatives re-examined, Journal of Functional Programming 19 (2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_WORK, MAX_STATES = 20_000, 600
"""Terms that are made and derived, and states of an automaton."""


class TooLargeError(ValueError):
    """An automaton has too many states, or finding them takes too long."""


@dataclass(frozen=True, slots=True)
class Automaton:
    """What a set of texts is after each text.

    Attributes:
        after: By the state, the next one by the class of the character; the first state is the start.
        accepting: By the state, whether the text may end.
    """

    after: Sequence[Sequence[int]]
    accepting: Sequence[bool]


class Terms:
    """Terms over some classes of characters; equal ones are one number."""

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes
        self._forms: list[tuple[Any, ...]] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self._nullable: list[bool] = []
        self._after: dict[tuple[int, int], int] = {}
        self._unfolded: dict[int, int] = {}
        self.compared = 0
        """How often a state was compared while equal ones were joined: about an eighth of a term's work each."""
        self.nothing = self._term(("chars", 0), nullable=False)
        self.empty = self._term(("empty",), nullable=True)
        self.anything = self.repeat(self.chars((1 << num_classes) - 1), 0, math.inf)

    @property
    def work(self) -> int:
        """How many terms were made and derived."""
        return len(self._forms) + len(self._after)

    def _term(self, form: tuple[Any, ...], *, nullable: bool) -> int:
        known = self._known.get(form)
        if known is None:
            known = self._known[form] = len(self._forms)
            self._forms.append(form)
            self._nullable.append(nullable)
        return known

    def is_nullable(self, term: int) -> bool:
        """Whether the empty text is in a set."""
        return self._nullable[term]

    def chars(self, classes: int) -> int:
        """Return the texts of one character, of some classes (a mask)."""
        return self._term(("chars", classes), nullable=False)

    def cat(self, first: int, second: int) -> int:
        """Return the texts of one set with one of another behind them."""
        if self.nothing in (first, second):
            return self.nothing
        if first == self.empty or second == self.empty:
            return second if first == self.empty else first
        form = self._forms[first]
        if form[0] == "cat":
            return self.cat(form[1], self.cat(form[2], second))
        return self._term(("cat", first, second), nullable=self._nullable[first] and self._nullable[second])

    def alt(self, terms: Iterable[int]) -> int:
        """Return the texts of any of some sets."""
        return self._joined("alt", terms, self.nothing, self.anything)

    def both(self, terms: Iterable[int]) -> int:
        """Return the texts that are in all of some sets."""
        return self._joined("and", terms, self.anything, self.nothing)

    def _joined(self, kind: str, terms: Iterable[int], neutral: int, absorbing: int) -> int:
        flat: set[int] = set()
        for term in terms:
            form = self._forms[term]
            flat |= set(form[1:]) if form[0] == kind else {term}
        flat.discard(neutral)
        if absorbing in flat or any(self._known.get(("not", term)) in flat for term in flat):
            return absorbing
        sets = [term for term in flat if self._forms[term][0] == "chars"]
        if len(sets) > 1:
            made = self._forms[sets[0]][1]
            for term in sets[1:]:
                mask = self._forms[term][1]
                made = made | mask if kind == "alt" else made & mask
            flat = (flat - set(sets)) | {self.chars(made)}
            if absorbing in flat:
                return absorbing
        if len(flat) <= 1:
            return flat.pop() if flat else neutral
        nullable = (any if kind == "alt" else all)(self._nullable[term] for term in flat)
        return self._term((kind, *sorted(flat)), nullable=nullable)

    def other(self, term: int) -> int:
        """Return the texts that are not in a set."""
        if term in (self.nothing, self.anything):
            return self.anything if term == self.nothing else self.nothing
        form = self._forms[term]
        return form[1] if form[0] == "not" else self._term(("not", term), nullable=not self._nullable[term])

    def repeat(self, term: int, least: int, most: float) -> int:
        """Return the texts of a set, repeated `least` to `most` times."""
        if term in (self.nothing, self.empty):
            return self.empty if least == 0 or term == self.empty else self.nothing
        if most == 0:
            return self.empty
        if (least, most) == (1, 1):
            return term
        least = 0 if self._nullable[term] else least
        return self._term(("repeat", term, least, most), nullable=least == 0)

    def unfolding(self, make: Callable[[int], int], *, nullable: bool) -> int:
        """Return a set that is described with itself, behind a character at least.

        Args:
            make: Makes the set's description of the set.
            nullable: Whether the empty text is in it.
        """
        own = self._term(("self", len(self._forms)), nullable=nullable)
        self._unfolded[own] = make(own)
        return own

    def after(self, term: int, char: int) -> int:
        """Return what may follow a character of a class, the number of which is given, in a set."""
        known = self._after.get((term, char))
        if known is None:
            if self.work >= MAX_WORK:
                raise TooLargeError("too many terms")
            known = self._after[term, char] = self._derive(term, char)
        return known

    def _derive(self, term: int, char: int) -> int:
        kind, *parts = self._forms[term]
        if kind == "chars":
            return self.empty if parts[0] >> char & 1 else self.nothing
        if kind == "empty":
            return self.nothing
        if kind == "self":
            return self.after(self._unfolded[term], char)
        if kind == "cat":
            first, second = parts
            found = self.cat(self.after(first, char), second)
            return self.alt((found, self.after(second, char))) if self._nullable[first] else found
        if kind in ("alt", "and"):
            found_parts = [self.after(part, char) for part in parts]
            return self.alt(found_parts) if kind == "alt" else self.both(found_parts)
        if kind == "not":
            return self.other(self.after(parts[0], char))
        body, least, most = parts
        return self.cat(self.after(body, char), self.repeat(body, max(least - 1, 0), most - 1))

    def automaton(self, term: int) -> Automaton:
        """Return the smallest automaton of a set.

        Raises:
            TooLargeError: See there.
        """
        try:
            found, compared = _smallest(self._reached(term))
        except RecursionError:
            raise TooLargeError("terms within too many others") from None
        self.compared += compared
        return found

    def _reached(self, term: int) -> Automaton:
        states, after = {term: 0}, []
        for state in (queue := [term]):
            row = []
            for char in range(self._num_classes):
                follower = self.after(state, char)
                if follower not in states:
                    if len(states) >= MAX_STATES:
                        raise TooLargeError("too many states")
                    states[follower] = len(states)
                    queue.append(follower)
                row.append(states[follower])
            after.append(row)
        return Automaton(after, [self._nullable[state] for state in queue])


def _smallest(given: Automaton) -> tuple[Automaton, int]:
    """Join states that the same texts follow (Moore); also returns how often a state was looked at."""
    block, compared = [int(accepting) for accepting in given.accepting], 0
    while True:
        compared += len(block)
        kinds: dict[tuple[int, ...], int] = {}
        keys = [(block[state], *(block[t] for t in row)) for state, row in enumerate(given.after)]
        made = [kinds.setdefault(key, len(kinds)) for key in keys]
        if len(kinds) == len(set(block)):
            break
        block = made
    first = {made[state]: state for state in reversed(range(len(made)))}
    after = [[made[t] for t in given.after[first[state]]] for state in range(len(kinds))]
    return Automaton(after, [given.accepting[first[state]] for state in range(len(kinds))]), compared
