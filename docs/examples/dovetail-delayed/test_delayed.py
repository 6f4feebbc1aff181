"""The kit on the installed device, and that its copies really are late."""

import torch
from dovetail_delayed import Delayed

from dovetail_testing import DeviceConformance


class TestDelayed(DeviceConformance):
    name = "delayed"


def test_who_does_not_wait_reads_zeros():
    device = Delayed(torch.device("cpu"))
    hosts = [device.to_host(torch.ones(3)) for _ in range(20)]
    assert hosts[-1].tolist() == [0, 0, 0]
    device.mark().synchronize()
    assert hosts[-1].tolist() == [1, 1, 1]
