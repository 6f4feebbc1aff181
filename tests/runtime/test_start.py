"""A start in phases: each runs alone, is timed, and is named by what fails in it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from dovetail.contracts.errors import ConfigError, described, said
from dovetail.plugins import load as load_plan
from dovetail.runtime.ranks import ALONE
from dovetail.runtime.runner import PHASES, ModelRunner, StartPhases
from dovetail.runtime.start import allocate, capture, check, load, probe
from dovetail_testing.engine import make_plans
from dovetail_testing.models import make_model

MADE_IN = {
    "check": "dovetail.runtime.start.check.check",
    "load": "dovetail.runtime.start.load.load_checkpoint",
    "plan": "dovetail.runtime.start.allocate.plan",
    "allocate": "dovetail.runtime.start.allocate.make_attention",
    "compile": "dovetail.runtime.start.capture.CaptureQueue",
    "probe": "dovetail.runtime.start.probe.Probe.run",
    "capture": "dovetail.runtime.start.capture.capture",
}


def checked_of(folder: Path) -> check.Checked:
    settings, plan = make_plans(folder)
    return check.check(settings, load_plan(plan, "engine"), ALONE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return make_model(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM")


def test_each_phase_takes_what_the_one_before_returned(folder: Path) -> None:
    """One by one, without a runner: a check reads no weights, a load takes no cache, and a plan allocates nothing."""
    checked = checked_of(folder)
    assert checked.checkpoint is not None
    loaded = load.load(checked)
    assert loaded.weight_bytes == sum(p.numel() * p.element_size() for p in loaded.model.parameters())  # type: ignore[attr-defined]
    planned = allocate.plan(checked, loaded)
    assert planned.num_tokens == 8192
    made = allocate.allocate(checked, loaded, planned)
    assert made.pool.num_bytes == planned.kv_bytes
    tried = probe.Probe(checked, loaded, made)
    compiled = capture.compile_kernels(checked, loaded, planned, made, tried)
    tried.run()
    assert (compiled.trials, compiled.queue.num_left) == (None, 0)  # on a CPU
    capture.capture(checked, made, compiled)


def test_a_check_may_be_loaded_twice(folder: Path) -> None:
    """It is a value: nothing that a load does changes it."""
    checked = checked_of(folder)
    first, second = load.load(checked), load.load(checked)
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)  # type: ignore[attr-defined]
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("phase", PHASES)
def test_a_failure_names_its_phase(phase: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its type stays, and so does what it says."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("out of\nluck")

    monkeypatch.setattr(MADE_IN[phase], fail)
    settings, plan = make_plans(folder)
    with pytest.raises(OSError, match="luck") as caught:
        ModelRunner(settings, load_plan(plan, "engine"))
    assert described(caught.value) == f"OSError: out of luck (in the start's phase {phase!r})"


def test_a_refusal_names_its_phase() -> None:
    """Beside its text, which tells the user what to do, and stays."""
    phases = StartPhases()
    with pytest.raises(ConfigError) as caught, phases.phase("load"):
        raise ConfigError("give another")
    assert str(caught.value) == "give another"
    assert said(caught.value) == "give another (in the start's phase 'load')"
    assert not phases.seconds


def test_a_start_says_what_its_phases_took(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a line, in order."""
    settings, plan = make_plans(folder)
    with caplog.at_level(logging.INFO):
        runner = ModelRunner(settings, load_plan(plan, "engine"))
    line = next(record.getMessage() for record in caplog.records if record.getMessage().startswith("Start: "))
    assert [part.split()[0] for part in line.removeprefix("Start: ").split(", ")] == list(PHASES)
    assert runner.load_s > 0
