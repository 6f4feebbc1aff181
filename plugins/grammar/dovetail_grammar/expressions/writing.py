"""Automata as expressions, by leaving out one state after the other.

Source: J. A. Brzozowski and E. J. McCluskey, Signal flow graph techniques for sequential circuit state diagrams, IEEE
Transactions on Electronic Computers EC-12 (1963).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Row

from dovetail.sdk.expressions.characters import Chars, union
from dovetail.sdk.expressions.reading import Alternation, One, Repeat, Sequence, Tree
from dovetail_grammar.expressions.characters import usual, written
from dovetail_grammar.expressions.terms import Automaton, TooLargeError

MAX_WRITTEN = 6000
"""Characters of an expression."""
_START, _END = -1, -2


class _Edge:
    """From one state to another: some characters, or an expression; `is_optional`: or no text at all."""

    __slots__ = ("body", "chars", "is_optional", "text")

    def __init__(self, chars: Chars = (), text: str = "", *, is_optional: bool = False) -> None:
        self.chars, self.text, self.is_optional = chars, text, is_optional
        parts = [written(chars)] if chars else []
        self.body = "|".join([*parts, text] if text else parts)  # without what makes it optional

    def grouped(self) -> str:
        """The expression as one part of others."""
        if self.is_optional:
            return f"{self._group()}?" if self.body else ""
        return f"(?:{self.body})" if _has_choice(self.body) else self.body

    def repeated(self) -> str:
        """The expression, any number of times."""
        return f"{self._group()}*" if self.body else ""

    def _group(self) -> str:
        return f"(?:{self.body})" if self.text else self.body


def _has_choice(text: str) -> bool:
    depth, at = 0, 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == "[":
            at += 1
            while text[at] != "]":
                at += 2 if text[at] == "\\" else 1
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            return True
        at += 1
    return False


def write(automaton: Automaton, classes: Row[Chars], without: Chars) -> str | None:
    """Return an expression of an automaton's texts, for the whole text; None where there is none.

    Args:
        automaton: The automaton.
        classes: The characters of its classes.
        without: Characters that no text shall have.

    Raises:
        TooLargeError: It would be too long.
    """
    graph = _Graph(_edges_of(automaton, classes, without))
    while graph.states:
        graph.leave_out(min(graph.states, key=graph.weight))
        if graph.size > 4 * MAX_WRITTEN:
            raise TooLargeError("the expression is too long")
    made = graph.outside.get(_START, {}).get(_END)
    if made is None:
        return None
    text = made.grouped()
    if len(text) > MAX_WRITTEN:
        raise TooLargeError("the expression is too long")
    return text


def _edges_of(automaton: Automaton, classes: Row[Chars], without: Chars) -> dict[tuple[int, int], _Edge]:
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for state, row in enumerate(automaton.after):
        for members, follower in zip(classes, row, strict=True):
            found.setdefault((state, follower), []).extend(members)
    kept = ((pair, usual(union(ranges), without)) for pair, ranges in found.items())
    edges = {pair: _Edge(chars) for pair, chars in kept if chars}
    alive = {state for state, accepting in enumerate(automaton.accepting) if accepting}
    while more := {state for state, follower in edges if follower in alive} - alive:
        alive |= more
    edges = {pair: edge for pair, edge in edges.items() if alive.issuperset(pair)}
    ends = {(state, _END): _Edge(is_optional=True) for state in alive if automaton.accepting[state]}
    return edges | ends | ({(_START, 0): _Edge(is_optional=True)} if 0 in alive else {})


class _Graph:
    """States, and the ways between them."""

    def __init__(self, edges: Mapping[tuple[int, int], _Edge]) -> None:
        self.inside: dict[int, dict[int, _Edge]] = {}
        self.outside: dict[int, dict[int, _Edge]] = {}
        self.size = 0
        self._weights: dict[int, int] = {}
        for (one, two), edge in edges.items():
            self._put(one, two, edge)
        self.states = (self.inside.keys() | self.outside.keys()) - {_START, _END}

    def _put(self, one: int, two: int, edge: _Edge) -> None:
        known = self.outside.setdefault(one, {}).get(two)
        made = edge if known is None else _either(known, edge)
        self.outside[one][two] = self.inside.setdefault(two, {})[one] = made
        self.size += len(made.text) - (len(known.text) if known is not None else 0)
        for state in (one, two):
            self._weights.pop(state, None)

    def weight(self, state: int) -> int:
        """Characters that leaving out a state adds (M. Delgado and J. Morais, CIAA 2004)."""
        known = self._weights.get(state)
        if known is None:
            sizes = [
                [len(edge.body) for other, edge in edges.get(state, {}).items() if other != state]
                for edges in (self.inside, self.outside)
            ]
            into, out = map(len, sizes)
            own = self.outside.get(state, {}).get(state)
            loop = len(own.body) if own is not None else 0
            known = sum(sizes[0]) * (out - 1) + sum(sizes[1]) * (into - 1) + loop * (into * out - 1)
            self._weights[state] = known
        return known

    def leave_out(self, state: int) -> None:
        """Join the ways into a state with those out of it."""
        self.states.discard(state)
        inside, outside = self.inside.pop(state, {}), self.outside.pop(state, {})
        own = outside.pop(state, None)
        inside.pop(state, None)
        self.size -= sum(len(edge.text) for edge in (*inside.values(), *outside.values()))
        for one in inside:
            del self.outside[one][state]
        for two in outside:
            del self.inside[two][state]
        for one, first in inside.items():
            for two, second in outside.items():
                self._put(one, two, _joined(first, own.repeated() if own is not None else "", second))


def _joined(first: _Edge, loop: str, second: _Edge) -> _Edge:
    if not first.body and not loop:
        return second
    if not second.body and not loop:
        return first
    text = "".join((first.grouped(), loop, second.grouped()))
    return _Edge(text=text) if text else _Edge(is_optional=True)


def _either(first: _Edge, second: _Edge) -> _Edge:
    texts = list(dict.fromkeys(text for text in (first.text, second.text) if text))
    chars = union((*first.chars, *second.chars))
    return _Edge(chars, "|".join(texts), is_optional=first.is_optional or second.is_optional)


def text_of(tree: Tree, without: Chars) -> str:
    """Write an expression that does not look around."""
    if isinstance(tree, One):
        return written(usual(tree.chars, without))
    if isinstance(tree, Alternation):
        return f"(?:{'|'.join(text_of(option, without) for option in tree.options)})"
    if isinstance(tree, Repeat):
        body = text_of(tree.part, without)
        body = body if isinstance(tree.part, (One, Alternation)) else f"(?:{body})"
        return body + _counted(tree.least, tree.most)
    return "".join(text_of(part, without) for part in tree.parts) if isinstance(tree, Sequence) else ""


def _counted(least: int, most: float) -> str:
    if most == math.inf:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return "?" if (least, most) == (0, 1) else f"{{{least},{int(most)}}}"
