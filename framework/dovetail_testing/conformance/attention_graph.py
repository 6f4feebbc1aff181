"""Steps in graphs, as the engine records and replays them: on CUDA, and what of it can be tried anywhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionBackend, ForwardBatch, Phase
from dovetail_testing.conformance.attention_world import Case, World, compare, make_backend, make_world


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
        overwrite(world, other)
        graph.replay()
        torch.cuda.synchronize()
        compare(other, out, backend_class, "replayed from a graph")


def rerun(backend_class: type[AttentionBackend], case: Case, device: torch.device) -> None:
    """As `capture_and_replay` on any device: the recorded calls are made again for other lengths, without a plan."""
    world = make_world(case, device)
    backend = make_backend(backend_class, world)
    backend.init_graph_state(max_batch=len(case.lengths), max_tokens=len(case.lengths))
    world.batch.attention = backend
    backend.plan(world.batch, Phase.CAPTURE)
    world.batch.seq_lens_cpu, world.batch.q_lens_cpu = [], []
    for shorter in (0, 1, 3):
        lengths = [(max(1, cached - shorter), 1) for cached, _ in case.lengths]
        other = make_world(replace(case, lengths=lengths), device, seed=shorter + 1)
        overwrite(world, other)
        backend.plan_in_graph(world.batch)
        compare(other, world.attend(backend), backend_class, "for other lengths than those that were planned")


def padded_prefill(backend_class: type[AttentionBackend], case: Case, device: torch.device) -> None:
    """Serve several divisions of a number of tokens into chunks with what was planned once, as a prefill graph does."""
    divisions = [[(0, 9), (5, 4), (16, 8)], [(3, 2), (0, 1)], [(31, 20)], [(0, 5), (7, 5), (2, 5), (20, 5), (1, 4)]]
    num_tokens, num_chunks, static = 24, 5, None
    worlds = [
        make_world(replace(case, lengths=[(c, n) for c, n in lengths if n > 0]), device, seed)
        for seed, lengths in enumerate(divisions)
    ]
    backend = make_backend(backend_class, max(worlds, key=lambda world: world.pool.num_pages))
    pool: Any = backend.kv_pool
    backend.init_graph_state(max_batch=num_chunks, max_tokens=num_tokens)
    # One of the pools is the backend's.
    memories = [[memory.clone() for memory in world.pool.everything] for world in worlds]
    for world, saved in zip(worlds, memories, strict=True):
        pool.poison()
        for memory, given_back in zip(pool.everything, saved, strict=True):
            memory[:, : given_back.shape[1]].copy_(given_back)
        given = _padded(world, num_tokens, num_chunks)
        if static is None:
            static = given
            static.batch.attention = backend
            backend.plan(static.batch, Phase.CAPTURE)
        else:
            static.overwrite(given)
        backend.plan_in_graph(static.batch)
        backend.write_kv(world.layer, static.k, static.v, static.batch)
        out = static.q.new_full((*static.q.shape[:-1], case.value_dim), float("nan"))
        backend.forward_extend(static.q, static.k, static.v, world.layer, static.batch, out)
        num = world.q.shape[0]
        compare(world, out[:num], backend_class, f"padded to {num_tokens} tokens and {num_chunks} chunks")


@dataclass(slots=True)
class Padded:
    """A batch of prefill chunks with padding, and its queries, keys and values."""

    batch: ForwardBatch
    q: Tensor
    k: Tensor
    v: Tensor

    def overwrite(self, other: Padded) -> None:
        """Put another batch of the same size into these tensors."""
        for name in ("positions", "kv_slots", "rows", "page_table", "seq_lens", "q_starts", "last_tokens"):
            getattr(self.batch, name).copy_(getattr(other.batch, name))
        for name in ("q", "k", "v"):
            getattr(self, name).copy_(getattr(other, name))


def _padded(world: World, num_tokens: int, num_chunks: int) -> Padded:
    """Pad a world's chunks as `ForwardBatch.q_lens_cpu` says; the padding's queries, keys and values are finite."""
    batch, real, chunks = world.batch, world.q.shape[0], world.batch.num_requests
    table = torch.zeros(16, 32, dtype=torch.int32, device=world.device)
    table[: batch.page_table.shape[0], : batch.page_table.shape[1]] = batch.page_table
    spare = 15

    def longer(tensor: Tensor, num: int, value: int) -> Tensor:
        return torch.cat((tensor, tensor.new_full((num - tensor.shape[0], *tensor.shape[1:]), value)))

    padded = replace(
        batch,
        positions=longer(batch.positions, num_tokens, 0),
        kv_slots=longer(batch.kv_slots, num_tokens, -1),
        rows=longer(batch.rows, num_chunks, spare),
        page_table=table,
        seq_lens=longer(batch.seq_lens.long(), num_chunks, 0),
        q_starts=longer(batch.q_starts, num_chunks + 1, real),
        seq_lens_cpu=[],
        q_lens_cpu=[num_tokens] * num_chunks,
        last_tokens=longer(batch.last_tokens, num_chunks, 0),
    )
    if chunks > num_chunks:
        raise ValueError(f"{chunks} chunks do not fit {num_chunks}")
    return Padded(padded, *(longer(tensor, num_tokens, 1) for tensor in (world.q, world.k, world.v)))


def overwrite(world: World, other: World) -> None:
    """Put `other`'s batch into the tensors that the graph reads."""
    pages = other.pool.num_pages
    for memory, given in zip(world.pool.everything, other.pool.everything, strict=True):
        memory[:, :pages].copy_(given)
    for name in ("positions", "kv_slots", "rows", "seq_lens", "q_starts"):
        getattr(world.batch, name).copy_(getattr(other.batch, name))
    world.batch.page_table.zero_()
    table = other.batch.page_table
    world.batch.page_table[:, : table.shape[1]].copy_(table)
    for name in ("q", "k", "v"):
        getattr(world, name).copy_(getattr(other, name))
