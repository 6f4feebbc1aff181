"""Engines of several ranks, the further ones in threads of this process, over gloo all the same."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from example_models import prompt, run

from dovetail.base.settings import EngineSettings
from dovetail.client import launch
from dovetail.engine.core import EngineCore
from dovetail.executor import rank_main
from dovetail.executor.group import GroupExecutor
from dovetail.executor.rank_messages import StartRank, next_command
from dovetail.plugins import Registry, load, make_plan
from dovetail.runtime.hf_config import quant_method, read_config

PROMPTS = [prompt(n, n) for n in (1, 9, 40)] + [prompt(40, 40) + prompt(5, 5)]
SMALL: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "page_size": 4, "max_total_tokens": 1024, "max_running_requests": 4,
    "chunked_prefill_size": 24, "num_threads": 1,
}  # fmt: skip


def beside(name: str, file: str) -> Any:
    """Import a module of other tests."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ThreadFollower:
    """A rank in a thread of this process."""

    def __init__(self, pipe: Connection) -> None:
        self._thread = threading.Thread(target=self._run, args=(pipe,), daemon=True)
        self._thread.start()

    def _run(self, pipe: Connection) -> None:
        with contextlib.suppress(EOFError, OSError), pipe:
            start = next_command(pipe)
            assert isinstance(start, StartRank)
            rank_main.serve(pipe, start)

    @property
    def trouble(self) -> str:
        return "" if self._thread.is_alive() else "has ended"

    def end(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()


def start_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start further ranks in threads."""

    def grouped(settings: EngineSettings, plugins: Any, limit_s: float) -> GroupExecutor:
        return GroupExecutor(settings, plugins, ThreadFollower, limit_s)

    monkeypatch.setattr(launch, "GroupExecutor", grouped)


def make_core(
    folder: Path, architecture: str, quantization: str | None = None, target: str | None = None, **changes: Any
) -> EngineCore:
    settings = EngineSettings(model_path=str(folder), **SMALL | changes)
    registry = Registry.scan()
    if target is not None:
        registry.add("model", architecture, target)
    named = {"quantization": quantization} if quantization else {}
    named["quant_method"] = quant_method(read_config(folder)) or ""
    plan = make_plan(
        registry,
        model=architecture,
        attention_backend="auto",
        schedule_policy="fcfs",
        device="cpu",
        kernels="auto",
        **named,
    )
    return launch.make_engine(settings, load(plan, "engine"))


def said(make: Callable[..., EngineCore], num: int, **changes: Any) -> list[list[int]]:
    """What some greedy requests say on so many ranks; no rank is left."""
    core = make(tensor_parallel_size=num, **changes)
    try:
        return run(core, PROMPTS, 12)
    finally:
        core.close()
