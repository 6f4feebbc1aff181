"""The schedule policies that Dovetail brings. All put higher `priority` first, then break ties by arrival.

Names as in SGLang (`--schedule-policy`); `lpm` after its longest prefix match, arXiv:2312.07104, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.contracts.scheduling import PrefixView, SchedulePolicy, WaitingRequest


class FirstCome(SchedulePolicy):
    """`fcfs`: first come, first served."""

    def order(self, waiting: Sequence[WaitingRequest], cache: PrefixView) -> Sequence[WaitingRequest]:
        """As they stand."""
        return waiting


class Priority(FirstCome):
    """`priority`: as `fcfs`, and a waiting request retracts running ones of lower priority when there is no room."""

    preempts = True


class LongestPrefix(SchedulePolicy):
    """`lpm`: what shares most with the prefix cache runs while that is there.

    Only the head of the queue is ordered: a long queue would cost host time in every step.
    """

    max_ordered = 128

    def order(self, waiting: Sequence[WaitingRequest], cache: PrefixView) -> Sequence[WaitingRequest]:
        """By priority, then cached tokens, then arrival."""
        head = waiting[: self.max_ordered]
        cached = dict(zip(map(id, head), cache.cached_tokens(head), strict=True))
        ordered = sorted(head, key=lambda r: (-r.priority, -cached[id(r)], r.arrival))
        return [*ordered, *waiting[self.max_ordered :]]


class LongestOutput(SchedulePolicy):
    """`lof`: who may generate most begins first, so that a closed set of requests ends together. For offline work.

    Of a long queue the head is ordered, as in `lpm`.
    """

    max_ordered = 256

    def order(self, waiting: Sequence[WaitingRequest], cache: PrefixView) -> Sequence[WaitingRequest]:
        """By priority, then tokens that may be generated, then arrival."""
        head = sorted(waiting[: self.max_ordered], key=lambda r: (-r.priority, -r.remaining_tokens, r.arrival))
        return [*head, *waiting[self.max_ordered :]]
