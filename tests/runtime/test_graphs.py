"""Which decode graphs there are, and in which order they are captured. Who is served by which: the engine chooses."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fake_graphs import FakePool, use_triton

from dovetail.messages import SamplerParams
from dovetail.messages.step import Admit, DecodeGraph
from dovetail.runtime.device.device_state import DeviceState
from dovetail.runtime.device.penalties import TokenCounts
from dovetail.runtime.graphs import decode as graphs_module
from dovetail.runtime.graphs.decode import FIRST, DecodeGraphs
from dovetail.runtime.sampling import draw_graphs
from dovetail.runtime.sampling.draw_graphs import SampleTables
from dovetail.runtime.sampling.masks import MaskBuffer
from dovetail.runtime.step_kernels import PLAIN_STEP

CPU = torch.device("cpu")


def make(prefix_group: int = 4, rows: int = 100) -> Any:
    """Graphs of a backend that is not there."""
    return DecodeGraphs(Mock(), Mock(prefix_group=prefix_group), Mock(), 16, rows, Mock(), Mock())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Graphs of up to 100 requests whose capturing is noted only."""

    def capture(self: Any, key: DecodeGraph) -> object:
        return self._captured.setdefault(key, Mock())

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    made = make()
    made.capture_first()
    return made


def test_idle_time_completes_the_buckets(graphs: Any) -> None:
    """Chores capture what is missing, the smallest first, one at a time; then those that share prefixes."""
    first = [*map(DecodeGraph, (96, *FIRST))]  # the largest leaves its memory to the others
    assert graphs.captured == first
    while graphs.num_left:
        before = len(graphs.captured)
        graphs.run_next()
        assert len(graphs.captured) == before + 1
    plain = (2, 4, 12, 16, 24, 32, 48, 64)
    found = graphs.captured[len(first) :]
    assert found == [*map(DecodeGraph, plain), *(DecodeGraph(b, True) for b in (4, 8, 16, 32, 64))]
    graphs.run_next()
    assert graphs.num_left == 0
    assert sorted(graphs.captured, key=str) == sorted(graphs.keys, key=str)


def test_an_engine_starts_without_memory_for_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decodes such batches eagerly; without the first buckets it does not start."""
    most = 64

    def capture(self: Any, key: DecodeGraph) -> object:
        if key.rows > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._captured.setdefault(key, Mock())

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    made = make()
    made.capture_first()
    assert made.captured == [*map(DecodeGraph, FIRST)]
    assert DecodeGraph(96) not in made.keys
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        make().capture_first()


def test_a_bucket_without_memory_is_not_tried_again(
    graphs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Captured under load, that is no failure of the step; idle time leaves it out, too."""

    def capture(self: Any, key: DecodeGraph) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory\nDetails")

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    num = graphs.num_left
    with caplog.at_level(logging.WARNING, "dovetail"):
        graphs.capture(DecodeGraph(12))
    assert "decode graph of 12 rows (CUDA out of memory)" in caplog.text
    assert DecodeGraph(12) not in graphs.keys
    assert graphs.num_left == num - 1


def test_a_backend_that_shares_nothing_gets_no_such_graph() -> None:
    """With `prefix_group` 0 there are plain graphs only."""
    assert not any(key.shares for key in make(prefix_group=0).keys)


def test_the_hint_reaches_the_backend() -> None:
    """A sharing graph is recorded with the hint, the other without."""
    model, attention = Mock(), Mock(prefix_group=4)
    step = PLAIN_STEP._replace(begin_step=lambda *args: [Mock()] * 4, finish_step=lambda *args: (Mock(), Mock()))
    made = DecodeGraphs(model, attention, Mock(padding_row=5, device=CPU, images=None), 16, 8, Mock(), Mock(), step)
    for shares in (True, False):
        made._step(torch.tensor([1, 5]), torch.arange(3), torch.arange(2), shares)
        assert attention.plan_in_graph.call_args.args[0].shares_prefixes is shares
        assert model.forward.call_args.args[1].shares_prefixes is shares


def test_an_unchanged_batch_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows are not uploaded again, nor is which masks they have; what draws take is read on the device."""
    use_triton(monkeypatch)
    state = DeviceState(8, 4, CPU)
    model = Mock()
    model.lm_head.side_effect = lambda hidden: torch.ones(4, 30)
    tables = SampleTables(MaskBuffer(1, CPU, 8), TokenCounts(30, CPU, 8))
    made = DecodeGraphs(model, Mock(prefix_group=0), state, 16, 8, FakePool(CPU), tables)  # type: ignore[arg-type]
    sent: list[str] = []
    monkeypatch.setattr(graphs_module, "pinned", lambda tensor, device: sent.append("rows") or tensor)
    monkeypatch.setattr(draw_graphs, "pinned", lambda tensor, device: sent.append("lines") or tensor)
    rows, key = np.array([3, 1, 2], dtype=np.int32), DecodeGraph(4)
    made.capture(key)
    for _ in range(3):
        made.draw(made.run(rows, key))
        made.draw_adjusted(made.run(rows.copy(), key), None, 0)
    assert sent == ["rows"]
    lines, tables.masks.lend(1)[:] = np.array([-1, 0, -1], dtype=np.int32), -1
    for _ in range(2):
        made.draw_adjusted(made.run(rows, key), lines, 1)
    assert sent == ["rows", "lines"]
    made.draw_adjusted(made.run(rows[:2], key), None, 0)
    assert sent == ["rows", "lines", "rows", "lines"]
    state.params.admit(Admit(1, 1, 0, SamplerParams(max_tokens=1, logit_bias={7: 5.0})))
    state.flush()
    assert made.draw_adjusted(made.run(rows[:2], key), None, 0).ids.tolist()[1] == 7
    assert sent == ["rows", "lines", "rows", "lines"]
