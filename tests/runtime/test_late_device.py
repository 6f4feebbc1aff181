"""What `Device` asks is enough for another device: one whose effects are late computes what the host computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dovetail.contracts.device import Device
from dovetail.contracts.errors import ConfigError
from dovetail.executor.local import LocalExecutor
from dovetail.messages import SamplerParams
from dovetail.plugins import load
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.device.upload import to_host
from dovetail.runtime.step import InFlightStep
from dovetail_testing.engine import generate, make_plans, tokens
from dovetail_testing.late_device import POISON, LateDevice, playing
from dovetail_testing.models import make_model

PROMPTS = [[1, 2, 3, 4, 5], [9, 8], [7] * 40]
PARAMS = [
    SamplerParams(max_tokens=12, temperature=t, seed=5, logprobs=n) for t, n in ((0.0, 2), (0.9, None), (0.0, None))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return make_model(tmp_path_factory.mktemp("late"), "Qwen3ForCausalLM")


def served(folder: Path) -> list[tuple[list[int], list[object]]]:
    """Tokens and log probabilities of each prompt."""
    outputs = generate(folder, PROMPTS, PARAMS)
    return [(tokens(deltas), [each for delta in deltas for each in delta.logprobs or ()]) for deltas in outputs]


def test_a_late_device_serves_what_the_host_serves(folder: Path) -> None:
    """Tokens and log probabilities are the same, and copies really were late."""
    wanted = served(folder)
    with playing(LateDevice) as device:
        assert isinstance(device, LateDevice)
        assert served(folder) == wanted
        assert device.num_sent >= 12


def test_who_reads_before_the_device_has_come_reads_nonsense(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that does not wait for its event is found: so the test above can fail."""
    wanted = served(folder)
    monkeypatch.setattr(InFlightStep, "wait", lambda self: self._host.numpy().copy())
    with playing(LateDevice):
        assert served(folder) != wanted


def test_facts_of_a_device_reach_plan_and_report(folder: Path) -> None:
    """Memory is the device's own, the default chunk that of an accelerator, and used bytes are told."""
    settings, plan = make_plans(folder)
    with playing(LateDevice):
        executor = LocalExecutor(settings, load(plan, "engine"))
        assert executor.device_memory() == (1 << 30, 2 << 30)
        assert executor.info.chunk_size == 8192
        assert executor.runner.memory_plan.device.kind == "late"
        assert executor.info.graphs == ()


def test_copies_come_one_by_one_and_an_event_waits_for_those_before_it() -> None:
    """An event passes what was sent before it and nothing later; asking never waits."""
    with playing(LateDevice) as device:
        first = to_host(torch.tensor([1, 2]))
        event = device.mark()
        assert event is not None
        second = to_host(torch.tensor([True]))
        assert first.tolist() == [POISON, POISON]
        assert not event.query()
        assert event.query()
        assert first.tolist() == [1, 2]
        third = to_host(torch.tensor([3]))
        assert not device.is_idle()
        device.synchronize()
        assert third.tolist() == [3]
        assert second.tolist() == [True]
        assert device.is_idle()


def test_a_host_has_no_graphs_and_an_unknown_place_is_refused() -> None:
    """Whoever asks for what a device lacks is told which fact to look at."""
    host = Device(torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="Device has no graphs: whoever asks looks at `captures` first"):
        host.capture(lambda: None, None)
    assert device_of(torch.device("cuda", 0)).kind == "cuda"  # as its plugin says; none has to be here
    with pytest.raises(ConfigError, match="device 'meta': no installed plugin computes on it; installed: cpu, cuda"):
        device_of(torch.device("meta"))
