"""FlashAttention backends on a CUDA device: the kit, captured steps, and that they are what the reference is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.attention import AttentionBackend, Phase
from dovetail.testing.conformance.attention import DECODE, AttentionBackendConformance
from dovetail.testing.conformance.attention_world import Case, World, compare, make_backend, make_world
from dovetail_backends.fa3 import FlashAttention3Backend
from dovetail_backends.fa3_builds import find_build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.skipif(isinstance(find_build(), str), reason=str(find_build())),
]
CUDA = torch.device("cuda")
LAYERS = (None, 7, None, 7)
"""Sliding windows of a step's layers."""


class TestFlashAttention3(AttentionBackendConformance):
    """The kit over the build that is installed."""

    plugin_class: ClassVar[Any] = FlashAttention3Backend
    page_sizes: ClassVar[tuple[int, ...]] = (1, 3, 16, 64, 128)


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
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph, outs


def with_window(world: World, window: int | None) -> Any:
    """The world's layer with another window."""
    from dataclasses import replace

    return replace(world.layer, sliding_window=window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [DECODE, ((1999, 1), (3, 1), (640, 1))], ids=["short", "long"])
def test_a_captured_step_is_right_at_other_lengths(lengths: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
    """One graph of layers with and without windows, replayed for shorter requests on other pages."""
    case = Case(lengths=lengths, dtype=dtype, num_qo_heads=8, num_kv_heads=2, head_dim=128)
    world = make_world(case, CUDA)
    backend = make_backend(FlashAttention3Backend, world)
    graph, outs = recorded(backend, world)
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
                compare(other, out, FlashAttention3Backend, f"replayed with window {window}")
