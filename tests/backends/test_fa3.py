"""The `fa3` backend over a stand-in that checks what FlashAttention-3 checks; it is installed nowhere in CI."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from fake_fa3 import FakeFA3

from dovetail.contracts.attention import Phase
from dovetail.errors import UnsupportedError
from dovetail.plugins import Registry, make_plan
from dovetail.plugins.plan import candidates
from dovetail.testing.conformance.attention import AttentionBackendConformance
from dovetail.testing.conformance.attention_cases import DECODE, MIXED, PREFILL
from dovetail.testing.conformance.attention_world import Case, compare, make_backend, make_world, verify
from dovetail_backends import fa3
from dovetail_backends.fa3 import FlashAttention3Backend, find_kernel
from dovetail_backends.triton.kv import write_kv

CPU = torch.device("cpu")
HALF = Case(lengths=MIXED, dtype=torch.float16, num_kv_heads=2)


class OnCpu(FlashAttention3Backend):
    """The backend where the stand-in runs."""

    caps = replace(FlashAttention3Backend.caps, devices=frozenset({"cpu"}), head_dims=frozenset({16, 64, 72}))


def write_in_torch(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """What the kernel `write_kv` does, without Triton's interpreter, which is slow."""
    is_live, slots = (slots >= 0)[:, None, None], slots.clamp(min=0)
    pages, offsets = slots // kv.shape[2], slots % kv.shape[2]
    kv[pages, 0, offsets], kv[pages, 1, offsets] = k.where(is_live, 0), v.where(is_live, 0)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeFA3:
    """Install the stand-in under the name of the real module; keys and values are written in torch."""
    installed = FakeFA3()
    monkeypatch.setattr(fa3, "write_kv", write_in_torch)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", installed)  # type: ignore[arg-type]
    return installed


class TestFlashAttention3(AttentionBackendConformance):
    """The kit: shapes, dtypes, windows, page sizes, prefixes, poisoned pages, decode without host reads."""

    plugin_class: ClassVar[Any] = OnCpu
    page_sizes: ClassVar[tuple[int, ...]] = (3, 16)


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


def test_lengths_of_the_engine_are_int64_and_the_kernels_int32() -> None:
    """Lengths come in either width."""
    world = make_world(HALF, CPU)
    world.batch.seq_lens = world.batch.seq_lens.long()
    compare(world, world.run(make_backend(OnCpu, world)), OnCpu, "with int64 lengths")


def test_padding_of_a_prefill_graph_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind the last chunk, whose slots are negative, are not written to the cache and touch no other row."""
    monkeypatch.setattr(fa3, "write_kv", write_kv)
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
                 window_size: Any = (-1, -1), num_splits: int = 0, causal: bool = False) -> torch.Tensor:  # fmt: skip
        found = inner.flash_attn_with_kvcache(
            *args, page_table=page_table, cache_seqlens=cache_seqlens, cu_seqlens_q=cu_seqlens_q, causal=causal,
            max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, window_size=window_size, num_splits=num_splits,
        )  # fmt: skip
        return found if out is None else out.copy_(found)

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
    assert "flash_attn_interface does not take page_table, cache_seqlens" in str(find_kernel())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    assert "flash_attn_interface: AttributeError" in str(find_kernel())


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
    assert find_kernel() == fake.flash_attn_with_kvcache
    assert seen == [(fa3.HUB_REPO, 1, True)]
    assert "not in the cache" in str(find_kernel())
    assert before == constants.HF_HUB_OFFLINE


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose kind FlashAttention-3 is not built for is named with its capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    why = FlashAttention3Backend.why_not(HALF.config(), torch.device("cuda"), torch.float16, 16)
    assert why is not None
    assert why.startswith("compute capability 12.0 is not supported")


def test_sinks_are_refused() -> None:
    """A layer with attention sinks is an error, not a wrong result."""
    world = make_world(replace(HALF, sinks=True), CPU)
    with pytest.raises(UnsupportedError, match="sinks"):
        world.run(make_backend(OnCpu, world))


def test_it_is_chosen_by_name_only() -> None:
    """`auto` does not take it; its name and aliases do."""
    registry = Registry.scan()
    assert "fa3" not in {record.name for record in candidates(registry, "attention_backend", {"device": "cuda"})}
    for name in ("fa3", "flash-attn-3", "FLASH_ATTN_3"):
        assert make_plan(registry, attention_backend=name, device="cuda").plugins[0].name == "fa3"
