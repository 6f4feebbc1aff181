"""Where the time of a choice went: what its engine said, fitted into what was seen here.

The engine's clock is not compared with ours: it tells how long ago things were when it sent a delta, which is taken
here at once but where its reader is busy.
"""

from __future__ import annotations

from time import perf_counter

from dovetail.contracts.observers import ChoiceTimes
from dovetail.messages import Times as EngineTimes
from dovetail.messages import TokenDelta


class ChoiceClock:
    """One per choice."""

    __slots__ = ("_begun", "_ended", "first_at")

    def __init__(self) -> None:
        """Nothing was heard yet."""
        self._begun: EngineTimes | None = None
        self.first_at = 0.0
        self._ended: EngineTimes | None = None

    def take(self, delta: TokenDelta) -> None:
        """Note what a delta with times says."""
        if self._begun is None or self._begun.first_s is None:
            self._begun, self.first_at = delta.times, perf_counter()
        if delta.finish is not None:
            self._ended = delta.times

    def as_times(self, began: float, ended: float) -> ChoiceTimes:
        """Divide the time from `began` to `ended`, as `perf_counter` counts, into its parts."""
        whole, begun = ended - began, self._begun
        grammar_s = None if begun is None else begun.grammar_s
        waited_s = 0.0 if self._ended is None else self._ended.waited_s
        if begun is None or begun.admitted_s is None:
            return ChoiceTimes(queued_s=whole, grammar_s=grammar_s, waited_s=waited_s)
        queued_s = min(whole, max(0.0, self.first_at - began - (begun.total_s - begun.admitted_s)))
        rest = whole - queued_s
        if begun.first_s is None:  # its prompt was all that was asked for, or it ended there
            return ChoiceTimes(queued_s=queued_s, prefill_s=rest, grammar_s=grammar_s, waited_s=waited_s)
        prefill_s = min(rest, begun.first_s - begun.admitted_s)
        rest -= prefill_s
        decode_s = rest
        if self._ended is not None and self._ended.first_s is not None:  # else another engine ended it
            decode_s = min(rest, self._ended.total_s - self._ended.first_s)
        return ChoiceTimes(
            queued_s=queued_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            delivery_s=rest - decode_s,
            grammar_s=grammar_s,
            waited_s=waited_s,
        )
