"""Between host and device without waiting: a copy from or to pageable memory would hold the host until it is done."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.runtime.device.devices import device_of


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a fresh host tensor on the device; through pinned memory where it is a GPU."""
    return pinned(tensor, device).to(device, non_blocking=True)


def upload(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on the device."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a fresh host tensor in memory from which a device copies without the host's waiting."""
    return device_of(device).pinned(tensor)


def to_host(tensor: Tensor) -> Tensor:
    """Begin to copy a tensor to the host: what overwrites it afterwards does not matter to the copy.

    The copy may be read once the device has come that far.
    """
    return device_of(tensor.device).to_host(tensor)
