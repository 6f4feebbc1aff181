"""What a checkpoint is read for, without a start: all installed kernel sets may serve it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from dovetail.contracts.device import DeviceView
from dovetail.contracts.quantization import Target
from dovetail.plugins import Registry
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.runtime.kernels.binding import KIND, KernelBinder, LoadedSet


def target_for(dtype: str, device: str = "cpu") -> Target:
    """Return the target for a model's dtype (`bfloat16`) on a kind of device, which need not be here."""

    def keeps(form: Any, shape: Sequence[int]) -> bool:
        return kernels_for(device).keeps(dtype, form, shape)

    return Target(dtype, device, keeps)


def kernels_for(device: str = "cpu") -> KernelBinder:
    """Return what binds operations on a kind of device to the installed sets."""
    return KernelBinder(_sets(), DeviceView(device))


@functools.cache
def _sets() -> tuple[LoadedSet, ...]:
    records = Registry.scan().of_kind(KIND)
    return tuple(LoadedSet(one.name, one.name, import_planned(as_planned(one))(), False) for one in records)
