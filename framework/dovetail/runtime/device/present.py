"""Says whether CUDA can be used here without importing torch, so that a start is refused before it begins."""

from __future__ import annotations

import ctypes
import os
import re
from importlib.util import find_spec
from pathlib import Path

from dovetail.contracts.errors import ConfigError
from dovetail.settings import EngineSettings

LIBRARY = "libcuda.so.1"
"""The driver's; loading it initialises nothing."""
HIDES = "CUDA_VISIBLE_DEVICES"
_VERSION = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*= *(?:'([^']*)'|None)", re.MULTILINE)


def check_device(settings: EngineSettings) -> None:
    """Check that the device of `--device` may be here.

    Raises:
        ConfigError: It is not; see `why_no_cuda`.
    """
    if settings.device == "cuda" and (cause := why_no_cuda()) is not None:
        raise ConfigError(f"--device cuda: {cause}, or use --device cpu")


def known_device(settings: EngineSettings) -> str:
    """Return the device of `--device`; for `auto` that of the CPU where there surely is no other, else `auto`."""
    return "cpu" if settings.device == "auto" and why_no_cuda() is not None else settings.device


def why_no_cuda() -> str | None:
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
    if built is not None and (hidden := os.environ.get(HIDES)) is not None and hidden.strip() in ("", "-1"):
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
