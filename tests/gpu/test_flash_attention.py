"""FlashAttention backends on a CUDA device: the kit, captured steps, and that they are what the reference is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.attention import AttentionBackend, AttentionLayer, Phase
from dovetail.contracts.errors import UnsupportedError
from dovetail_backends.fa3 import FlashAttention3Backend
from dovetail_backends.fa4 import FlashAttention4Backend
from dovetail_testing.conformance.attention import DECODE, AttentionBackendConformance
from dovetail_testing.conformance.attention_world import Case, World, compare, make_backend, make_world, verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
CUDA = torch.device("cuda")


def why_not(backend: type[AttentionBackend]) -> str | None:
    """What is missing here."""
    case = Case(lengths=DECODE, dtype=torch.bfloat16, head_dim=64)
    return backend.why_not(case.config(), CUDA, torch.bfloat16, 16) if torch.cuda.is_available() else "no device"


REASONS = {backend: why_not(backend) for backend in (FlashAttention3Backend, FlashAttention4Backend)}
needs_fa3, needs_fa4 = (pytest.mark.skipif(bool(reason), reason=str(reason)) for reason in REASONS.values())
both = pytest.mark.parametrize(
    "backend",
    [pytest.param(FlashAttention3Backend, marks=needs_fa3), pytest.param(FlashAttention4Backend, marks=needs_fa4)],
    ids=["fa3", "fa4"],
)
LAYERS = (None, 7, None, 7)
"""Sliding windows of a step's layers."""


class FewerFA3(FlashAttention3Backend):
    """With a head dim of each kind that FlashAttention-3 has kernels for, and nothing that Triton would compile."""

    caps = replace(FlashAttention3Backend.caps, head_dims=frozenset({8, 16, 64, 72, 96, 128, 192, 256}))
    write_kv = AttentionBackend.write_kv


class FewerFA4(FlashAttention4Backend):
    """With a few head dims, as each is compiled, and nothing that Triton would compile."""

    caps = replace(FlashAttention4Backend.caps, head_dims=frozenset({64, 128}))
    write_kv = AttentionBackend.write_kv


@needs_fa3
class TestFlashAttention3(AttentionBackendConformance):
    """The kit over the build that is installed; the write is the `triton` backend's, and tested with it."""

    plugin_class: ClassVar[Any] = FewerFA3
    page_sizes: ClassVar[tuple[int, ...]] = (1, 3, 16, 64, 128)


@needs_fa4
class TestFlashAttention4(AttentionBackendConformance):
    """The same over FlashAttention-4."""

    plugin_class: ClassVar[Any] = FewerFA4
    page_sizes: ClassVar[tuple[int, ...]] = (3, 16, 128)


@both
@pytest.mark.parametrize("features", [{}, {"window": 300}, {"soft_cap": 5.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_prompts_and_rows(
    head_dim: int, page_size: int, features: dict[str, Any], backend: type[AttentionBackend]
) -> None:
    """Chunks of several tiles of the kernel, over long prefixes too, and decode rows whose keys are split."""
    for dtype in (torch.bfloat16,) if features else (torch.bfloat16, torch.float16):
        for lengths in ([(0, 700), (1300, 257)], [(1999, 1), (3, 1), (640, 1)], [(900, 1), (0, 130), (515, 64)]):
            case = Case(
                lengths=lengths, dtype=dtype, num_qo_heads=8, num_kv_heads=2, head_dim=head_dim, page_size=page_size,
                **features,
            )  # fmt: skip
            if refused := refusal(backend, case):
                pytest.skip(refused)
            verify(backend, case, CUDA)


def refusal(backend: type[AttentionBackend], case: Case) -> str:
    """Say what the backend has found out about the build that is installed."""
    try:
        backend(case.config(), make_world(case, CUDA).pool, CUDA)
    except UnsupportedError as error:
        return str(error)
    return ""


@both
@pytest.mark.parametrize(("query", "kv", "dim"), [(14, 2, 64), (16, 8, 128), (32, 8, 128)])
def test_heads_of_usual_models(query: int, kv: int, dim: int, backend: type[AttentionBackend]) -> None:
    """The heads of a 0.5B, a 0.6B and an 8B model, 256 decode rows at once and a chunk of 2,048 tokens."""
    rows = [(1 + 37 * i % 1000, 1) for i in range(256)]
    for lengths in (rows, [(0, 2048)], [(100, 1), (0, 512), (512, 512)]):
        case = Case(lengths=lengths, dtype=torch.bfloat16, num_qo_heads=query, num_kv_heads=kv, head_dim=dim)
        verify(backend, case, CUDA)


def recorded(backend: AttentionBackend, world: World) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """Record a step of several layers; return the graph and each layer's output."""
    outs = [torch.full_like(world.q, float("nan")) for _ in LAYERS]
    batch = world.batch
    batch.attention = backend
    batch.seq_lens_cpu, batch.q_lens_cpu = [], []

    def step() -> None:
        backend.plan_in_graph(batch)
        for window, out in zip(LAYERS, outs, strict=True):
            layer = with_window(world, window)
            backend.write_kv(layer, world.k, world.v, batch)
            backend.forward_decode(world.q, world.k, world.v, layer, batch, out)

    backend.init_graph_state(max_batch=16, max_tokens=16)
    backend.plan(batch, Phase.CAPTURE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph, outs


def with_window(world: World, window: int | None) -> AttentionLayer:
    """The world's layer with another window."""
    return replace(world.layer, sliding_window=window)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [DECODE, ((1999, 1), (3, 1), (640, 1))], ids=["short", "long"])
def test_a_captured_step_is_right_at_other_lengths(
    lengths: Sequence[tuple[int, int]], dtype: torch.dtype, backend: type[AttentionBackend]
) -> None:
    """One graph of layers with and without windows, replayed for shorter requests on other pages."""
    case = Case(lengths=lengths, dtype=dtype, num_qo_heads=8, num_kv_heads=2, head_dim=128)
    world = make_world(case, CUDA)
    graph, outs = recorded(make_backend(backend, world), world)
    for seed, take in ((3, 0), (4, 1), (5, 0)):
        other = make_world(
            Case(
                lengths=[(max(1, n - take), 1) for n, _ in lengths],
                dtype=dtype, num_qo_heads=8, num_kv_heads=2, head_dim=128,
            ),
            CUDA, seed, world.pool,
        )  # fmt: skip
        for name in ("positions", "kv_slots", "rows", "seq_lens", "q_starts"):
            getattr(world.batch, name).copy_(getattr(other.batch, name))
        world.batch.page_table.zero_()
        world.batch.page_table[:, : other.batch.page_table.shape[1]].copy_(other.batch.page_table)
        for name in ("q", "k", "v"):
            getattr(world, name).copy_(getattr(other, name))
        for _ in range(2):  # a schedule that is used up must be made anew by every replay
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            for window, out in zip(LAYERS, outs, strict=True):
                other.layer = with_window(other, window)
                compare(other, out, backend, f"replayed with window {window}")
