"""When the tokens of a request came, for observers: noted per token, told about once a second."""

from __future__ import annotations

from time import perf_counter

from dovetail.contracts.observers import RequestProgress
from dovetail_server.observe.observers import Observers

FLUSH_S = 1.0
EXACT, EVERY = 15, 16
"""The last of the first steps, whose parsing is timed, and of how many one is then: each look at the clock costs."""


class TokenTimer:
    """One per request. `record` runs for every token: it reads the clock and appends a number."""

    __slots__ = (
        *("_began", "_due", "_first_s", "_gaps", "_last", "_num", "_number", "_observers", "_request_id"),
        *("num_steps", "parse_s"),
    )

    def __init__(self, observers: Observers, request_id: str, number: int, began: float) -> None:
        """Start; `began` is the `perf_counter` at submission."""
        self._observers = observers
        self._request_id, self._number = request_id, number
        self._began = began
        self._due = 0.0
        self._first_s: float | None = None
        self._last: dict[int, float] = {}
        self._gaps: list[float] = []
        self._num = 0
        self.num_steps = 0
        """Times that a choice got tokens."""
        self.parse_s = 0.0
        """What detokenizing and parsing took so far; of a long reply, as a sample of its steps says."""

    def record(self, index: int, num_tokens: int, began: float | None = None) -> None:
        """Note that a choice got tokens, which came together; `began` is when their parsing did, if it is timed."""
        if not num_tokens:
            return
        now = perf_counter()
        if began is not None:
            self.parse_s += (now - began) * (1 if self.num_steps <= EXACT else EVERY)
        self.num_steps += 1
        last = self._last.get(index)
        self._last[index] = now
        self._num += num_tokens
        if last is None:
            if self._due == 0.0:
                self._first_s = now - self._began
        elif num_tokens == 1:
            self._gaps.append(now - last)
        else:
            self._gaps.extend([(now - last) / num_tokens] * num_tokens)
        if now >= self._due:
            self._due = now + FLUSH_S
            self.flush()

    def flush(self) -> None:
        """Tell the observers what has come since the last time, if anything has."""
        if not self._num:
            return
        news = RequestProgress(
            request_id=self._request_id,
            number=self._number,
            num_tokens=self._num,
            first_token_s=self._first_s,
            gaps_s=self._gaps,
        )
        self._num, self._first_s, self._gaps = 0, None, []
        self._observers.notify("request_progressed", news)
