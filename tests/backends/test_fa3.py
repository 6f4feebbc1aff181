"""The `fa3` backend over a stand-in that checks what FlashAttention-3 checks; it is installed nowhere in CI."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from fake_fa3 import FakeFA3, FakeVllm

from dovetail.contracts.attention import Phase
from dovetail.contracts.errors import UnsupportedError
from dovetail.plugins import Registry, make_plan
from dovetail.plugins.plan import candidates
from dovetail_backends import fa3, fa3_builds, flash
from dovetail_backends.fa3 import FlashAttention3Backend
from dovetail_backends.fa3_builds import UpstreamBuild, VllmBuild, find_build
from dovetail_backends.triton.kv import write_kv
from dovetail_testing.conformance.attention import AttentionBackendConformance
from dovetail_testing.conformance.attention_cases import DECODE, MIXED, PREFILL
from dovetail_testing.conformance.attention_world import Case, compare, make_backend, make_world, verify

CPU = torch.device("cpu")
HALF = Case(lengths=MIXED, dtype=torch.float16, num_kv_heads=2)


class OnCpu(FlashAttention3Backend):
    """The backend where the stand-in runs."""

    caps = replace(FlashAttention3Backend.caps, devices=frozenset({"cpu"}), head_dims=frozenset({16, 64, 72}))


class Wide(OnCpu):
    """With heads as wide as they can be."""

    caps = replace(OnCpu.caps, head_dims=frozenset({256}))


def write_in_torch(
    k: torch.Tensor, v: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
) -> None:
    """What the kernel `write_kv` does, without Triton's interpreter, which is slow."""
    is_live, slots = (slots >= 0)[:, None, None], slots.clamp(min=0)
    pages, offsets = slots // kv[0].shape[1], slots % kv[0].shape[1]
    kv[0][pages, offsets], kv[1][pages, offsets] = k.where(is_live, 0), v.where(is_live, 0)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeFA3:
    """Install the stand-in under the name of the real module; keys and values are written in torch."""
    installed = FakeFA3()
    monkeypatch.setattr(flash, "write_kv", write_in_torch)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", installed)  # type: ignore[arg-type]
    return installed


class TestFlashAttention3(AttentionBackendConformance):
    """The kit: shapes, dtypes, windows, page sizes, prefixes, poisoned pages, decode without host reads."""

    plugin_class: ClassVar[Any] = OnCpu
    page_sizes: ClassVar[tuple[int, ...]] = (3, 16)


class OverVllm(OnCpu):
    """The backend over the operators of vLLM's library."""


class TestFlashAttention3OfVllm(AttentionBackendConformance):
    """The kit over operators that take packed queries only, want every argument, and check their schedule."""

    plugin_class: ClassVar[Any] = OverVllm
    page_sizes: ClassVar[tuple[int, ...]] = (3, 16)

    @pytest.fixture(autouse=True)
    def vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Find vLLM's library."""
        monkeypatch.setattr(fa3, "find_build", of_vllm)


def of_vllm(**changes: dict[str, bool]) -> VllmBuild:
    """Return the build over a stand-in, its arguments changed."""
    fake = FakeVllm()
    arguments = {"fwd": fake.fwd_arguments, "plan": fake.plan_arguments} | changes
    return VllmBuild(fake.fwd, fake.get_scheduler_metadata, (arguments["fwd"], arguments["plan"]))


