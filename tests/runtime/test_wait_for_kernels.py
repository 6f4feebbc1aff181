"""`--wait-for-kernels`: what is left for idle moments otherwise is prepared before the engine is ready."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dovetail.base.settings import EngineSettings
from dovetail.executor import group
from dovetail.executor.group import GroupExecutor
from dovetail.runtime.start import capture, check
from dovetail.runtime.start.capture import start_seconds
from dovetail_testing.engine import make_core
from dovetail_testing.models import make_model

NUM_PIECES = 9


def prepare_in_group(monkeypatch: pytest.MonkeyPatch, settings: EngineSettings) -> int:
    """Run the first rank's preparing by a clock on which each piece takes a second; the pieces that are left."""
    left, clock = NUM_PIECES, Mock(side_effect=map(float, range(100)))

    def prepare() -> Any:
        nonlocal left
        left -= 1
        return SimpleNamespace(num_left=left)

    monkeypatch.setattr(group, "time", SimpleNamespace(monotonic=clock))
    info = SimpleNamespace(prepared=SimpleNamespace(num_left=left))
    GroupExecutor._prepare_some(SimpleNamespace(_settings=settings, info=info, prepare=prepare))  # type: ignore[arg-type]
    return left


def test_ranks_prepare_all_of_it_only_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the setting the clock ends it; with it, nothing is left."""
    assert prepare_in_group(monkeypatch, EngineSettings()) == NUM_PIECES - 2
    assert prepare_in_group(monkeypatch, EngineSettings(wait_for_kernels=True)) == 0


def test_one_device_has_the_same_bound() -> None:
    """The queue of a single device takes its seconds from the same place."""
    assert start_seconds(EngineSettings()) == capture.START_S
    assert start_seconds(EngineSettings(wait_for_kernels=True)) == float("inf")


@pytest.mark.parametrize("is_asked", [False, True])
def test_on_cpu_it_says_that_there_is_nothing(is_asked: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is prepared on a CPU, and the log says so to whoever asked."""
    with caplog.at_level(logging.INFO):
        core = make_core(make_model(tmp_path, "Qwen3ForCausalLM"), wait_for_kernels=is_asked)
    assert ("nothing to wait for" in caplog.text) is is_asked
    assert core.executor.runner.capture_queue.is_complete  # type: ignore[attr-defined]


@pytest.mark.usefixtures("cuda_taken")
@pytest.mark.parametrize("is_asked", [False, True])
def test_the_key_of_the_cache_is_the_same(is_asked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who waits finds the kernels of who does not: the setting is no fact of theirs."""
    made = Mock()
    monkeypatch.setattr(check, "CompiledAhead", made)
    settings = EngineSettings(model_path=str(tmp_path), wait_for_kernels=is_asked)
    plugins = Mock()
    plugins.states.return_value = []
    check._compiled_ahead(torch.device("cuda"), settings, Mock(config={}), plugins)
    assert "wait_for_kernels" not in made.call_args.args[1][0]
    assert "dtype" in made.call_args.args[1][0]
