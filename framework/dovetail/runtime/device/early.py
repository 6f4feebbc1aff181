"""Wakes CUDA's driver while torch is being imported: it takes some tenths of a second, without the interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from pathlib import Path

from dovetail.settings import EngineSettings

DRIVER = Path("/proc/driver/nvidia/version")
"""Is there where a CUDA device may be."""


def may_use_cuda(settings: EngineSettings) -> bool:
    """Whether an engine of these settings will use CUDA if there is a device, and there may be one."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    return settings.device in ("auto", "cuda") and DRIVER.exists() and not is_hidden


def wake_driver(settings: EngineSettings) -> None:
    """Begin, in a thread. What fails here fails again in torch, which says so."""
    if may_use_cuda(settings):
        is_first = settings.devices is None and settings.tensor_parallel_size == 1
        threading.Thread(target=_wake, args=(is_first,), name="cuda driver", daemon=True).start()


def _wake(uses_first: bool) -> None:
    """Initialise the driver, and make the context of the first device where that is the one."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with contextlib.suppress(OSError, AttributeError):  # there is no driver library, or an odd one
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and uses_first and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
