"""Tunes the tile of paged decode attention (needs a GPU).

    python tests/benchmarks/decode_tiles.py [--cache-dtype int8]

A load is requests, tokens of each, KV heads, query heads of each KV head, head dim. Layers with a cache of their own
follow each other in one graph, so that keys and values come from memory.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionLayer, ForwardBatch
from dovetail_backends.triton.decode import DecodeScratch, SplitShape, choose_shape, decode_qkv
from dovetail_backends.triton.kv import Scales

kernel = sys.modules[decode_qkv.__module__]
PAGE = 16
LOADS = ["16x640x2x7x64", "64x640x2x7x64", "256x640x2x7x64", "16x640x8x2x128", "64x640x8x2x128", "256x640x8x2x128",
         "1x640x8x4x128", "16x640x8x4x128", "64x640x8x4x128", "256x640x8x4x128"]  # fmt: skip


def make(num: int, length: int, kv_heads: int, group: int, dim: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """A step's tensors, and the caches of a few layers with their scales."""
    pages = -(-length // PAGE)
    layers = max(2, min(12, (2 << 30) // (num * length * kv_heads * dim * 2 * dtype.itemsize)))
    shape = (num * pages + 1, 2, PAGE, kv_heads, dim)
    pools: list[tuple[Tensor, Scales | None]] = []
    for _ in range(layers):
        if dtype == torch.bfloat16:
            pools.append((torch.randn(shape, device="cuda", dtype=dtype), None))
            continue
        k, v = torch.full((2, num * pages + 1, PAGE, kv_heads), 1 / 64, device="cuda", dtype=torch.bfloat16)
        numbers = torch.randint(-64, 64, shape, device="cuda", dtype=torch.int8)
        pools.append((numbers, Scales(k, v, dtype)))
    table = 1 + torch.randperm(num * pages, device="cuda").view(num, pages).to(torch.int32)
    rows = torch.arange(num, device="cuda")
    lens = torch.full((num,), length, device="cuda")
    slots = table[rows, (length - 1) // PAGE].long() * PAGE + (length - 1) % PAGE
    heads = kv_heads * (group + 2)
    qkv = torch.randn(num, heads, dim, device="cuda", dtype=torch.bfloat16)
    rope = torch.randn(num, 1, dim, device="cuda", dtype=torch.bfloat16)
    batch = ForwardBatch(
        num_decode=num, positions=lens - 1, kv_slots=slots, rows=rows, page_table=table, seq_lens=lens,
        q_starts=torch.arange(num + 1, device="cuda", dtype=torch.int32), seq_lens_cpu=[], q_lens_cpu=[],
        attention=None, last_tokens=rows,
    )  # type: ignore[arg-type]  # fmt: skip
    norm = (torch.ones(kv_heads * (group + 1), dim, device="cuda", dtype=torch.bfloat16), 1e-6)
    return pools, qkv, norm, rope, batch


def took_us(load: tuple[int, ...], shape: SplitShape, made: tuple[Any, ...]) -> float:
    """Median microseconds of a layer."""
    num, _, kv_heads, group, dim = load
    pools, qkv, norm, rope, batch = made
    scratch = DecodeScratch(kv_heads * group, kv_heads, dim, torch.device("cuda"))
    layer = AttentionLayer(
        index=0, num_qo_heads=kv_heads * group, num_kv_heads=kv_heads, qk_dim=dim, v_dim=dim, scale=dim**-0.5
    )
    out = torch.empty(num, kv_heads * group, dim, device="cuda", dtype=torch.bfloat16)
    kernel.choose_shape = lambda *_: shape

    def run() -> None:
        for pool, scales in pools:
            decode_qkv(qkv, norm, (rope, rope), (pool[:, 0], pool[:, 1]), layer, batch, scratch, out, scales=scales)

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / len(pools))
    return statistics.median(times[2:])


def main() -> int:
    """One line for a load: the tile in use and the best ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", nargs="+", default=LOADS)
    parser.add_argument("--cache-dtype", choices=["bfloat16", "int8", "float8_e4m3fn"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=90, help="for all loads; the tile in use is always timed")
    args = parser.parse_args()
    until = time.perf_counter() + args.seconds
    for place, text in enumerate(args.loads):
        limit = time.perf_counter() + (until - time.perf_counter()) / (len(args.loads) - place)
        load = tuple(int(part) for part in text.split("x"))
        num, length, kv_heads, _, dim = load
        made = make(*load, getattr(torch, args.cache_dtype))
        now = choose_shape(num, kv_heads, dim)
        splits = sorted({1, 2, 4, now.splits, max(1, now.splits // 2), min(64, 2 * now.splits)})
        found = [(took_us(load, now, made), now)]
        for parts, block_n, warps in itertools.product(splits, (16, 32, 64, 128), (1, 2, 4, 8)):
            if block_n * dim // warps > 4096 or block_n * dim // warps < 512 or parts > 4 * now.splits:
                continue
            shape = SplitShape(parts, block_n, warps)
            if shape == now or time.perf_counter() > limit:
                continue
            try:
                found.append((took_us(load, shape, made), shape))
            except RuntimeError as error:
                raise RuntimeError(f"{text} with {shape}") from error
        bytes_ = (
            num
            * length
            * kv_heads
            * 2
            * (dim * getattr(torch, args.cache_dtype).itemsize + 2 * (args.cache_dtype != "bfloat16"))
        )
        best = ", ".join(
            f"{took:.1f} {s.splits}/{s.block_n}/{s.warps}" for took, s in sorted(found, key=lambda f: f[0])[:4]
        )
        print(
            f"{text}: floor {bytes_ / 4.3e6:.1f} us, now {found[0][0]:.1f} "
            f"{now.splits}/{now.block_n}/{now.warps}, best of {len(found)} (splits/tokens/warps) {best}", flush=True,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
