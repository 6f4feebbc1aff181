"""Says whether CUDA can be used here without importing torch, so that a start is refused before it begins."""

from __future__ import annotations

import ctypes
import re
from importlib.util import find_spec
from pathlib import Path

from dovetail.contracts.errors import ConfigError
from dovetail.settings import EngineSettings

LIBRARY = "libcuda.so.1"
"""The driver's; loading it initialises nothing."""
_VERSION = re.compile(r"^(__version__|cuda)\b[^=\n]*= *(?:'([^']*)'|None)", re.MULTILINE)


def check_device(settings: EngineSettings) -> None:
    """Check that the device of `--device` may be here.

    Raises:
        ConfigError: It is not: torch is built without CUDA, or there is no driver.
    """
    if settings.device != "cuda" or (torch := find_spec("torch")) is None or torch.origin is None:
        return
    file = Path(torch.origin).with_name("version.py")
    found = dict(_VERSION.findall(file.read_text(encoding="utf-8"))) if file.is_file() else {}
    if "cuda" not in found:  # a build of another kind, which torch itself is asked about
        return
    built = found["cuda"] or None
    if built is None or not _has_driver():
        raise no_cuda(found.get("__version__", ""), built)


def no_cuda(version: str, built: str | None) -> ConfigError:
    """Return the error for `--device cuda` where there is none.

    Args:
        version: Of torch.
        built: Version of CUDA that it is built with; None: it has none.
    """
    cause = (
        f"torch {version} is built without CUDA; install a build with it"
        if built is None
        else f"torch finds no CUDA device here (its CUDA is {built}); `nvidia-smi` shows driver and devices"
    )
    return ConfigError(f"--device cuda: {cause}, or use --device cpu")


def _has_driver() -> bool:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True
