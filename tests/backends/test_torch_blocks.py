"""Long chunks by blocks of keys equal attention in float64, whatever queries see and however keys are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail_backends import torch_blocks, torch_native
from dovetail_backends.torch_native import TorchNativeBackend
from dovetail_testing.conformance.attention_world import Case, make_backend, make_world, verify

CPU = torch.device("cpu")


@pytest.fixture
def lens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have chunks of 32 tokens computed by blocks, on any processor; returns the lengths of those that were."""
    found: list[int] = []
    attend_chunk: Callable[..., None] = torch_blocks.attend_chunk

    def noted(q: Tensor, *others: Any) -> None:
        found.append(len(q))
        attend_chunk(q, *others)

    monkeypatch.setattr(torch_blocks, "SHORTEST", 32)
    monkeypatch.setattr(torch_blocks, "is_faster", lambda: True)
    monkeypatch.setattr(torch_blocks, "attend_chunk", noted)
    return found


@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        ([(0, 700)], {"num_kv_heads": 2, "head_dim": 64}),
        ([(900, 300)], {"num_qo_heads": 6, "num_kv_heads": 2, "page_size": 48}),
        ([(511, 1), (600, 40), (0, 33)], {"page_size": 1}),
        ([(1300, 100)], {"window": 20}),
        ([(520, 600)], {"window": 600, "gives_back": True}),
        ([(700, 500)], {"chunk": 256}),
        ([(0, 600), (550, 60)], {"sinks": True, "soft_cap": 2.0, "num_kv_heads": 1}),
        ([(560, 50)], {"window": 30, "sinks": True}),
        ([(600, 90)], {"head_dim": 24, "v_dim": 16}),
        ([(600, 90)], {"head_dim": 40, "v_dim": 32, "latent": True, "num_kv_heads": 1}),
        ([(600, 90), (0, 40)], {"cache_dtype": "float8_e4m3fn", "num_kv_heads": 2, "head_dim": 32}),
        ([(600, 90)], {"reads_another": True}),
    ],
    ids=str,
)
def test_chunks_equal_float64(lens: list[int], lengths: list[tuple[int, int]], changes: dict[str, Any]) -> None:
    """Prefixes, windows, chunks, sinks, caps, latent rows, 8-bit caches and any page size are computed by blocks."""
    verify(TorchNativeBackend, Case(lengths=lengths, dtype=torch.bfloat16, **changes), CPU)
    assert lens == [new for _, new in lengths if new >= torch_blocks.SHORTEST]


def test_rounding_is_that_of_torchs_attention(lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are float32: scores of a hundred, which bfloat16 has in steps of a half, give no larger errors."""
    case = Case(lengths=[(800, 64)], num_kv_heads=2, head_dim=64, scale=3.0, dtype=torch.bfloat16)
    world = make_world(case, CPU)
    got = world.run(make_backend(TorchNativeBackend, world)).double()
    monkeypatch.setattr(torch_blocks, "is_faster", lambda: False)
    other = world.run(make_backend(TorchNativeBackend, world)).double()
    want = world.want()
    assert lens == [64]
    assert (got - want).norm() < 2 * (other - want).norm()


def test_others_keep_torchs_attention(lens: list[int]) -> None:
    """Short chunks, other dtypes and layers in both directions are not computed by blocks."""
    for changes in ({"lengths": [(600, 31)]}, {"lengths": [(9, 64)], "dtype": torch.float32}):
        verify(TorchNativeBackend, Case(**{"dtype": torch.bfloat16, **changes}), CPU)
    verify(TorchNativeBackend, Case(lengths=[(0, 64)], dtype=torch.bfloat16, bidirectional=True), CPU)
    assert lens == []


def test_products_of_float32_stay_exact(lens: list[int]) -> None:
    """Products of float32 models take no bfloat16 instructions after a chunk that did."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    verify(TorchNativeBackend, Case(lengths=[(40, 600)], dtype=torch.bfloat16), CPU)
    assert lens == [600]
    assert settings.fp32_precision == before != "bf16"


@pytest.mark.parametrize(
    "changes",
    [{}, {"window": 70}, {"window": 700, "gives_back": True}, {"chunk": 256}, {"sinks": True, "soft_cap": 3.0}],
    ids=str,
)
def test_long_chunks_are_cut(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """Where chunks are not computed by blocks, pieces of their queries, over the keys they see, equal the whole."""
    monkeypatch.setattr(torch_native, "PIECE", 100)
    for lengths in ([(1100, 530)], [(0, 650)]):
        verify(TorchNativeBackend, Case(lengths=lengths, num_kv_heads=2, **changes), CPU)


@pytest.mark.parametrize("changes", [{}, {"window": 70}, {"chunk": 256}], ids=str)
def test_cutting_a_chunk_changes_no_bit(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """Keys that no query of a piece sees are left out by whole blocks of torch's attention."""
    monkeypatch.setattr(torch_blocks, "is_faster", lambda: False)
    case = Case(lengths=[(600, 1800)], num_kv_heads=2, dtype=torch.bfloat16, **changes)
    world = make_world(case, CPU)
    cut = world.run(make_backend(TorchNativeBackend, world))
    monkeypatch.setattr(torch_native, "PIECE", 1 << 20)
    assert torch.equal(cut, world.run(make_backend(TorchNativeBackend, world)))


def test_few_rows_are_compared_with_many() -> None:
    """What decides is the same in every process of a machine: a comparison of bits."""
    assert torch_blocks.few_rows_round_as_many() == torch_blocks.few_rows_round_as_many()
