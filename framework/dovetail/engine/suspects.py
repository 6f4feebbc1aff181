"""Which request kills the engine: found by what each had got to at the engine's deaths, and by trying it alone.

A request that was in two deaths without having got further in between is a suspect. Suspects are tried one at a time,
while everything else waits: one that gets on alone is none any more, one during whose trial the engine dies again, at
the same place, is refused. So a request that gets on is never refused, however often somebody else kills the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from dovetail.engine.entry import Entry

SUSPECT_DEATHS = 2
PROOF = 4
"""So many tokens behind the place of the last death show that it was not the request's doing."""
FROM_OUTSIDE = 3
"""Trials that a request must fail if the engine was killed from outside, which may happen at any moment."""
MAX_FAILED_STARTS = 3
"""An engine that so many times in a row did not get ready will not the next time."""


def is_suspect(entry: Entry) -> bool:
    """Whether a request was in two deaths and has not got on since."""
    return entry.num_deaths >= SUSPECT_DEATHS and not has_got_on(entry)


def has_got_on(entry: Entry) -> bool:
    """Whether a request is so far behind the place of the last death that it did not cause it."""
    return entry.has_ended or len(entry.output) >= entry.place + PROOF


def to_try(entries: Iterable[Entry]) -> Entry | None:
    """Return the next suspect: the likely innocent first, so that they go on soon."""
    suspects = [entry for entry in entries if is_suspect(entry)]
    return min(suspects, key=lambda entry: (entry.num_trials, entry.number), default=None)


def note_death(present: Iterable[Entry], tried: Entry | None, *, from_outside: bool) -> Entry | None:
    """Account for a death; returns the request that is to be refused for it, if one is.

    Args:
        present: The requests that took part in what the engine did.
        tried: The one that was tried alone, if one was.
        from_outside: Whether the engine was killed by a signal that it does not give itself.
    """
    for entry in present:
        at = len(entry.output)
        entry.num_deaths = entry.num_deaths + 1 if at <= entry.place else 1
        if at > entry.place:
            entry.place, entry.num_trials = at, 0
        if entry is tried:
            entry.num_trials += 1
    if tried is None or tried.num_trials < (FROM_OUTSIDE if from_outside else 1):
        return None
    return tried if tried.num_deaths > SUSPECT_DEATHS else None


class RestartLimit:
    """How often an engine may be started again."""

    def __init__(self, most: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """At most `most` times within `window_s` seconds."""
        self.most, self.window_s = most, window_s
        self._clock = clock
        self._deaths: deque[float] = deque()
        self._failed_starts = 0

    @property
    def num_recent(self) -> int:
        """Deaths in the window."""
        return len(self._deaths)

    def died(self, *, was_ready: bool) -> str | None:
        """Count a death; returns why the engine is not started again, or None if it is."""
        now = self._clock()
        self._deaths.append(now)
        while self._deaths[0] < now - self.window_s:
            self._deaths.popleft()
        self._failed_starts = 0 if was_ready else self._failed_starts + 1
        if self.most == 0:
            return "restarts are off (--max-engine-restarts 0)"
        if self._failed_starts >= MAX_FAILED_STARTS:
            return f"it did not get ready {self._failed_starts} times in a row"
        if len(self._deaths) > self.most:
            return f"it died {len(self._deaths)} times within {self.window_s:g} s (--max-engine-restarts {self.most})"
        return None

    def explained(self, num: int) -> None:
        """Forget the last deaths: a request that is refused now was the cause."""
        for _ in range(min(num, len(self._deaths))):
            self._deaths.pop()

    @property
    def delay_s(self) -> float:
        """How long to wait before the next start: not at all, unless starts fail."""
        return 0.0 if self._failed_starts == 0 else 0.5 * 2**self._failed_starts
