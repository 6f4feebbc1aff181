"""The `fa4` backend over a stand-in that checks what FlashAttention-4 checks: CI does not install the library."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from fake_fa4 import FakeFA4
from test_fa3 import write_in_torch

from dovetail.contracts.errors import PluginError, UnsupportedError
from dovetail.plugins import Registry, make_plan
from dovetail_backends import fa4_library, fa4_worker, flash
from dovetail_backends.fa4 import FlashAttention4Backend
from dovetail_backends.fa4_library import ENABLED, FOLDER, Variant, find_library, run_workers, variants_of
from dovetail_testing.conformance.attention import AttentionBackendConformance
from dovetail_testing.conformance.attention_cases import DECODE, MIXED, PREFILL
from dovetail_testing.conformance.attention_world import Case, make_backend, make_world, verify

CPU = torch.device("cpu")
HALF = Case(lengths=MIXED, dtype=torch.float16, num_kv_heads=2)
ONE = Variant("float16", (4, 2, 16), 16, has_window=False, cap=0.0, has_sinks=False, num_requests=1)


class OnCpu(FlashAttention4Backend):
    """The backend where the stand-in runs."""

    caps = replace(FlashAttention4Backend.caps, devices=frozenset({"cpu"}), head_dims=frozenset({16, 64, 80}))


def installed(name: str) -> str:
    """The version of whatever is asked for."""
    return {"flash-attn-4": "4.0.0b36"}.get(name, "1.0")


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeFA4:
    """Install the stand-in under the name of the real module; keys and values are written in torch."""
    module = FakeFA4()
    for name, found in (
        ("flash_attn", ModuleType("x")),
        ("flash_attn.cute", ModuleType("x")),
        (module.__name__, module),
    ):
        monkeypatch.setitem(sys.modules, name, found)
    monkeypatch.setattr(fa4_library, "version", installed)
    monkeypatch.setattr(flash, "write_kv", write_in_torch)
    monkeypatch.setattr(fa4_library, "kernel_folder", lambda: tmp_path / "fa4")
    for name in (ENABLED, FOLDER):
        monkeypatch.setenv(name, "")  # noted, so that it is put back
        monkeypatch.delenv(name)
    return module


class TestFlashAttention4(AttentionBackendConformance):
    """The kit: shapes, dtypes, windows, page sizes, prefixes, poisoned pages, decode without host reads.

    Pages of 128 tokens are loaded whole, others token by token.
    """

    plugin_class: ClassVar[Any] = OnCpu
    page_sizes: ClassVar[tuple[int, ...]] = (3, 16, 128)


@pytest.mark.parametrize(
    "features",
    [{"window": 5}, *(pytest.param(x, marks=pytest.mark.full) for x in ({}, {"soft_cap": 0.7}, {"sinks": True}))],
    ids=str,
)
def test_no_step_launches_a_kernel_that_was_not_prepared(features: dict[str, Any], fake: FakeFA4) -> None:
    """All that a step launches was launched when the backend was made: rows, chunks, both, more than 256 of them."""
    case = replace(HALF, **features)
    world = make_world(case, CPU)
    backend = make_backend(OnCpu, world)
    prepared = set(fake.calls)
    fake.calls.clear()
    many = [(1 + i % 5, 1) for i in range(300)]
    for seed, lengths in enumerate((DECODE, PREFILL, MIXED, ((0, 700),), many)):
        after = make_world(replace(case, lengths=lengths), CPU, seed)
        backend.kv_pool = after.pool
        after.run(backend)
    assert fake.calls
    assert set(fake.calls) == prepared


def test_layers_that_differ_have_kernels_of_their_own() -> None:
    """Windows, caps, sinks and heads make a variant each, for few requests and for many; like layers share theirs."""
    config = HALF.config()
    first = config.layers[0]
    layers = (first, replace(first, index=1), replace(first, index=2, soft_cap=30.0))
    found = variants_of(replace(config, layers=layers), torch.bfloat16, 16)
    assert [(v.cap, v.num_requests) for v in found] == [(0.0, 1), (0.0, 257), (30.0, 1), (30.0, 257)]
    assert {v.dtype for v in found} == {"bfloat16"}


def test_where_it_is_absent_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package nothing is imported, and one line says how to get it."""

    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(fa4_library, "version", absent)
    monkeypatch.delitem(sys.modules, "flash_attn.cute.interface")
    monkeypatch.setattr(fa4_library.importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    why = OnCpu.why_not(HALF.config(), CPU, torch.float16, 16)
    assert why == "FlashAttention-4 is not installed; run: pip install 'dovetail-llm[fa4]'"
    assert FlashAttention4Backend.library() == ""


def test_a_library_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package that it needs, what its import raises, and another version are named in one line."""
    monkeypatch.delitem(sys.modules, "flash_attn.cute.interface")
    assert "flash_attn.cute.interface is missing" in str(find_library())

    def raises(name: str) -> ModuleType:
        raise RuntimeError("CUDA 12\nis wanted")

    with monkeypatch.context() as patch:
        patch.setattr(fa4_library.importlib, "import_module", raises)
        assert find_library() == "FlashAttention-4 cannot be imported: RuntimeError: CUDA 12 is wanted"
    other = ModuleType("flash_attn.cute.interface")
    other._flash_attn_fwd = lambda q, k, v: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, other.__name__, other)
    why = str(find_library())
    assert why.startswith("flash-attn-4 4.0.0b36 does not take cu_seqlens_q, seqused_k, page_table")
    with pytest.raises(UnsupportedError, match="another version"):
        OnCpu(HALF.config(), make_world(HALF, CPU).pool, CPU)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_other_gpus_are_refused(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Hopper's kernel is served; the library's others have other limits."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    why = FlashAttention4Backend.why_not(HALF.config(), torch.device("cuda"), torch.float16, 16) or ""
    assert why.startswith(f"compute capability {capability[0]}.{capability[1]} is not supported")


def test_more_heads_than_the_kernel_packs_are_refused() -> None:
    """A KV head with more than 128 query heads is told of before anything is made."""
    case = replace(HALF, num_qo_heads=256, num_kv_heads=1)
    assert "256 query heads" in str(OnCpu.why_not(case.config(), CPU, torch.float16, 16))
    verify(OnCpu, replace(HALF, num_qo_heads=128, num_kv_heads=1), CPU)


def test_kernels_are_kept_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library is told to keep its kernels beside Triton's; what a user set stays; an unwritable folder is left."""
    find_library()
    assert (os.environ[ENABLED], os.environ[FOLDER]) == ("1", str(tmp_path / "fa4"))
    monkeypatch.setenv(ENABLED, "0")
    find_library()
    assert os.environ[ENABLED] == "0"
    for name in (ENABLED, FOLDER):
        monkeypatch.delenv(name)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(fa4_library, "kernel_folder", lambda: tmp_path / "file" / "fa4")
    assert not isinstance(find_library(), str)
    assert ENABLED not in os.environ


def test_kernels_are_compiled_once_for_all_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first start compiles in other processes, and loads; the next only loads; another version compiles again."""
    compiled: list[Any] = []
    launched: list[Any] = []
    monkeypatch.setattr(fa4_library, "compile_side_by_side", lambda variants, device: compiled.append(variants))
    monkeypatch.setattr(fa4_library, "launch", lambda build, variant, device: launched.append(variant))
    build = find_library()
    for _ in range(2):
        fa4_library.prepare(build, [ONE], torch.device("cuda"))  # type: ignore[arg-type]
    assert compiled == [[ONE]]
    assert launched == [ONE, ONE]
    monkeypatch.setattr(fa4_library, "version", lambda name: "4.0.0b37")
    fa4_library.prepare(build, [ONE], torch.device("cuda"))  # type: ignore[arg-type]
    assert len(compiled) == 2
    assert len(list((tmp_path / "fa4").glob("*.json"))) == 2


def test_processes_that_fail_or_hang_are_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that fails is no fault; one that hangs is killed in the end, and a warning says so."""
    started: list[Any] = []
    real = fa4_library.subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        code = "raise SystemExit(3)" if len(started) == 0 else "import time; time.sleep(60)"
        started.append(real([sys.executable, "-c", code]))
        return started[-1]

    monkeypatch.setattr(fa4_library.subprocess, "Popen", start)
    monkeypatch.setattr(fa4_library, "COMPILE_S", 1.0)
    with caplog.at_level(logging.WARNING, "dovetail.backends.fa4"):
        run_workers([[ONE], [ONE]], dict(os.environ))
    assert [process.poll() for process in started] == [3, -9]
    assert "took more than 1 s to compile" in caplog.text


def test_a_worker_compiles_what_it_is_told(
    fake: FakeFA4, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It launches each variant on fake tensors; one that fails is named, and the others are compiled all the same."""
    seen: list[tuple[Any, ...]] = []

    def compiles(q: Any, k: Any, v: Any, **given: Any) -> None:
        assert type(q).__name__ == "FakeTensor"
        assert q.device.type == "cuda"
        if q.shape[-1] == 24:
            raise RuntimeError("no such kernel")
        seen.append((tuple(q.shape), tuple(k.shape), given["window_size_left"], given["learnable_sink"] is not None))

    fake._flash_attn_fwd = compiles  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(fa4_library, "NEEDED", ())
    monkeypatch.setattr(os, "nice", lambda increment: increment)  # which would be for all tests that follow
    told = [
        {"dtype": "bfloat16", "heads": [4, 2, dim], "page_size": 16, "has_window": True, "cap": 0.0,
         "has_sinks": True, "num_requests": 3}
        for dim in (24, 64)
    ]  # fmt: skip
    assert fa4_worker.main([json.dumps(told)]) == 1
    assert seen == [((3, 4, 64), (2, 16, 2, 64), 0, True)]
    assert "RuntimeError: no such kernel" in capfd.readouterr().err


def test_its_names_and_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of the peers mean it; without its package the plan refuses it by name, before anything is imported."""
    with pytest.raises(PluginError, match=r"needs flash-attn-4; run: pip install flash-attn-4"):
        make_plan(Registry.scan(), attention_backend="fa4", device="cuda")
    monkeypatch.setattr("dovetail.plugins.plan.distributions", lambda name: [name])
    for name in ("fa4", "flash-attn-4", "FLASH_ATTN_4"):
        assert make_plan(Registry.scan(), attention_backend=name, device="cuda").plugins[0].name == "fa4"
