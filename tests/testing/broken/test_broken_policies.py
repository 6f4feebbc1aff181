"""Schedule policies with one fault each: the kit names every fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dovetail.contracts.scheduling import PrefixView, SchedulePolicy, WaitingRequest
from dovetail_testing import check_class, conformance_class

Requests = Sequence[WaitingRequest]


class Right(SchedulePolicy):
    def order(self, waiting: Requests, cache: PrefixView) -> Requests:
        return sorted(waiting, key=lambda r: (-r.priority, r.arrival))


class Doubles(Right):
    """Right up to 128."""

    def order(self, waiting: Requests, cache: PrefixView) -> Requests:
        return [*waiting, *waiting[128:129]]


class Empties(Right):
    """Leaves out the background, of which queues may be made."""

    def order(self, waiting: Requests, cache: PrefixView) -> Requests:
        return [request for request in waiting if request.priority >= 0]


class ChangesTheQueue(Right):
    def order(self, waiting: Any, cache: PrefixView) -> Requests:
        waiting.reverse()
        return list(waiting)


class Invents(Right):
    last: Requests = ()

    def order(self, waiting: Requests, cache: PrefixView) -> Requests:
        before, self.last = self.last, waiting
        return [*waiting, *before[:1]]


class Starves(Right):
    """Never takes a long prompt."""

    def order(self, waiting: Requests, cache: PrefixView) -> Requests:
        return [r for r in waiting if r.num_prompt < 50_000] or list(waiting[:0])


class Keeps(Right):
    def order(self, waiting: Requests, cache: PrefixView) -> Requests:
        self.first = waiting[0]
        return waiting


class Quadratic(Right):
    def order(self, waiting: Requests, cache: PrefixView) -> Requests:
        return sorted(waiting, key=lambda r: sum(r.arrival < other.arrival for other in waiting))


FAULTS = {
    "one twice": (Doubles, "test_returns_whom_it_was_given", "of 129 waiting requests it returned one twice"),
    "nobody": (Empties, "test_returns_whom_it_was_given", "of 1 waiting requests nobody is to be admitted"),
    "changes what it is given": (ChangesTheQueue, "test_returns_whom_it_was_given", "order changed the list of 2"),
    "one of another step": (Invents, "test_returns_whom_it_was_given", "it returned one that was not among them"),
    "never takes some": (Starves, "test_starves_nobody", "requests are never among the first"),
    "keeps a request": (Keeps, "test_keeps_no_requests", "is still held; keep numbers, not requests"),
    "quadratic": (Quadratic, "test_work_grows_with_the_queue", "operations, twice as many"),
}


def test_a_right_policy_passes() -> None:
    """The policy that the faults are made from has none."""
    report = check_class(conformance_class("schedule_policy", plugin_class=Right))
    assert report.passed, report.text()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_names_a_policys_fault(fault: str, caught: Callable[..., None]) -> None:
    """A policy with one fault fails the test for it, with a message that names it."""
    plugin, test, message = FAULTS[fault]
    caught("schedule_policy", plugin, test, message, select=test)
