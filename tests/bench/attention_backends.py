"""Attention backends side by side: `python tests/bench/attention_backends.py --backends triton fa3` (needs a GPU).

A load is requests, cached tokens of each, new tokens of each, KV heads, query heads of each KV head, head dim. A step
has three layers with a cache of their own, recorded in one graph with what a backend works out once a step; the time is
a layer's. New keys and values are not written: all backends do that with one kernel. A prompt's figure is in TFLOP/s of
the causal half, a decode row's in parts of the bandwidth at which its keys and values are read.
"""

from __future__ import annotations

import argparse

import torch
from expert_tiles import BANDWIDTH, graph_us

from dovetail.cache.pool import PagedKVPool
from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, Phase
from dovetail.plugins import Registry, load, make_plan
from dovetail.runtime.attention.grouped import attended_groups, of_group
from dovetail.testing.conformance.attention_world import Case

PAGE = 16
LOADS = [
    "1x640x1x2x7x64", "64x640x1x2x7x64", "256x640x1x2x7x64", "1x640x1x8x2x128", "64x640x1x8x2x128", "1x640x1x8x4x128",
    "16x640x1x8x4x128", "64x640x1x8x4x128", "256x640x1x8x4x128", "1x16000x1x8x4x128", "16x16000x1x8x4x128",
    "64x4000x1x8x4x128", "16x0x512x8x4x128", "1x0x4096x2x7x64", "1x0x8192x2x7x64", "1x0x8192x8x2x128",
    "1x0x8192x8x4x128", "1x8192x8192x8x4x128", "4x0x2048x8x4x128",
]  # fmt: skip


def make(load: tuple[int, ...], backend_class: type[AttentionBackend]) -> tuple[AttentionBackend, ForwardBatch]:
    """Return a backend over a filled pool, and a step."""
    num, cached, new, kv_heads, group, dim = load
    device, length = torch.device("cuda"), cached + new
    case = Case(
        lengths=[(cached, new)], page_size=PAGE, dtype=torch.bfloat16, num_qo_heads=kv_heads * group,
        num_kv_heads=kv_heads, head_dim=dim,
    )  # fmt: skip
    [cache_group] = attended_groups(case.config())
    pages = -(-length // PAGE)
    pool = PagedKVPool(cache_group, num * pages + 1, PAGE, torch.bfloat16, device)
    for index in range(3):
        pool.layer(index).normal_()
    backend = backend_class(of_group(case.config(), cache_group), pool, device)
    table = 1 + torch.randperm(num * pages, device="cuda").view(num, pages).to(torch.int32)
    news = torch.full((num,), new, device=device)
    starts = torch.zeros(num + 1, dtype=torch.int32, device=device)
    starts[1:] = news.cumsum(0)
    places = (cached + torch.arange(new, device=device)).repeat(num)
    batch = ForwardBatch(
        num_decode=num if new == 1 else 0, positions=places, kv_slots=places, rows=torch.arange(num, device=device),
        page_table=table, seq_lens=torch.full((num,), length, device=device), q_starts=starts, seq_lens_cpu=[],
        q_lens_cpu=[] if new == 1 else [new] * num, attention=backend, last_tokens=starts[1:].long() - 1,
    )  # fmt: skip
    backend.init_graph_state(num, num * new)
    backend.plan(batch, Phase.CAPTURE)
    return backend, batch


def took(load: tuple[int, ...], backend_class: type[AttentionBackend]) -> tuple[float, torch.Tensor]:
    """Microseconds of a layer, and what the last one gave."""
    num, _, new, kv_heads, group, dim = load
    torch.manual_seed(0)
    backend, batch = make(load, backend_class)
    q = torch.randn(num * new, kv_heads * group, dim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(num * new, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(q, float("nan"))
    layers = [
        AttentionLayer(
            index=index, num_qo_heads=kv_heads * group, num_kv_heads=kv_heads, qk_dim=dim, v_dim=dim, scale=dim**-0.5
        )
        for index in range(3)
    ]

    def step() -> None:
        backend.plan_in_graph(batch)
        for layer in layers:
            (backend.forward_decode if new == 1 else backend.forward_extend)(q, k, k, layer, batch, out)

    return graph_us(step) / len(layers), out


def main() -> int:
    """One line for a load; backends that do not agree with the first are an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", nargs="+", default=LOADS)
    parser.add_argument("--backends", nargs="+", default=["triton", "fa3"])
    args = parser.parse_args()
    registry, classes = Registry.scan(), {}
    for name in args.backends:
        plan = make_plan(registry, attention_backend=name, device="cuda")
        [(_, classes[name])] = load(plan, "engine").candidates("attention_backend")
    for text in args.loads:
        shape = tuple(int(part) for part in text.split("x"))
        num, cached, new, kv_heads, group, dim = shape
        found = {name: took(shape, backend) for name, backend in classes.items()}
        first = found[args.backends[0]][1]
        parts = []
        for name, (us, out) in found.items():
            worst = (out.float() - first.float()).abs().max().item()
            if not worst < 2e-2:
                raise SystemExit(f"{text}: {name} differs from {args.backends[0]} by {worst}")
            if new == 1:
                figure = f"{num * (cached + 1) * kv_heads * dim * 4 / us * 1e6 / BANDWIDTH:.0%}"
            else:
                work = 4 * num * kv_heads * group * dim * (cached * new + new * new / 2)
                figure = f"{work / us / 1e6:.0f} TFLOP/s"
            parts.append(f"{name} {us:.1f} us ({figure})")
        print(f"{text}: {', '.join(parts)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
