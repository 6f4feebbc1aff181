"""What came of a request's drafts: how likely there are some, and how likely they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_PAUSE, MOST_PAUSE = 8, 128
"""Tokens of a request until its speculator is asked again, where what it says is not worth it: twice as many each time.
Few requests cost little, so they wait no longer than they are many."""
FIRST = 4
"""Tokens until the first drafts of a request are compared with what came."""
RECENT = 0.25
"""Weight of the last time that there were drafts, or none."""
FADES = 0.75
"""Weight of what held in tries before the last one."""
PROMISING = 0.3
"""Drafts that have to be expected to hold, so that a request is asked for them in each step."""


@dataclass(slots=True)
class DraftRecord:
    """What came of a request's drafts, verified or not. Weights fall with every try, so that it follows a change.

    Attributes:
        due: Length at which it is looked at again while steps have no drafts.
        at: Length at which its speculator said `ids`, which nothing has verified.
        there: How likely there are drafts when it is asked.
        held: Drafts that held, …
        failed: … and tries that ended with one that did not.
        width: Drafts that there were last.
        is_promising: It is worth being asked for drafts in each step.
    """

    due: int = 0
    pause: int = LEAST_PAUSE
    at: int = 0
    ids: Sequence[int] = ()
    there: float | None = None
    held: float = 0.0
    failed: float = 0.0
    width: int = 0
    is_promising: bool = False

    @property
    def hold(self) -> float:
        """How likely a draft holds if those before it do."""
        return (self.held + 0.5) / (self.held + self.failed + 1)

    def promise(self) -> tuple[float, float, int]:
        """Return how likely there are drafts, how likely each holds if those before do, and how many there are."""
        return (self.there or 0.0, self.hold, self.width)

    def is_asked(self, length: int) -> bool:
        """Whether it is asked for drafts by a step that can verify them, when its request is so long."""
        return self.is_promising or self.due <= length

    def asked(self, length: int, ids: Sequence[int], num_rows: int) -> None:
        """These were the drafts when its request was so long, as one of so many."""
        found = float(bool(ids))
        self.there = found if self.there is None else self.there + RECENT * (found - self.there)
        self.at, self.ids, self.width = length, ids, len(ids) or self.width
        self._weigh()
        most = max(LEAST_PAUSE, min(num_rows, MOST_PAUSE))
        self.pause = LEAST_PAUSE if self.is_promising else min(2 * self.pause, most)
        is_new = bool(ids) and not self.held and not self.failed
        self.due = length + (FIRST if is_new else most if self.is_promising else self.pause)

    def compare(self, known: Sequence[int]) -> None:
        """See what of drafts that were not verified has held, by all that the request has."""
        said = known[self.at : self.at + len(self.ids)]
        if said:
            wrong = (i for i, (a, b) in enumerate(zip(said, self.ids, strict=False)) if a != b)
            self.tried(len(said), next(wrong, len(said)))
        self.ids = ()

    def tried(self, num: int, held: int) -> None:
        """So many of its drafts held."""
        self.held = FADES * self.held + held
        self.failed = FADES * self.failed + (held < num)
        self._weigh()

    def _weigh(self) -> None:
        there, hold, width = self.promise()
        expected = there * hold * min(width, 1 / (1 - hold))  # no less than all that may hold together
        self.is_promising = expected > PROMISING