def test_a_step_is_scheduled_once_for_layers_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one window share a schedule; the next step has one of its own."""
    fake = FakeVllm()
    build = VllmBuild(fake.fwd, fake.get_scheduler_metadata, (fake.fwd_arguments, fake.plan_arguments))
    monkeypatch.setattr(fa3, "find_build", lambda: build)
    world = make_world(replace(HALF, lengths=DECODE), CPU)
    backend = make_backend(OnCpu, world)
    fake.plans.clear()
    world.run(backend)
    for window in (None, 5, 5, None):
        world.layer = replace(world.layer, sliding_window=window)
        world.attend(backend)
    assert [plan["window_size_left"] for plan in fake.plans] == [-1, 4]
    world.run(backend)
    assert len(fake.plans) == 3


def test_operators_of_another_version_are_refused() -> None:
    """What an operator wants and nobody knows, or no longer takes, is named: nothing is guessed."""
    with pytest.raises(ValueError, match="wants mask; it is another version"):
        of_vllm(fwd=FakeVllm.fwd_arguments | {"mask": False})
    assert of_vllm(fwd=FakeVllm.fwd_arguments | {"mask": True}) is not None
    without = {name: value for name, value in FakeVllm.plan_arguments.items() if name != "num_splits"}
    with pytest.raises(ValueError, match="does not take num_splits"):
        of_vllm(plan=without)


def test_a_library_that_cannot_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM's library is found without importing vLLM; why it cannot be loaded is part of the refusal."""
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    folder = tmp_path / "vllm" / "vllm_flash_attn"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "vllm" not in str(find_build()).partition(";")[0]
    (folder / "_vllm_fa3_C.abi3.so").write_bytes(b"nothing")
    why = str(find_build())
    assert "vllm.vllm_flash_attn: OSError" in why
    assert "imported" not in why


def test_another_build_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is installed is named by files and times of change, so that figures of another one are not used again."""
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    before = FlashAttention3Backend.library()
    folder = tmp_path / "vllm" / "vllm_flash_attn"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "_vllm_fa3_C.abi3.so").write_bytes(b"nothing")
    monkeypatch.syspath_prepend(str(tmp_path))
    with_vllm = FlashAttention3Backend.library()
    assert "_vllm_fa3_C.abi3.so" in with_vllm
    (tmp_path / "flash_attn_interface.py").write_text("raise RuntimeError('imported')")
    importlib.invalidate_caches()
    assert len({before, with_vllm, FlashAttention3Backend.library()}) == 3


def test_splits_are_always_given(fake: FakeFA3) -> None:
    """Packed queries are never split; decode rows are split by how many there are, and never more than allowed."""
    verify(OnCpu, HALF, CPU)
    packed = {call["num_splits"] for call in fake.calls if call["max_seqlen_q"] is not None}
    assert packed == {1}
    backend = make_backend(OnCpu, make_world(HALF, CPU))
    assert [backend._num_splits(num) for num in (1, 8, 64, 200)] == [32, 16, 2, 1]  # type: ignore[attr-defined]


def test_a_build_that_loses_rows_when_it_splits_is_not_split(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The check at the start notices rows that are not written, says so, and decode runs with one split."""
    broken = FakeFA3(loses_split_rows=True)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", broken)  # type: ignore[arg-type]
    verify(OnCpu, replace(HALF, lengths=DECODE), CPU)
    assert {call["num_splits"] for call in broken.calls[2:]} == {1}
    assert "decode runs without splits" in caplog.text


def test_a_replayed_step_reads_the_new_lengths() -> None:
    """What is recorded gathers lengths, pages and starts anew: the same calls on other contents give their result."""
    world = make_world(replace(HALF, lengths=DECODE), CPU)
    backend = make_backend(OnCpu, world)
    backend.init_graph_state(16, 16)
    backend.plan(world.batch, Phase.CAPTURE)
    shorter = make_world(replace(HALF, lengths=[(max(1, n - 1), 1) for n, _ in DECODE]), CPU, 3, world.pool)
    for name in ("positions", "kv_slots", "rows", "seq_lens", "q_starts"):
        getattr(world.batch, name).copy_(getattr(shorter.batch, name))
    world.batch.page_table.zero_()
    world.batch.page_table[:, : shorter.batch.page_table.shape[1]].copy_(shorter.batch.page_table)
    world.q, world.k, world.v = shorter.q, shorter.k, shorter.v
    world.batch.seq_lens_cpu, world.batch.q_lens_cpu = [], []
    backend.plan_in_graph(world.batch)
    compare(shorter, world.attend(backend), OnCpu, "replayed")


