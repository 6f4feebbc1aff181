"""A start finds its device among plugins, and ranks divide what they can."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from dovetail.base.settings import EngineSettings
from dovetail.contracts.device import Device
from dovetail.contracts.errors import ConfigError, ModelError, PluginError
from dovetail.plugins import PluginPlan, Registry, make_plan
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.processing.prepare import check_ranks
from dovetail.runtime.device import devices
from dovetail.runtime.device.devices import CLASSES, check_device, choose, device_of, likely_device, take
from dovetail.runtime.memory.checks import check_devices
from dovetail_testing import FakeSite

GROUP = "dovetail.devices.v1"
ACME = """
from dovetail.contracts import Device

class Acme(Device):
    kind, is_host, preference = "acme", False, 7

    @classmethod
    def surely_absent(cls):
        return {absent!r}
"""


class Other(Device):
    """Another device, whose tensors are torch's `meta`."""

    kind = "other"
    is_host = False
    preference = 5
    missing: ClassVar[str | None] = None

    @classmethod
    def absent(cls) -> str | None:
        return cls.missing

    @classmethod
    def take(cls, index: int | None) -> torch.device:
        return torch.device("meta", index)


class Gone(Other):
    """It is not there."""

    preference = 500
    missing = "acme's driver is not installed; install it"


def scan(site: FakeSite, *, absent: str | None = None) -> Registry:
    """Return a registry with the host and an accelerator, which both take part in `auto`."""
    host = "from dovetail.contracts import Device\nclass Host(Device): pass\n"
    for name, module, source in (("acme", "acme_device:Acme", ACME.format(absent=absent)), ("cpu", "host:Host", host)):
        files = {f"{module.partition(':')[0]}.py": source}
        site.add(name, "1.0", {GROUP: {name: module}}, files, {"device": {name: {"matches": {}}}})
    return Registry.scan(path=[str(site.root)])


def plan_of(registry: Registry) -> PluginPlan:
    """Return the plan of a start with `--device auto`."""
    return PluginPlan(plugins=tuple(as_planned(record) for record in registry.of_kind("device")))


def test_the_best_that_is_there_is_taken() -> None:
    """By preference; what is not there does not count, and the host is always there."""
    assert choose([("cpu", Device), ("other", Other), ("gone", Gone)]) is Other
    assert choose([("gone", Gone), ("cpu", Device)]) is Device
    assert choose([]) is Device
    with pytest.raises(ConfigError, match="--device gone: acme's driver is not installed; install it, or use --device"):
        choose([("gone", Gone)])


def test_a_class_answers_for_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """For places of that type, with the index that `--devices` names."""
    monkeypatch.setattr(devices, "CLASSES", dict(CLASSES))
    with pytest.raises(ConfigError, match="device 'meta': no installed plugin computes on it; installed: cpu, cuda"):
        device_of(torch.device("meta"))
    place = take(Other, EngineSettings(model_path="demo", devices=[0]))
    assert place == torch.device("meta", 0)
    assert isinstance(device_of(place), Other)
    device_of.cache_clear()


def test_a_device_of_a_package_is_asked_without_torch(dovetail_site: FakeSite) -> None:
    """`auto` waits for torch where one may be there; a name is refused where it surely is not."""
    registry = scan(dovetail_site)
    assert check_device(registry, "auto") == "auto"
    assert likely_device(plan_of(registry)).kind == "acme"
    assert likely_device(make_plan(registry, device="cpu")).kind == "cpu"
    assert check_device(registry, "acme:acme") == "acme:acme"
    with pytest.raises(PluginError, match="--device 'zork': not installed; installed: acme, cpu"):
        check_device(registry, "zork")
    with pytest.raises(
        ConfigError, match="--device 'acme:1': a device's name has no number; give --device acme; --dev"
    ):
        check_device(registry, "acme:1")
    with pytest.raises(PluginError, match="--device 'zork:1': not installed"):
        check_device(registry, "zork:1")


def test_a_device_of_a_package_that_is_absent(dovetail_site: FakeSite) -> None:
    """The start is the host's, or is refused."""
    registry = scan(dovetail_site, absent="no driver of acme")
    assert check_device(registry, "auto") == "cpu"
    assert likely_device(plan_of(registry)).kind == "cpu"
    with pytest.raises(ConfigError, match="--device acme: no driver of acme, or use --device cpu"):
        check_device(registry, "acme")


def test_a_device_that_fails_is_named(dovetail_site: FakeSite) -> None:
    """Its class and package, before any process starts; whether it was asked for or `auto` asks all."""
    registry = scan(dovetail_site, absent=None)
    record = registry.resolve("device", "acme")
    cls: Any = import_planned(as_planned(record))

    def gone() -> None:
        raise OSError("no\nlibrary")

    cls.surely_absent = gone
    for name in ("acme", "auto"):
        with pytest.raises(PluginError) as caught:
            check_device(registry, name)
        assert str(caught.value).startswith(
            "device 'acme' of acme 1.0: Acme.surely_absent raised OSError: no library; "
        )


class Odd(Other):
    """Answers what it is given."""

    here: ClassVar[torch.device] = torch.device("meta")
    room: ClassVar[tuple[int, int] | None] = None

    @classmethod
    def take(cls, index: int | None) -> torch.device:
        return cls.here

    def memory(self) -> tuple[int, int] | None:
        return self.room


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("here", "cpu", r"^device 'odd' of x 1: take\(None\) returned 'cpu'; return a torch\.device$"),
        ("room", 5, r"^device 'odd' of x 1: memory\(\) returned 5; return free and total bytes, or None$"),
        ("room", (9, 5), r"^device 'odd' of x 1: memory\(\) returned \(9, 5\); return"),
    ],
)
def test_answers_that_cannot_be(name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line names the plugin, the method and what it is to return."""
    monkeypatch.setattr(devices, "CLASSES", dict(CLASSES))
    monkeypatch.setattr(Odd, name, value)
    with pytest.raises(PluginError, match=message):
        take(Odd, EngineSettings(model_path="demo"), who="device 'odd' of x 1")
    device_of.cache_clear()


def test_none_of_a_device_is_here() -> None:
    """The line names the device; what the ranks want is not the question."""
    with pytest.raises(ConfigError, match=r"^--device acme: no device of it is here; give --device cpu"):
        check_devices(EngineSettings(model_path="demo", device="acme"), 0, None)


@pytest.mark.parametrize("config", [{"num_attention_heads": 8}, {"text_config": {"num_attention_heads": 8}}])
def test_ranks_that_cannot_divide_the_heads(config: dict[str, object]) -> None:
    """The heads that the config names, of the text part where there are several."""
    check_ranks(config, 4)
    with pytest.raises(ModelError, match=r"8 query heads cannot be divided among 3 ranks; .* may be 1, 2, 4, 8"):
        check_ranks(config, 3)
    check_ranks({"num_attention_heads": [8, 4]}, 3)  # of each layer, which the model's plugin reads
