"""How many threads compute a step: by its tokens, the weights, and the cores that this process or its container has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dovetail.base import process_limits
from dovetail.base.process_limits import num_cores
from dovetail.messages import SamplerParams
from dovetail.plugins import load as load_plan
from dovetail.runtime.ranks import ALONE
from dovetail.runtime.start import check, load
from dovetail.runtime.stepper import MANY_TOKENS, StepThreads
from dovetail_testing.engine import generate, make_plans
from dovetail_testing.models import make_model

CORES = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return make_model(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, CORES),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "150000 100000\n"}, min(2, CORES)),
        ({"cpu.max": "6400000 100000\n"}, CORES),
        ({"cpu.max": "half\n"}, CORES),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, CORES),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "50000\n"}, CORES),
        ({}, CORES),
    ],
    ids=str,
)
def test_cores_of_a_container(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its share of processor time counts in whole cores; without one, or with a file that lies, all cores do."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(process_limits, "CGROUP", tmp_path)
    assert num_cores() == cores


def test_long_steps_take_more_threads() -> None:
    """A step of many tokens gets all threads, the next short one the few again."""
    threads = StepThreads(1, 2)
    assert torch.get_num_threads() == 1
    for tokens, wanted in ((MANY_TOKENS, 2), (MANY_TOKENS - 1, 1), (4 * MANY_TOKENS, 2)):
        threads.begin(tokens)
        assert torch.get_num_threads() == wanted


@pytest.mark.parametrize(
    ("changes", "policy", "few", "many"),
    [
        ({}, "PASSIVE", 1, 3),
        ({}, "active", 1, 1),
        ({"num_threads": 2}, "passive", 2, 2),
        ({"batch_invariant": True}, "passive", 1, 1),
    ],
    ids=["default", "spinning", "given", "batch-invariant"],
)
def test_a_load_chooses(
    changes: dict[str, object], policy: str, few: int, many: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model has one thread for short steps; a given number holds, and no bit changes with it."""
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(load, "num_cores", lambda: 3)
    settings, plan = make_plans(folder, **changes)
    threads = load.load(check.check(settings, load_plan(plan, "engine"), ALONE)).threads
    assert threads is not None
    assert (threads.few, threads.many) == (few, many)


def test_prompts_take_the_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's long steps have all threads and its decode steps few."""
    monkeypatch.setattr(load, "num_cores", lambda: 2)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    begun: list[tuple[int, int]] = []
    begin = StepThreads.begin

    def noted(self: StepThreads, num_tokens: int) -> None:
        begin(self, num_tokens)
        begun.append((num_tokens, torch.get_num_threads()))

    monkeypatch.setattr(StepThreads, "begin", noted)
    generate(
        folder,
        [[3 + at % 100 for at in range(MANY_TOKENS)]],
        SamplerParams(max_tokens=3, temperature=0, ignore_eos=True),
    )
    assert (MANY_TOKENS, 2) in begun
    assert begun[-1] == (1, 1)
