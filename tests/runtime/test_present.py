"""A device that is not there, and ranks that cannot divide the heads, are refused before torch is imported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.processing.prepare import check_ranks
from dovetail.runtime.device import present
from dovetail.settings import EngineSettings

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
    monkeypatch.setattr(present, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    monkeypatch.setattr(present, "LIBRARY", library)
    monkeypatch.delenv(present.HIDES, raising=False)
    present.check_device(EngineSettings(model_path="demo", device="cpu"))
    if said is None:
        present.check_device(EngineSettings(model_path="demo", device="cuda"))
        return
    with pytest.raises(ConfigError) as refused:
        present.check_device(EngineSettings(model_path="demo", device="cuda"))
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
    monkeypatch.setattr(present, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    monkeypatch.setattr(present, "LIBRARY", library)
    if visible is None:
        monkeypatch.delenv(present.HIDES, raising=False)
    else:
        monkeypatch.setenv(present.HIDES, visible)
    assert present.known_device(EngineSettings(model_path="demo")) == device
    for named in ("cpu", "cuda"):
        assert present.known_device(EngineSettings(model_path="demo", device=named)) == named
    if device == "cpu" and visible is not None:
        with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES is .* and hides every device; .* --device cpu"):
            present.check_device(EngineSettings(model_path="demo", device="cuda"))


def test_this_torch_says_what_it_is() -> None:
    """The file that is read is torch's own."""
    import torch

    settings = EngineSettings(model_path="demo", device="cuda")
    if torch.version.cuda is None:
        with pytest.raises(ConfigError, match="without CUDA"):
            present.check_device(settings)
    elif torch.cuda.is_available():
        present.check_device(settings)


@pytest.mark.parametrize("config", [{"num_attention_heads": 8}, {"text_config": {"num_attention_heads": 8}}])
def test_ranks_that_cannot_divide_the_heads(config: dict[str, object]) -> None:
    """The heads that the config names, of the text part where there are several."""
    check_ranks(config, 4)
    with pytest.raises(ModelError, match=r"8 query heads cannot be divided among 3 ranks; .* may be 1, 2, 4, 8"):
        check_ranks(config, 3)
    check_ranks({"num_attention_heads": [8, 4]}, 3)  # of each layer, which the model's plugin reads
