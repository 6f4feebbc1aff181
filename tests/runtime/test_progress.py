"""Layers are counted as they are computed: on the CPU by a hook, on a GPU by events behind those of a long step."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dovetail.executor import group as group_executor
from dovetail.executor.followers import RankError
from dovetail.executor.group import GroupExecutor
from dovetail.runtime.step import LONG, InFlightStep, LayerProgress

CUDA = torch.device("cuda")


class Model(nn.Module):
    """Five layers, one of which has a list of experts in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Identity()
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(nn.Sequential(nn.Identity()) for _ in range(5))
        self.body.layers[2][0].experts = nn.ModuleList(nn.Identity() for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body.layers:
            x = layer(x)
        return x


class Event:
    """One that the device passes when it is told to."""

    made: deque[Event] = deque()

    def __init__(self) -> None:
        self._passed = threading.Event()

    def record(self) -> None:
        Event.made.append(self)

    def pass_by(self) -> None:
        self._passed.set()

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        assert self._passed.wait(120)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, cuda_taken: None) -> deque[Event]:
    """What is recorded, of a device that is not there."""
    monkeypatch.setattr(Event, "made", deque())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Event.made


def launch(progress: LayerProgress, model: Model, num_tokens: int) -> InFlightStep:
    """Launch an eager step, as `Stepper` does."""
    with progress.recording(num_tokens) as layers:
        model(torch.zeros(1))
    step: Any = SimpleNamespace(rows=np.zeros(0, np.int64))
    launched = InFlightStep(step, [])
    launched.layers = layers
    return launched


def test_the_cpu_counts_each_layer_as_it_returns() -> None:
    """Of a decode step, too: weights that are read from a disk make it slow."""
    model = Model()
    progress = LayerProgress(model, torch.device("cpu"))
    seen: list[int] = []
    model.body.layers[3].register_forward_pre_hook(lambda *_: seen.append(progress.num))
    assert launch(progress, model, 1).layers is None
    assert (seen, progress.num) == ([3], 5)


def test_a_model_without_lists_has_its_parts_and_one_that_is_no_module_none() -> None:
    """Whoever builds a model builds it as they like."""
    parts = nn.Sequential(nn.Identity(), nn.Identity())
    progress = LayerProgress(parts, torch.device("cpu"))
    parts(torch.zeros(1))
    assert progress.num == 2
    assert LayerProgress(object(), torch.device("cpu")).num == 0


def test_a_gpu_has_hooks_only_while_a_long_step_is_launched(events: deque[Event]) -> None:
    """Graphs, and eager steps of fewer tokens, run a model that nothing hangs on."""
    model = Model()
    progress = LayerProgress(model, CUDA)
    assert launch(progress, model, LONG - 1).layers is None
    assert not events
    assert launch(progress, model, LONG).layers is not None
    assert len(events) == 5
    assert not any(layer._forward_hooks for layer in model.body.layers)
    assert progress.num == 0, "what is launched is not yet computed"


def test_who_waits_for_a_long_step_counts_its_layers_as_the_device_passes_them(events: deque[Event]) -> None:
    """Another thread sees the count grow while the step is being read, and that it stands still with the device."""
    model = Model()
    progress = LayerProgress(model, CUDA)
    launched = launch(progress, model, LONG)
    reader = threading.Thread(target=launched.wait)
    reader.start()
    for num, event in enumerate(events):
        time.sleep(0.05)
        assert progress.num == num
        event.pass_by()
        deadline = time.monotonic() + 120
        while progress.num == num and time.monotonic() < deadline:
            time.sleep(0.001)
    reader.join()
    assert progress.num == 5


def test_who_asks_whether_it_is_computed_counts_what_has_passed(events: deque[Event]) -> None:
    """In order: a later event alone is nothing."""
    model = Model()
    progress = LayerProgress(model, CUDA)
    launched = launch(progress, model, LONG)
    for event in (events[0], events[1], events[3]):
        event.pass_by()
    assert launched.is_computed  # there is no copy
    assert progress.num == 2


@pytest.mark.parametrize("moves", [True, False])
def test_ranks_wait_for_a_device_as_long_as_its_layers_pass(moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the limit while something is computed; without that, the limit is one.

    A clock that goes on by 10 ms with each look; what is computed is there at the 90th.
    """
    looks = [0]
    clock = SimpleNamespace(monotonic=lambda: looks[0] / 100, sleep=lambda _: None)
    monkeypatch.setattr(group_executor, "time", clock)

    class Waiting(GroupExecutor):
        @property
        def progress(self) -> int:
            return looks[0] if moves else 0

        def is_readable(self) -> bool:
            looks[0] += 1
            return looks[0] > 90

    group: Any = object.__new__(Waiting)
    group._ranks = SimpleNamespace(limit_s=0.3, find_trouble=lambda: None, failed_rank=RankError)
    if moves:
        group._wait_for_device()
        return
    with pytest.raises(RankError, match="has not computed a step for"):
        group._wait_for_device()
    assert 30 < looks[0] < 40
