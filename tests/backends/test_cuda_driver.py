"""Whether there may be a CUDA device is known before torch is imported, and its driver is woken meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.contracts.errors import ConfigError
from dovetail.plugins import Registry
from dovetail.runtime.device.devices import check_device
from dovetail_backends.devices import cuda_driver
from dovetail_backends.devices.cuda import CudaDevice

VERSION = "from typing import Optional\n__version__ = '2.13.0'\ncuda: Optional[str] = {}\nhip: Optional[str] = None\n"


@pytest.mark.parametrize(
    ("text", "library", "said"),
    [
        (VERSION.format("None"), "libc.so.6", "torch 2.13.0 is built without CUDA"),
        (VERSION.format("'13.0'"), "libnone.so.9", "no CUDA device here (its CUDA is 13.0)"),
        (VERSION.format("'13.0'"), "libc.so.6", None),
        ("__version__ = '2.13.0'\n", "libnone.so.9", None),
        (None, "libnone.so.9", None),
    ],
)
def test_what_says_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, library: str, said: str | None
) -> None:
    """A build without CUDA, or no driver; a version file of another kind says nothing."""
    if text is not None:
        (tmp_path / "version.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(cuda_driver, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    monkeypatch.setattr(cuda_driver, "LIBRARY", library)
    monkeypatch.delenv(cuda_driver.HIDES, raising=False)
    check_device(Registry.scan(), "cpu")
    if said is None:
        check_device(Registry.scan(), "cuda")
        return
    with pytest.raises(ConfigError) as refused:
        check_device(Registry.scan(), "cuda")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("version", "library", "visible", "device"),
    [
        (VERSION.format("None"), "libc.so.6", None, "cpu"),
        (VERSION.format("'13.0'"), "libnone.so.9", None, "cpu"),
        (VERSION.format("'13.0'"), "libc.so.6", "", "cpu"),
        (VERSION.format("'13.0'"), "libc.so.6", " -1", "cpu"),
        (VERSION.format("'13.0'"), "libc.so.6", "1", "auto"),
        (VERSION.format("'13.0'"), "libc.so.6", None, "auto"),
        (VERSION.format("None").replace("hip: Optional[str] = None", "hip: Optional[str] = '7.0'"), "x", "", "auto"),
    ],
)
def test_auto_is_the_cpu_only_where_that_is_sure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, library: str, visible: str | None, device: str
) -> None:
    """No build for CUDA, no driver, or every device hidden; a build for other devices leaves it to torch."""
    (tmp_path / "version.py").write_text(version, encoding="utf-8")
    monkeypatch.setattr(cuda_driver, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    monkeypatch.setattr(cuda_driver, "LIBRARY", library)
    if visible is None:
        monkeypatch.delenv(cuda_driver.HIDES, raising=False)
    else:
        monkeypatch.setenv(cuda_driver.HIDES, visible)
    assert check_device(Registry.scan(), "auto") == device
    assert check_device(Registry.scan(), "cpu") == "cpu"
    if device == "cpu" and visible is not None:
        with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES is .* and hides every device; .* --device cpu"):
            check_device(Registry.scan(), "cuda")


def test_this_torch_says_what_it_is() -> None:
    """The file that is read is torch's own."""
    import torch

    if torch.version.cuda is None:
        with pytest.raises(ConfigError, match="without CUDA"):
            check_device(Registry.scan(), "cuda")
    elif torch.cuda.is_available():
        check_device(Registry.scan(), "cuda")


@pytest.mark.parametrize(
    ("uses_first", "made"), [(True, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]), (False, ["cuInit"])]
)
def test_the_driver_is_woken_for_who_uses_it(
    uses_first: bool, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context is made where it is known whose it is."""
    called: list[str] = []

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def __getattr__(self, name: str) -> Any:
            return lambda *args: called.append(name) or 0  # type: ignore[func-returns-value]

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", Driver)
    CudaDevice.wake(uses_first)
    for thread in threading.enumerate():
        if thread.name == "cuda driver":
            thread.join()
    assert called == made


def test_without_a_driver_library_nothing_happens() -> None:
    """Torch says what is missing, if it is."""
    cuda_driver._wake(True)
