"""Which `Device` answers for a place of torch's."""

from __future__ import annotations

import functools

import torch

from dovetail.contracts.device import Device
from dovetail.contracts.errors import ConfigError
from dovetail.runtime.device.cuda import CudaDevice

CLASSES: dict[str, type[Device]] = {"cpu": Device, "cuda": CudaDevice}
"""By the type of torch's device."""


@functools.cache
def device_of(place: torch.device) -> Device:
    """Return what answers for a device.

    Raises:
        ConfigError: Nothing does.
    """
    found = CLASSES.get(place.type)
    if found is None:
        raise ConfigError(f"device {place.type!r}: nothing here computes on it; possible: {', '.join(CLASSES)}")
    return found(place)