def test_what_graphs_read_stays_where_it_is() -> None:
    """A later step of more rows than any graph has moves nothing that a graph reads."""
    world = make_world(replace(HALF, lengths=DECODE), CPU)
    backend: Any = make_backend(OnCpu, world)
    num = len(DECODE)
    backend.init_graph_state(num, num)
    backend.plan(world.batch, Phase.CAPTURE)
    backend.plan_in_graph(world.batch)
    captured = backend._singles
    more = make_world(replace(HALF, lengths=[*DECODE, *DECODE]), CPU, 3)
    backend.plan(more.batch, Phase.EAGER)
    backend.plan_in_graph(more.batch)
    assert backend._singles.tolist() == list(range(2 * num + 1))
    backend.plan_in_graph(world.batch)
    assert backend._singles.data_ptr() == captured.data_ptr()
    assert captured.tolist() == list(range(num + 1))


def test_a_build_without_soft_caps_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at the start asks for what the layers need, so weights are not read in vain."""

    class NoCaps(FakeFA3):
        def flash_attn_with_kvcache(self, *args: Any, softcap: float = 0.0, **given: Any) -> Any:
            if softcap:
                raise RuntimeError("This flash attention build does not support tanh softcapping.")
            return super().flash_attn_with_kvcache(*args, **given)

    fake = NoCaps()
    monkeypatch.setattr(fa3, "find_build", lambda: UpstreamBuild(fake.flash_attn_with_kvcache))
    make_backend(OnCpu, make_world(HALF, CPU))
    with pytest.raises(AssertionError, match="support tanh softcapping"):
        make_backend(OnCpu, make_world(replace(HALF, soft_cap=20.0), CPU))


def test_a_build_that_computes_wide_windows_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 256 behind a window are compared with plain torch at the start; one that is wrong there is refused."""
    wide = replace(HALF, head_dim=256, window=7)
    make_backend(Wide, make_world(wide, CPU))
    inner = FakeFA3()

    def blind(*args: Any, window_size: Any = (-1, -1), **given: Any) -> Any:
        return inner.flash_attn_with_kvcache(*args, **given)

    blind.__signature__ = inspect.signature(inner.flash_attn_with_kvcache)  # type: ignore[attr-defined]
    module: Any = SimpleNamespace(flash_attn_with_kvcache=blind)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    with pytest.raises(UnsupportedError, match="wrongly where heads are 256 wide and look through a sliding window"):
        Wide(wide.config(), make_world(wide, CPU).pool, CPU)
    make_backend(Wide, make_world(replace(wide, window=None), CPU))
    make_backend(OnCpu, make_world(replace(HALF, window=7), CPU))


def test_lengths_of_the_engine_are_int64_and_the_kernels_int32() -> None:
    """Lengths come in either width."""
    world = make_world(HALF, CPU)
    world.batch.seq_lens = world.batch.seq_lens.long()
    compare(world, world.run(make_backend(OnCpu, world)), OnCpu, "with int64 lengths")


