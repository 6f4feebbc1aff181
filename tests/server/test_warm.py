"""`dovetail warm`: the engine compiles what it launches, and the command says what and where."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.base.settings import EngineSettings
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.device import devices
from dovetail.runtime.start import check
from dovetail_backends.devices.cuda import CudaDevice
from dovetail_server.cli import main, warm
from dovetail_testing.models import make_model


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command believes that there is a GPU; the engine, in its own process, starts on the CPU."""
    monkeypatch.setattr(devices, "choose", lambda found: CudaDevice)


def test_on_a_cpu_there_is_nothing_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    """That is no error: a script for images runs everywhere."""
    assert main(["warm", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("Nothing to compile")


@pytest.mark.usefixtures("gpu")
def test_it_starts_the_engine_and_counts_what_is_new(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All kernels first, then an end; run again, nothing is left."""
    old, new, seen = tmp_path / "a" / "old.cubin", tmp_path / "b" / "new.cubin", []
    old.parent.mkdir()
    old.write_bytes(b"1" * 2**20)
    start_once = warm.start_once

    async def compiles(settings: Any, plan: Any) -> Any:
        seen.append(settings.wait_for_kernels)
        info = await start_once(settings, plan)
        new.parent.mkdir(exist_ok=True)
        new.write_bytes(b"2" * 2**20)
        new.with_suffix(".json").write_bytes(b"{}")
        return info

    monkeypatch.setattr(warm, "start_once", compiles)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for done in ("1 kernel compiled", "nothing was left to compile"):
        assert main(["warm", "--log-level", "error"]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith(f"Qwen3ForCausalLM on cpu, attention torch_native: {done}, ")
        assert second.startswith(f"{tmp_path}: 2 kernels, 2.0 MiB.")
    assert seen == [True, True]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        (["--disable-compile-ahead"], 2, "--disable-compile-ahead"),
        (["/nowhere"], 2, "no such folder"),
        (["--warmth", "3"], 2, "--warmth: unknown option"),
        (["--page-size", "0"], 2, "page-size"),
    ],
)
def test_what_is_wrong_is_one_line(argv: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before an engine starts."""
    assert main(["warm", *argv]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dovetail warm: error: ")
    assert told in line


def test_help_names_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    """And ends well."""
    assert main(["warm", "--help"]) == 0
    assert "TRITON_CACHE_DIR" in capsys.readouterr().out


def fingerprint(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    found: list[Any] = []
    monkeypatch.setattr(check, "CompiledAhead", lambda device, of: found.append(of))
    given = EngineSettings(**settings)
    folder = ModelFolder.read(given.folder, weights=False)
    check._compiled_ahead(torch.device("cuda"), given, folder, SimpleNamespace(states=list))  # type: ignore[arg-type]
    return found[0]


@pytest.mark.usefixtures("cuda_taken")
def test_what_launches_the_same_kernels_is_warmed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An image is warmed with dummy weights; where weights are quantised, these decide what is launched."""
    folder = str(make_model(tmp_path / "plain", "LlamaForCausalLM"))
    plain = fingerprint(monkeypatch, model_path=folder)
    other = {"load_format": "dummy", "random_seed": 3, "wait_for_kernels": True, "report_cache": True}
    assert fingerprint(monkeypatch, model_path=folder, **other) == plain
    assert fingerprint(monkeypatch, model_path=folder, page_size=32) != plain
    int8 = {"model_path": folder, "quantization": "int8"}
    assert fingerprint(monkeypatch, **int8, load_format="dummy") != fingerprint(monkeypatch, **int8)
