"""Which decode graph serves a batch, and when graphs are captured. Replaying them is tested on a GPU."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dovetail.runtime import graphs as graphs_module
from dovetail.runtime.graphs import FIRST, PATIENCE, DecodeGraphs, Key


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Graphs of up to 100 requests whose capturing is noted only."""

    def capture(self: Any, key: Key) -> object:
        return self._captured.setdefault(key, Mock())

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    made = DecodeGraphs(Mock(), Mock(prefix_group=4), Mock(), 16, 100, Mock())
    made.capture_first()
    return made


def test_the_smallest_captured_bucket_serves_a_batch(graphs: Any) -> None:
    """Captured sizes are served at once; beyond the largest bucket nothing is replayed."""
    graphs._capture(Key(4))
    assert [graphs.bucket_for(n) for n in (1, 2, 3, *FIRST)] == [1, 4, 4, *FIRST]
    assert graphs.bucket_for(97) is None


def test_a_missing_bucket_is_stood_in_for_until_it_is_worth_capturing(graphs: Any) -> None:
    """Without its graph a batch runs eagerly, or in a larger one; after enough such steps the graph is captured."""
    assert graphs.bucket_for(12) is None
    graphs._capture(Key(24))
    assert [graphs.bucket_for(12) for _ in range(PATIENCE - 1)] == [24] * (PATIENCE - 1)
    assert graphs.bucket_for(12) == 12


def test_a_bucket_without_memory_is_not_tried_again(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches run eagerly, or in a larger graph; the failure is no failure of the step."""
    tries: list[Key] = []

    def capture(self: Any, key: Key) -> None:
        tries.append(key)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    assert [graphs.bucket_for(12) for _ in range(3 * PATIENCE)] == [None] * 3 * PATIENCE
    assert tries == [Key(12)]
    assert [graphs.bucket_for(3) for _ in range(3 * PATIENCE)] == [8] * 3 * PATIENCE
    assert tries == [Key(12), Key(4)]


def test_idle_time_completes_the_buckets(graphs: Any) -> None:
    """Chores capture what is missing, the smallest first, one at a time; then those that share prefixes."""
    seen: list[Key] = []
    while graphs.num_left:
        before = set(graphs._captured)
        graphs.run_next()
        seen += set(graphs._captured) - before
    assert seen == [*map(Key, (2, 4, 12, 16, 24, 32, 48, 64, 96)), *(Key(b, True) for b in (4, 8, 16, 32, 64))]
    graphs.run_next()
    assert graphs.num_left == 0


def behind(num: int, prefix: int = 2048, own: int = 64) -> list[Any]:
    """Requests behind one prefix, in pages of 16 tokens."""
    tokens = prefix + own
    return [
        Mock(pages=[*range(1, prefix // 16 + 1), *range(1000 * i, 1000 * i + own // 16)], computed_len=tokens, row=i)
        for i in range(9, 9 + num)
    ]


def test_rows_behind_a_prefix_get_the_graph_that_shares_it(graphs: Any) -> None:
    """Until it is captured, after enough steps, the plain one serves in the order given; others get the plain one."""
    requests = behind(6)[::-1]
    assert graphs.choose(requests) == (Key(8), requests)
    for _ in range(PATIENCE - 1):
        assert graphs.choose(requests).key == Key(8)
    assert graphs.choose(requests) == (Key(8, shares=True), requests[::-1])
    assert graphs.choose(requests[:2]) == (Key(8), requests[:2])  # too little is saved, and not yet captured
    assert graphs.choose(behind(6, prefix=0)).key == Key(8)
    assert Key(4, shares=True) not in graphs._captured


def test_a_missing_graph_is_no_graph(graphs: Any) -> None:
    """Where neither the sharing nor a plain graph is there, the step is eager; nor beyond the largest bucket."""
    assert graphs.choose(behind(12)) is None
    assert graphs.choose(behind(97)) is None
    graphs._capture(Key(16, shares=True))
    assert graphs.choose(behind(12)).key == Key(16, shares=True)


def test_larger_sharing_buckets_end_where_plain_ones_do(graphs: Any) -> None:
    """Between the largest sharing bucket and the largest bucket, the plain graph serves."""
    graphs._capture(Key(96))
    assert graphs.choose(behind(80)).key == Key(96)


def test_a_backend_that_shares_nothing_gets_no_such_graph(graphs: Any) -> None:
    """With `prefix_group` 0 there are plain graphs only, and the order of requests is never changed."""
    made = DecodeGraphs(Mock(), Mock(prefix_group=0), Mock(), 16, 100, Mock())
    made.capture_first()
    assert not any(key.shares for key in made._keys)
    requests = behind(8)[::-1]
    chosen = made.choose(requests)
    assert chosen is not None
    assert chosen == (Key(8), requests)


def test_the_hint_reaches_the_backend_and_rows_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sharing graph is recorded with the hint, and replayed with the rows in the order of the requests."""
    state = Mock(spare_row=5, device=torch.device("cpu"))
    model, attention = Mock(), Mock(prefix_group=4)
    made = DecodeGraphs(model, attention, state, 16, 8, Mock())
    monkeypatch.setattr(graphs_module, "begin", Mock())
    monkeypatch.setattr(graphs_module, "finish", lambda *args: (Mock(), Mock()))
    for shares in (True, False):
        made._step(torch.tensor([1, 5]), torch.arange(3), torch.arange(2), shares)
        assert attention.plan_in_graph.call_args.args[0].shares_prefixes is shares
        assert model.forward.call_args.args[1].shares_prefixes is shares
