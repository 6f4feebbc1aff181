"""Where a request's time goes in its engine."""

from __future__ import annotations

from time import perf_counter

from dovetail.messages import Times


class Timing:
    """The marks of one request. Read at events of its life, never per token."""

    __slots__ = ("_admitted_s", "_began", "_first_s", "_grammar_s", "_put_back_at", "_waited_s")

    def __init__(self) -> None:
        """The engine takes the request in now."""
        self._began = perf_counter()
        self._admitted_s: float | None = None
        self._grammar_s: float | None = None
        self._first_s: float | None = None
        self._waited_s = 0.0
        self._put_back_at: float | None = None

    def admitted(self) -> None:
        """It has pages and a row, for the first time or again."""
        now = perf_counter()
        if self._admitted_s is None:
            self._admitted_s = now - self._began
        if self._put_back_at is not None:
            self._waited_s += now - self._put_back_at
            self._put_back_at = None

    def put_back(self) -> None:
        """It waits again."""
        self._put_back_at = perf_counter()

    def decided(self) -> None:
        """Its grammar is in force; where one way after another is tried, the first counts."""
        if self._grammar_s is None:
            self._grammar_s = perf_counter() - self._began

    def first(self) -> Times:
        """It gets its first token now."""
        self._first_s = perf_counter() - self._began
        return self.as_times()

    def as_times(self) -> Times:
        """Return what is known now."""
        now = perf_counter()
        waits_s = 0.0 if self._put_back_at is None else now - self._put_back_at
        return Times(self._admitted_s, self._grammar_s, self._first_s, now - self._began, self._waited_s + waits_s)
