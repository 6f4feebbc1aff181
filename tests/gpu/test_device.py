"""A CUDA device passes the checks that every device has to pass."""

from __future__ import annotations

import pytest
import torch

from dovetail.contracts.device import Device
from dovetail.runtime.device.devices import device_of
from dovetail_testing.conformance.device import DeviceChecks

pytestmark = pytest.mark.gpu


class TestCuda(DeviceChecks):
    """The current device."""

    def device(self) -> Device:
        return device_of(torch.device("cuda", torch.cuda.current_device()))
