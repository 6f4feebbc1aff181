"""Helpers of these tests, of the models' that write packed checkpoints, and of the runtime's that serve loads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dovetail.runtime.device.devices import answer
from dovetail_backends.devices.cuda import CudaDevice

sys.path += [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in ("models", "runtime"))]


@pytest.fixture(scope="session", autouse=True)
def cuda_answers() -> None:
    """What a start on a GPU does once in its process; these tests start many engines in one."""
    answer(CudaDevice, "cuda")
