"""A CUDA device passes the checks that every device has to pass."""

from __future__ import annotations

import pytest

from dovetail_testing import DeviceConformance

pytestmark = pytest.mark.gpu


class TestCuda(DeviceConformance):
    """The current device."""

    name = "cuda"
