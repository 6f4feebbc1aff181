"""Programmatic dependent launch: a kernel is started while the one before it still runs, and waits before it reads.

Every kernel that takes part calls `gdc_launch_dependents` and then `gdc_wait` before its first load of anything that
another kernel of the step wrote. Weights may be loaded earlier, and what was complete before the last ordinary launch,
for instance what earlier steps wrote: every step begins with ordinary launches, the lookup of its embeddings among
them. It hides the launch gap of about a microsecond, of which a decode step of a small model has hundreds.
Source: CUDA Programming Guide, "Programmatic Dependent Launch".
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from dovetail.contracts.device import is_interpreted


@cache
def supported(device_index: int) -> bool:
    """Whether the device has it (Hopper and newer) and kernels are compiled, not interpreted."""
    return not is_interpreted() and torch.cuda.get_device_capability(device_index)[0] >= 9


def launch_options(tensor: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of a kernel call: the constant `PDL`, and Triton's launch flag where it is on."""
    on = tensor.is_cuda and supported(tensor.device.index)
    return {"PDL": True, "launch_pdl": True} if on else {"PDL": False}
