"""Asks CUDA's driver without torch: whether there may be a device, and to wake while torch is being imported."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from importlib.util import find_spec
from pathlib import Path

LIBRARY = "libcuda.so.1"
"""The driver's; loading it initialises nothing."""
HIDES = "CUDA_VISIBLE_DEVICES"
_VERSION = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*= *(?:'([^']*)'|None)", re.MULTILINE)


def why_none() -> str | None:
    """Say why there surely is no CUDA device: torch is built without, there is no driver, or all are hidden.

    None where torch has to be asked.
    """
    if (torch := find_spec("torch")) is None or torch.origin is None:
        return None
    file = Path(torch.origin).with_name("version.py")
    found = dict(_VERSION.findall(file.read_text(encoding="utf-8"))) if file.is_file() else {}
    if "cuda" not in found or found.get("hip"):  # a build of another kind, which torch itself is asked about
        return None
    version, built = found.get("__version__", ""), found["cuda"] or None
    if (
        built is not None
        and (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None
        and hidden.strip() in ("", "-1")
    ):
        return f"{HIDES} is {hidden!r} and hides every device; name one there or unset it"
    return without(version, built) if built is None or not _has_driver() else None


def without(version: str, built: str | None) -> str:
    """Say why torch finds no CUDA device.

    Args:
        version: Of torch.
        built: Version of CUDA that it is built with; None: it has none.
    """
    if built is None:
        return f"torch {version} is built without CUDA; install a build with it"
    return f"torch finds no CUDA device here (its CUDA is {built}); `nvidia-smi` shows driver and devices"


def _has_driver() -> bool:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def wake(uses_first: bool) -> None:
    """Begin to wake the driver, in a thread: it takes some tenths of a second, without the interpreter."""
    threading.Thread(target=_wake, args=(uses_first,), name="cuda driver", daemon=True).start()


def _wake(uses_first: bool) -> None:
    """Initialise the driver, and make the context of the first device where that is the one."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with contextlib.suppress(OSError, AttributeError):  # there is no driver library, or an odd one
        driver = ctypes.CDLL(LIBRARY)
        if driver.cuInit(0) == 0 and uses_first and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
