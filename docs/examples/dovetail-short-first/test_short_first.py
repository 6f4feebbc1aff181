"""The conformance kit, and the two things that this policy promises."""

import pytest
from dovetail_short_first import ShortFirst, ShortFirstOptions

from dovetail_testing import SchedulePolicyConformance
from dovetail_testing.conformance.scheduling import FakeCache, Waiting


class TestShortFirst(SchedulePolicyConformance):
    name = "short-first"


def request(arrival: int, num_prompt: int, cached: int = 0) -> Waiting:
    return Waiting(0, arrival, num_prompt, 0, remaining_tokens=10, cached=cached)


def test_short_prompts_go_first_and_cached_tokens_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShortFirst, "options", ShortFirstOptions())
    long, short, cached = request(1, 900), request(2, 300), request(3, 1000, cached=992)
    assert list(ShortFirst().order([long, short, cached], FakeCache())) == [cached, short, long]


def test_whoever_was_passed_over_for_too_long_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShortFirst, "options", ShortFirstOptions(patience=5))
    long, short = request(1, 900), request(6, 3)
    assert list(ShortFirst().order([long, short], FakeCache())) == [long, short]
