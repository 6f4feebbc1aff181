"""Which decode graph serves a batch, and when graphs are captured. Replaying them is tested on a GPU."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from dovetail.runtime import graphs as graphs_module
from dovetail.runtime.graphs import AT_START, PATIENCE, DecodeGraphs


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Graphs of up to 100 requests whose capturing is noted only."""

    def capture(self: Any, bucket: int) -> object:
        return self._captured.setdefault(bucket, Mock())

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    monkeypatch.setattr(graphs_module, "START_S", -1.0)
    made = DecodeGraphs(Mock(), Mock(), Mock(), 16, 100, Mock())
    made.capture_some()
    return made


def test_the_smallest_captured_bucket_serves_a_batch(graphs: Any) -> None:
    """Captured sizes are served at once; beyond the largest bucket nothing is replayed."""
    assert [graphs.bucket_for(n) for n in (1, 3, AT_START)] == [1, 4, AT_START]
    assert graphs.bucket_for(97) is None


def test_a_missing_bucket_is_stood_in_for_until_it_is_worth_capturing(graphs: Any) -> None:
    """Without its graph a batch runs eagerly, or in a larger one; after enough such steps the graph is captured."""
    assert graphs.bucket_for(12) is None
    graphs._capture(24)
    assert [graphs.bucket_for(12) for _ in range(PATIENCE - 1)] == [24] * (PATIENCE - 1)
    assert graphs.bucket_for(12) == 12


def test_idle_time_completes_the_buckets(graphs: Any) -> None:
    """Chores capture what is missing, the smallest first, one at a time."""
    seen = []
    while not graphs.is_complete:
        before = set(graphs._captured)
        graphs.run_next()
        seen += set(graphs._captured) - before
    assert seen == [12, 16, 24, 32, 48, 64, 96]
    graphs.run_next()
    assert graphs.is_complete


def test_all_is_captured_at_the_start_where_that_is_quick(monkeypatch: pytest.MonkeyPatch, graphs: Any) -> None:
    """With kernels compiled before, a start captures every bucket."""
    monkeypatch.setattr(graphs_module, "START_S", 60.0)
    graphs.capture_some()
    assert graphs.is_complete
