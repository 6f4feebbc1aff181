"""Finding any of several strings in text that arrives in pieces, in one pass.

An Aho-Corasick automaton: each character is looked at once, whatever the strings are and however the text is cut, and
the automaton's state says how much of the text's end may still become a match. The match that *ends* first wins (of
several that end together, the longest): the only rule whose result cannot depend on where the text was cut.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class Matcher:
    """The automaton of a set of non-empty strings. Immutable; the caller keeps the state, 0 at first."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._goto: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._matched = [0]
        self._depth = [0]
        for pattern in patterns:
            self._insert(pattern)
        self._link()
        first = "".join(map(re.escape, self._goto[0]))
        self._find_first = re.compile(f"[{first}]" if first else r"(?!)").search
        self.begins = self._find_first
        """Finds the first character with which a match may begin; None where no match begins in a text."""

    def scan(self, text: str, pos: int, state: int) -> tuple[int, int, int]:
        """Read `text` from `pos` until a match ends or the text does.

        Returns:
            Where reading stopped; the new state (0 after a match); the length of the match, 0 if there is none.
        """
        goto, fail, matched = self._goto, self._fail, self._matched
        end = len(text)
        while pos < end:
            if not state:
                found = self._find_first(text, pos)
                if found is None:
                    return end, 0, 0
                pos = found.start()
            step = goto[state].get(text[pos])
            while step is None and state:
                state = fail[state]
                step = goto[state].get(text[pos])
            state = step or 0
            pos += 1
            if state and matched[state]:
                return pos, 0, matched[state]
        return end, state, 0

    def follow(self, text: str, state: int) -> int:
        """Return the state behind `text` if all of it goes on with what was held back and ends no match; else 0."""
        goto, matched = self._goto, self._matched
        for char in text:
            state = goto[state].get(char, 0)
            if not state or matched[state]:
                return 0
        return state

    def held(self, state: int) -> int:
        """Return how many characters at the end of the text read may be the beginning of a match."""
        return self._depth[state]

    def _insert(self, pattern: str) -> None:
        state = 0
        for char in pattern:
            step = self._goto[state].get(char)
            if step is None:
                step = len(self._goto)
                self._goto[state][char] = step
                self._goto.append({})
                self._fail.append(0)
                self._matched.append(0)
                self._depth.append(self._depth[state] + 1)
            state = step
        self._matched[state] = len(pattern)

    def _link(self) -> None:
        """Set where to go on from when a state has no step for a character: its longest suffix that is a prefix."""
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, step in self._goto[state].items():
                queue.append(step)
                back = self._fail[state]
                while back and char not in self._goto[back]:
                    back = self._fail[back]
                self._fail[step] = self._goto[back].get(char, 0)
                self._matched[step] = self._matched[step] or self._matched[self._fail[step]]


@lru_cache(maxsize=256)
def matcher(patterns: tuple[str, ...]) -> Matcher:
    """Return the automaton of `patterns`, made once for recurring sets."""
    return Matcher(patterns)


class StopMatcher:
    """Cuts a text at the first stop string.

    Attributes:
        matched: The stop string that was found, None before.
    """

    def __init__(self, stop: Sequence[str], *, keep_match: bool = False) -> None:
        """Prepare.

        Args:
            stop: Stop strings, none empty.
            keep_match: The text keeps the stop string at its end.
        """
        self._matcher = matcher(tuple(stop))
        self._keep_match = keep_match
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take more text; return what is certain to stay. Nothing must be fed after a match."""
        buffer = self._held + text
        pos, self._state, length = self._matcher.scan(buffer, len(self._held), self._state)
        if length:
            self.matched, self._held = buffer[pos - length : pos], ""
            return buffer[: pos if self._keep_match else pos - length]
        held = self._matcher.held(self._state)
        cut = len(buffer) - held
        self._held = buffer[cut:]
        return buffer[:cut]

    def would_match(self, text: str) -> bool:
        """Say whether feeding `text` would find a stop string, without feeding it."""
        return bool(self._matcher.scan(text, 0, self._state)[2])

    def flush(self) -> str:
        """Return what was held back and start afresh: what follows does not continue this text."""
        held, self._held, self._state = self._held, "", 0
        return held


def common_len(text: str, other: str) -> int:
    """Return the length of the common prefix, by bisection: comparing slices is far cheaper than looping."""
    low, high = 0, min(len(text), len(other))
    if text.startswith(other):
        return len(other)
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
