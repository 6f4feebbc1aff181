"""Which request kills the engine: found by what each had got to at the engine's deaths, and by trying it alone.

A request that was in two deaths without having got further in between is a suspect. Suspects are tried one at a time,
while everything else waits: one that gets on alone is none any more, one during whose trial the engine dies again,
before it has got on, is refused. So a request that gets on is never refused, however often somebody else kills the
engine. After a request was refused, others like it are likely: for a while one death is enough for a suspicion.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from dovetail.engine.streams import RequestEntry

CANDIDATE_CRASHES = 2
ALARM_S = 60.0
"""For so long after a request was refused, one death makes suspects."""
PROOF = 4
"""So many tokens behind the place of the last death show that it was not the request's doing."""
FROM_OUTSIDE = 3
"""Trials that a request must fail if the engine was killed from outside, which may happen at any moment."""
MAX_FAILED_STARTS = 3
"""An engine that so many times in a row did not get ready will not the next time."""


def is_poison_candidate(entry: RequestEntry) -> bool:
    """Whether a request is to be tried."""
    return entry.is_poison_candidate and not has_got_on(entry)


def has_got_on(entry: RequestEntry) -> bool:
    """Whether a request is so far behind the place of the last death that it did not cause it."""
    return entry.has_ended or len(entry.output) >= entry.place + PROOF


def to_try(entries: Iterable[RequestEntry]) -> RequestEntry | None:
    """Return the next suspect: one whose trial has begun, then in order."""
    poison_candidates = [entry for entry in entries if is_poison_candidate(entry)]
    return min(poison_candidates, key=lambda entry: (-entry.num_trials, entry.number), default=None)


def note_crash(
    present: Iterable[RequestEntry], tried: RequestEntry | None, *, from_outside: bool, is_alarmed: bool = False
) -> RequestEntry | None:
    """Account for a death; returns the request that is to be refused for it, if one is.

    Args:
        present: The requests that took part in what the engine did.
        tried: The one that was tried alone, if one was.
        from_outside: Whether the engine was killed by a signal that it does not give itself.
        is_alarmed: Whether a request was refused lately.
    """
    enough = 1 if is_alarmed and not from_outside else CANDIDATE_CRASHES
    for entry in present:
        if entry is tried and not has_got_on(entry) and not from_outside:
            entry.num_crashes += 1
            return entry
        at = len(entry.output)
        entry.num_crashes += 1
        if at > entry.place:
            entry.place, entry.num_crashes, entry.num_trials, entry.is_poison_candidate = at, 1, 0, False
        entry.is_poison_candidate = entry.is_poison_candidate or entry.num_crashes >= enough
        if entry is tried:
            entry.num_trials += 1
            if entry.num_trials >= FROM_OUTSIDE:
                return entry
    return None


class RestartLimit:
    """How often an engine may be started again."""

    def __init__(self, most: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """At most `most` times within `window_s` seconds."""
        self.most, self.window_s = most, window_s
        self._clock = clock
        self._crashes: deque[float] = deque()
        self._num_unexplained = 0
        self._failed_starts = 0

    @property
    def num_recent(self) -> int:
        """Deaths in the window."""
        return len(self._crashes)

    def died(self, *, was_ready: bool, num_explained: int = 0) -> str | None:
        """Count a death; returns why the engine is not started again, or None if it is.

        Args:
            was_ready: Whether the engine had started.
            num_explained: How many deaths, this one included, a request has caused that is refused now: they do not
                count. None of them is explained twice.
        """
        now = self._clock()
        self._crashes.append(now)
        self._num_unexplained += 1
        if num_explained:
            for _ in range(min(num_explained, self._num_unexplained, len(self._crashes))):
                self._crashes.pop()
            self._num_unexplained = 0
        while self._crashes and self._crashes[0] < now - self.window_s:
            self._crashes.popleft()
        self._failed_starts = 0 if was_ready else self._failed_starts + 1
        if self.most == 0:
            return "restarts are off (--max-engine-restarts 0)"
        if self._failed_starts >= MAX_FAILED_STARTS:
            return f"it did not get ready {self._failed_starts} times in a row"
        if len(self._crashes) > self.most:
            return f"it died {len(self._crashes)} times within {self.window_s:g} s (--max-engine-restarts {self.most})"
        return None

    @property
    def delay_s(self) -> float:
        """How long to wait before the next start: not at all, unless starts fail."""
        return 0.0 if self._failed_starts == 0 else 0.5 * 2**self._failed_starts
