"""Which `Device` a start uses, and which answers for a place of torch's."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dovetail.base.settings import EngineSettings
from dovetail.contracts.device import Device, DeviceView, is_interpreted
from dovetail.contracts.errors import ConfigError, PluginError, described
from dovetail.plugins import Registry
from dovetail.plugins.loader import describe, import_planned
from dovetail.plugins.plan import AUTO, as_planned, candidates
from dovetail.runtime.memory.checks import check_devices

if TYPE_CHECKING:
    import torch

    from dovetail.plugins import LoadedPlugins, PluginPlan

KIND = "device"
HOST = "cpu"
"""The plugin of the host, which every start can fall back on."""
CLASSES: dict[str, type[Device]] = {HOST: Device}
"""What answers, by the type of torch's device. The host does without a plugin."""

Found = list[tuple[str, type[Device]]]


def installed(registry: Registry, name: str) -> Found:
    """Return the class that `--device` names, or those that `auto` may take. None of them imports torch.

    Raises:
        PluginError: No plugin has that name, or it cannot be imported.
    """
    records = candidates(registry, KIND, {}) if name == AUTO else [registry.resolve(KIND, name)]
    return [(record.name, import_planned(as_planned(record))) for record in records]


def check_device(registry: Registry, name: str) -> str:
    """Return the device of `--device`; for `auto` the host where there surely is no other, else `auto`.

    Raises:
        ConfigError: It surely is not here, or its name has a number behind it, as torch writes devices.
        PluginError: See `installed`; or its class fails.
    """
    kind, _, number = name.partition(":")
    if number.isdecimal() and kind in registry.names(KIND):
        text = f"--device {name!r}: a device's name has no number; give --device {kind}"
        raise ConfigError(f"{text}; --devices {number} chooses one of several")
    found = installed(registry, name)
    if name == AUTO:
        return AUTO if any(not each[1].is_host and _surely_absent(registry, *each) is None for each in found) else HOST
    _refuse(name, _surely_absent(registry, *found[0]))
    return name


def _surely_absent(registry: Registry, name: str, cls: type[Device]) -> str | None:
    try:
        cause: object = cls.surely_absent()
    except Exception as error:  # a stranger's class may raise anything
        who = describe(as_planned(registry.resolve(KIND, name)))
        text = f"{who}: {cls.__name__}.surely_absent raised {described(error)}; report this to its author"
        raise PluginError(f"{text}, or use --device {HOST}") from error
    return None if cause is None else str(cause)


def likely_device(plan: PluginPlan) -> type[Device]:
    """Return what a start probably takes, before torch is there: the best that is not surely absent."""
    return best(import_planned(planned) for planned in plan.of_kind(KIND))


def best(found: Iterable[type[Device]]) -> type[Device]:
    """Return the best of the classes that is not surely absent, without torch."""
    return max((each for each in found if each.surely_absent() is None), key=_preference, default=Device)


def find_device(settings: EngineSettings, plugins: LoadedPlugins, rank: int = 0) -> torch.device:
    """Return the device of a rank, as `--device` and `--devices` say, and make it the one that this thread uses.

    Raises:
        ConfigError: It is not there, or not enough of them are.
    """
    found = list(plugins.candidates(KIND))
    cls = choose([(planned.name, cls) for planned, cls in found])
    who = next((describe(planned) for planned, each in found if each is cls), cls.kind)
    return take(cls, settings, rank, who)


def choose(found: Found) -> type[Device]:
    """Return the best of the classes that is there: of the one that was asked for, or of the candidates of `auto`.

    Raises:
        ConfigError: The only one is not there.
    """
    there = [cls for _, cls in found if cls.absent() is None]
    if len(found) == 1 and not there:
        _refuse(found[0][0], found[0][1].absent())
    return max(there, key=_preference, default=Device)


def take(cls: type[Device], settings: EngineSettings, rank: int = 0, who: str = "") -> torch.device:
    """Return the place of a rank's device, for which the class answers from now on.

    Args:
        cls: The class.
        settings: Those of the engine.
        rank: Which rank.
        who: The plugin, for messages.

    Raises:
        ConfigError: Not enough of them are there.
        PluginError: What the class answers is no place, or no memory.
    """
    index = None
    if not cls.is_host:
        given = check_devices(settings, cls.num(), os.environ.get(cls.hides))
        is_chosen = settings.devices is not None or settings.tensor_parallel_size > 1
        index = given[rank] if is_chosen else None
    place = cls.take(index)
    if not hasattr(place, "type"):
        raise PluginError(f"{who}: take({index}) returned {place!r}; return a torch.device")
    if cls.kind != HOST:
        answer(cls, place.type)
        memory: Any = device_of(place).memory()
        if memory is not None and not (isinstance(memory, tuple) and len(memory) == 2 and 0 <= memory[0] <= memory[1]):
            raise PluginError(f"{who}: memory() returned {memory!r}; return free and total bytes, or None")
    return place


def count(name: str) -> int:
    """Return how many devices of `--device` are here for several engines; 0 where they share the host.

    Raises:
        PluginError: See `installed`.
    """
    there = [cls for _, cls in installed(Registry.scan(), name) if cls.absent() is None]
    cls = max(there, key=_preference, default=Device)
    return 0 if cls.is_host else cls.num()


def view_of(registry: Registry, kind: str) -> DeviceView:
    """Return what kernel sets are told of a kind of device: of the one that is here, else what holds for any of it."""
    cls = next((cls for _, cls in installed(registry, AUTO) if cls.kind == kind), Device)
    if cls.absent() is not None:
        return DeviceView(kind, is_interpreted=is_interpreted())
    return cls(cls.take(None)).view


def answer(cls: type[Device], type_of_place: str) -> None:
    """Have a class answer for places of a type."""
    CLASSES[type_of_place] = cls
    device_of.cache_clear()


@functools.cache
def device_of(place: torch.device) -> Device:
    """Return what answers for a device: what a start took, else the installed plugin for that type of torch's.

    Raises:
        ConfigError: Nothing does.
    """
    found = CLASSES.get(place.type)
    if found is None:  # a tool or a test that starts no engine
        registry = Registry.scan()
        known = [import_planned(as_planned(record)) for record in registry.of_kind(KIND)]
        found = next((cls for cls in known if cls.kind == place.type), None)
        if found is None:
            names = ", ".join(registry.names(KIND)) or "none"
            raise ConfigError(f"device {place.type!r}: no installed plugin computes on it; installed: {names}")
    return found(place)


def _preference(cls: type[Device]) -> int:
    return cls.preference


def _refuse(name: str, cause: str | None) -> None:
    if cause is not None:
        raise ConfigError(f"--device {name}: {cause}, or use --device {HOST}")
