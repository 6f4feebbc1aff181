"""Finding a schema's expressions in its names and texts, at bounded cost."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar

import regex

from dovetail_grammar.expressions import complement

T = TypeVar("T")
MAX_FIND_S = 0.05
"""Seconds of processor time that one schema's expressions are looked for in its names."""
MAX_FIND_WORK = 10_000
"""What one schema's automata may take before no other is made, in terms: some 50 ms."""
MAX_PATTERN = 2000
_OWN_SYNTAX = re.compile(r"\\[AGKLMNRXZhm]|\{(?!\d)|\[\[:|\(\?(?![:=!<])")
"""What the library reads in a way of its own."""


class Finder:
    """Reads expressions of one schema, and finds them in names and texts of it, at bounded cost: clients write both.

    Automata are bounded by their work, so that the same schema has the same form each time.
    """

    def __init__(self) -> None:
        self._left_s = MAX_FIND_S
        self._left_work = MAX_FIND_WORK

    def matches(self, pattern: str, text: str) -> bool:
        """Whether an expression finds something in a text.

        Raises:
            ValueError: It is no expression, or finding takes too long.
        """
        if self._left_s <= 0 or len(pattern) > MAX_PATTERN or _OWN_SYNTAX.search(pattern):
            raise ValueError("finding it takes too long, or means something else elsewhere")
        began = time.thread_time()
        try:
            return regex.search(pattern, text, timeout=self._left_s) is not None
        except (regex.error, TimeoutError, RecursionError, OverflowError) as error:
            if isinstance(error, TimeoutError):  # by the clock of all threads: this one's may say that time is left
                self._left_s = 0.0
            raise ValueError(str(error)) from None
        finally:
            self._left_s -= time.thread_time() - began

    def complement(self, pattern: str) -> str | None:
        """Return an expression of the texts in which another one is not found; None where none is known."""
        return self._counted(lambda: complement(pattern))

    def _counted(self, find: Callable[[], tuple[T, int]]) -> T | None:
        if self._left_work <= 0:
            return None
        found, work = find()
        self._left_work -= work
        return found