def test_padding_of_a_prefill_graph_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind the last chunk, whose slots are negative, are not written to the cache and touch no other row."""
    monkeypatch.setattr(flash, "write_kv", write_kv)
    world = make_world(replace(HALF, lengths=PREFILL), CPU)
    want = world.want()
    pad = 5
    for name, value in (("positions", 0), ("kv_slots", -1)):
        field = getattr(world.batch, name)
        setattr(world.batch, name, torch.cat((field, torch.full((pad,), value, dtype=field.dtype))))
    for name in ("q", "k", "v"):
        setattr(world, name, torch.cat((getattr(world, name), torch.ones(pad, *getattr(world, name).shape[1:]).half())))
    got = world.run(make_backend(OnCpu, world))
    assert (got[:-pad].double() - want.double()).norm() / want.norm() < 4e-3
    assert torch.equal(world.pool.memory[:, 0], torch.full_like(world.pool.memory[:, 0], 3.0))


def test_a_kernel_that_takes_out_writes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds with an `out` argument save the copy."""
    inner = FakeFA3()

    def with_out(*args: Any, out: torch.Tensor | None = None, page_table: Any = None, cache_seqlens: Any = None,
                 cu_seqlens_q: Any = None, max_seqlen_q: Any = None, softmax_scale: Any = None,
                 window_size: Any = (-1, -1), num_splits: int = 0, causal: bool = False, softcap: float = 0.0,
                 return_softmax_lse: bool = False) -> Any:  # fmt: skip
        found, lse = inner.flash_attn_with_kvcache(
            *args, page_table=page_table, cache_seqlens=cache_seqlens, cu_seqlens_q=cu_seqlens_q, causal=causal,
            max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, window_size=window_size, num_splits=num_splits,
            softcap=softcap, return_softmax_lse=return_softmax_lse,
        )  # fmt: skip
        return found if out is None else out.copy_(found), lse

    module: Any = SimpleNamespace(flash_attn_with_kvcache=with_out)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    verify(OnCpu, HALF, CPU)


def test_where_it_is_absent_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without FlashAttention-3 the backend refuses, in one line that names both ways to get it."""
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    why = OnCpu.why_not(HALF.config(), CPU, torch.float16, 16) or ""
    assert why.startswith("FlashAttention-3 is not installed; install it from the folder `hopper`")
    assert "kernels-community/flash-attn3" in why
    assert "\n" not in why
    with pytest.raises(UnsupportedError, match="not installed"):
        OnCpu(HALF.config(), make_world(HALF, CPU).pool, CPU)


def test_a_build_that_does_not_load_or_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that raises, lacks the function, or is FlashAttention-2 is named with its problem."""
    old: Any = SimpleNamespace(flash_attn_with_kvcache=lambda q, k_cache, v_cache, block_table=None: q)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", old)
    assert "flash_attn_interface: it does not take page_table, cache_seqlens" in str(find_build())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    assert "flash_attn_interface: AttributeError" in str(find_build())


def test_the_hub_kernel_is_taken_from_the_cache_alone(fake: FakeFA3, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kernels` is asked with the hub offline, and what it has is used; its absence from the cache is told."""
    import huggingface_hub.constants as constants

    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    seen: list[tuple[str, int, bool]] = []

    def get_kernel(repo: str, version: int) -> Any:
        seen.append((repo, version, constants.HF_HUB_OFFLINE))
        if len(seen) > 1:
            raise FileNotFoundError("not in the cache")
        return fake

    before = constants.HF_HUB_OFFLINE
    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))  # type: ignore[arg-type]
    found = find_build()
    assert isinstance(found, UpstreamBuild)
    assert found.function == fake.flash_attn_with_kvcache
    assert seen == [(fa3_builds.HUB_REPO, 1, True)]
    assert "not in the cache" in str(find_build())
    assert before == constants.HF_HUB_OFFLINE


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose kind FlashAttention-3 is not built for is named with its capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    why = FlashAttention3Backend.why_not(HALF.config(), torch.device("cuda"), torch.float16, 16)
    assert why is not None
    assert why.startswith("compute capability 12.0 is not supported")


def test_auto_considers_it_behind_the_default() -> None:
    """On CUDA `auto` looks at it after `triton`, and nowhere else; its name and aliases mean it alone."""
    registry = Registry.scan()
    names = [record.name for record in candidates(registry, "attention_backend", {"device": "cuda"})]
    assert names.index("triton") < names.index("fa3") < names.index("torch_native")
    assert "fa3" not in {record.name for record in candidates(registry, "attention_backend", {"device": "cpu"})}
    for name in ("fa3", "flash-attn-3", "FLASH_ATTN_3"):
        assert make_plan(registry, attention_backend=name, device="cuda").plugins[0].name == "fa3"
