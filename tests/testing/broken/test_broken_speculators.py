"""Speculators with one fault each: the kit names every fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dovetail.contracts.speculation import DraftRequest, Speculator
from dovetail_testing import check_class, conformance_class

Requests = Sequence[DraftRequest]


class Right(Speculator):
    """The last tokens again."""

    def draft(self, requests: Requests) -> Sequence[Sequence[int]]:
        return [self.one(request) for request in requests]

    def one(self, request: DraftRequest) -> list[int]:
        return list(request.ids[-min(3, request.most_drafts) :])


class TooMany(Right):
    """Right up to 64."""

    def one(self, request: DraftRequest) -> list[int]:
        return list(request.ids[-min(5, request.most_drafts + 1) :])


class LeavesOut(Right):
    """Drafts only for whom it has something."""

    def draft(self, requests: Requests) -> Sequence[Sequence[int]]:
        return [ids for ids in super().draft(requests) if len(ids) > 1]


class NoIds(Right):
    def one(self, request: DraftRequest) -> list[Any]:
        return [-1] if len(request.ids) > 1000 else super().one(request)


class FailsAtOne(Right):
    def one(self, request: DraftRequest) -> list[int]:
        return [request.ids[-2]]


class ForgetsToGrow(Right):
    """Keeps what followed when the request was new, and has nothing left once it was said."""

    def one(self, request: DraftRequest) -> list[int]:
        if request.memo is None:
            request.memo = {len(request.ids): super().one(request)}
        assert isinstance(request.memo, dict)
        found: list[int] = request.memo[len(request.ids)]
        return found


class Mixes(Right):
    """Sorts by length, and forgets to sort back."""

    def draft(self, requests: Requests) -> Sequence[Sequence[int]]:
        ordered = sorted(requests, key=lambda request: request.most_drafts)
        return [ids[:1] for ids in super().draft(ordered)]


class Changes(Right):
    def draft(self, requests: Any) -> Sequence[Sequence[int]]:
        found = super().draft(requests)
        requests[0].ids.append(1)
        return found


class Keeps(Right):
    def draft(self, requests: Requests) -> Sequence[Sequence[int]]:
        self.last = list(requests)
        return super().draft(requests)


class Searches(Right):
    """Looks at the whole request in every step."""

    def one(self, request: DraftRequest) -> list[int]:
        for place in range(len(request.ids) - 3):
            if request.ids[place] == request.ids[-1]:
                continue
        return super().one(request)


FAULTS = {
    "too many": (TooMany, "test_drafts_are_within_bounds", "drafts; most_drafts is"),
    "leaves requests out": (LeavesOut, "test_drafts_are_within_bounds", "requests it returned"),
    "no ids": (NoIds, "test_drafts_are_within_bounds", "it drafts [-1], which is no token id"),
    "fails for one token": (FailsAtOne, "test_drafts_are_within_bounds", "draft raised IndexError"),
    "does not grow": (ForgetsToGrow, "test_follows_requests_as_they_grow", "draft raised KeyError"),
    "mixes requests up": (Mixes, "test_each_request_has_its_own", "gets other drafts where the requests stand in"),
    "changes a request": (Changes, "test_changes_nothing", "only its memo is the speculator's"),
    "keeps a request": (Keeps, "test_keeps_no_requests", "keep what you need in its memo"),
    "searches it all": (Searches, "test_a_step_costs_the_same_for_long_requests", "for one of 16,000"),
}


def test_a_right_speculator_passes() -> None:
    """The speculator that the faults are made from has none."""
    report = check_class(conformance_class("speculator", plugin_class=Right))
    assert report.passed, report.text()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_names_a_speculators_fault(fault: str, caught: Callable[..., None]) -> None:
    """A speculator with one fault fails the test for it, with a message that names it."""
    plugin, test, message = FAULTS[fault]
    caught("speculator", plugin, test, message, select=test)
