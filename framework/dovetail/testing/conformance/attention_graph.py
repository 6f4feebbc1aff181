"""Recording a decode step into a CUDA graph and replaying it, as the engine does."""

from __future__ import annotations

from dataclasses import replace

import torch

from dovetail.contracts.attention import AttentionBackend, Phase
from dovetail.testing.conformance.attention_world import Case, World, compare, make_backend, make_world


def capture_and_replay(backend_class: type[AttentionBackend], case: Case) -> None:
    """Record a decode step, write another batch of as many requests into the same tensors, replay and compare."""
    device = torch.device("cuda")
    world = make_world(case, device)
    backend = make_backend(backend_class, world)
    backend.init_graph_state(max_batch=len(case.lengths), max_tokens=len(case.lengths))
    world.batch.attention = backend
    backend.plan(world.batch, Phase.CAPTURE)
    world.batch.seq_lens_cpu, world.batch.q_lens_cpu = [], []
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backend.plan_in_graph(world.batch)
        world.attend(backend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.plan_in_graph(world.batch)
        out = world.attend(backend)
    for shorter in (0, 1, 3):
        lengths = [(max(1, cached - shorter), 1) for cached, _ in case.lengths]
        other = make_world(replace(case, lengths=lengths), device, seed=shorter + 1)
        _overwrite(world, other)
        backend.plan(other.batch, Phase.REPLAY)
        graph.replay()
        torch.cuda.synchronize()
        compare(other, out, backend_class, "replayed from a graph")


def _overwrite(world: World, other: World) -> None:
    """Put `other`'s batch into the tensors that the graph reads."""
    pages = other.pool.num_pages
    world.pool.memory[:, :pages].copy_(other.pool.memory)
    for name in ("positions", "kv_slots", "rows", "seq_lens", "q_starts"):
        getattr(world.batch, name).copy_(getattr(other.batch, name))
    world.batch.page_table.zero_()
    table = other.batch.page_table
    world.batch.page_table[:, : table.shape[1]].copy_(table)
    for name in ("q", "k", "v"):
        getattr(world, name).copy_(getattr(other, name))
