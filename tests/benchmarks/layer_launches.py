"""The launches of one decode layer of gpt-oss for one stream, in order; needs no GPU.

    python tests/benchmarks/layer_launches.py [--experts 32] [--ranks 1 2] [--context 512] [--bandwidth 3.3]

For each: kernel, programs, warps, bytes of weights or cache that it must read, and microseconds that takes at a
bandwidth in TB/s. Kernels are noted as layers launch them on one rank, not compiled and not run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from quant_compiled import empty, weight_of
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.runtime.jit import JITFunction

from dovetail.contracts.attention import AttentionLayer, ForwardBatch
from dovetail.contracts.layers import RMSScale
from dovetail.contracts.ranks import PeerMemory
from dovetail.sdk.layers.routing import Routing
from dovetail_backends.kernels.triton import pdl, products
from dovetail_backends.kernels.triton.packed_integers import Words
from dovetail_backends.kernels.triton.packed_slots import PackedExpertWeights, of_slots, slot_tiles
from dovetail_backends.kernels.triton.peer_sum import PeerBuffers, peer_sum
from dovetail_backends.kernels.triton.router import routed
from dovetail_backends.triton.decode import DecodeScratch, decode_qkv

HIDDEN, INNER, HEADS, KV_HEADS, DIM, TOP_K, EPS = 2880, 2880, 64, 8, 64, 4, 1e-5
META = torch.device("meta")
Step = tuple[str, Callable[[], Any], int]
"""What it is for, what launches it, and bytes."""


def attended(heads: int, kv_heads: int) -> Callable[[], Any]:
    """Attention of one token from its projection, with sinks."""
    longs = {at: empty(1, dtype=torch.int64) for at in ("positions", "kv_slots", "rows", "seq_lens")}
    batch = ForwardBatch(
        num_decode=1, page_table=empty(1, 64, dtype=torch.int32), last_tokens=longs["rows"],
        q_starts=empty(2, dtype=torch.int32), seq_lens_cpu=[], q_lens_cpu=[], attention=None, **longs,
    )  # type: ignore[arg-type]  # fmt: skip
    sinks = empty(heads, dtype=torch.float32)
    layer = AttentionLayer(
        index=0, num_qo_heads=heads, num_kv_heads=kv_heads, qk_dim=DIM, v_dim=DIM, scale=DIM**-0.5, sinks=sinks
    )
    kv = empty(64, 2, 16, kv_heads, DIM)
    scratch, rope = DecodeScratch(heads, kv_heads, DIM, META), (empty(1, 1, DIM), empty(1, 1, DIM))
    qkv, out = empty(1, heads + 2 * kv_heads, DIM), empty(1, heads, DIM)
    return lambda: decode_qkv(qkv, None, rope, (kv[:, 0], kv[:, 1]), layer, batch, scratch, out)


def steps(num: int, ranks: int, context: int) -> Iterator[Step]:
    """A layer on one of so many ranks, from the stream to the stream."""
    heads, kv_heads, inner, x = HEADS // ranks, KV_HEADS // ranks, INNER // ranks, empty(1, HIDDEN)
    width, norm = (heads + 2 * kv_heads) * DIM, empty(HIDDEN)
    memory = PeerMemory.alone(0, ranks, PeerBuffers.num_bytes(ranks, 64, HIDDEN), META)
    peers = PeerBuffers.over(memory, 64, HIDDEN)
    summed: Step = ("sum over ranks, onto the stream", lambda: peer_sum(x, peers, x), 0)
    if ranks > 1:
        yield summed
    qkv, out = empty(width, HIDDEN), empty(HIDDEN, heads * DIM)
    yield "norm and qkv", lambda: products.norm_linear(x, norm, EPS, qkv, empty(width)), 2 * width * HIDDEN
    yield "attention", attended(heads, kv_heads), 2 * 2 * kv_heads * DIM * context
    given, bias = empty(1, heads * DIM), empty(HIDDEN)
    if ranks > 1:
        yield "out", lambda: products.linear(given, out, bias), out.numel() * 2
        yield summed
    else:
        yield "out, onto the stream", lambda: products.linear_add(given, out, bias, x), out.numel() * 2
    routing = Routing(num=num, top_k=TOP_K, score="chosen", bias=True)
    router, of_router = empty(num, HIDDEN), empty(num)
    yield (
        "norm, router, choice and integers",
        lambda: routed(x, RMSScale(norm, EPS), router, of_router, None, routing, scale=1.0, words=Words("mxfp4", True)),
        router.numel() * 2,
    )
    weights = PackedExpertWeights(
        weight_of("mxfp4", num, 2 * inner, HIDDEN), weight_of("mxfp4", num, HIDDEN, inner), empty(num, 2 * inner),
        empty(num, HIDDEN), 0, "clamped_silu_and_mul", False,
    )  # fmt: skip
    made: Any = routed(x, None, router, None, None, routing, scale=1.0, words=Words("mxfp4", True))
    yield (
        "experts, both halves",
        lambda: of_slots(
            x, made.ids, made.shares, weights, x if ranks == 1 else None, slot_tiles(weights, TOP_K), given=made.rows
        ),
        (weights.gate_up.num_bytes + weights.down.num_bytes) * TOP_K // num,
    )


@contextmanager
def noting() -> Iterator[list[tuple[str, int, int]]]:
    """Note launches instead of making them: kernel, programs, warps."""
    found: list[tuple[str, int, int]] = []

    def run(self: JITFunction[Any], *_: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del warmup
        found.append((self.fn.__name__, math.prod(grid), kwargs.get("num_warps", 4)))

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(pdl, "supported", return_value=True),
        mock.patch.object(Tensor, "is_cuda", property(lambda one: one.device.type == "meta")),
    ):
        yield found


def launches(num: int, ranks: int, context: int) -> list[tuple[str, str, int, int, int]]:
    """What for, kernel, programs, warps and bytes of each; bytes of several stand at the first."""
    listed = []
    with noting() as found:
        for text, run, size in steps(num, ranks, context):
            found.clear()
            run()
            listed += [(text, *one, 0 if place else size) for place, one in enumerate(found)]
    return listed


def main() -> None:
    """Print a table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--bandwidth", type=float, default=3.3)
    args = parser.parse_args()
    for ranks in args.ranks:
        listed = launches(args.experts, ranks, args.context)
        total = sum(size for *_, size in listed) / args.bandwidth / 1e6
        table = Table(title=f"{ranks} ranks: {len(listed)} launches, {total:.1f} us of reads")
        for name in ("for", "kernel", "programs", "warps", "MB", "us"):
            table.add_column(name)
        for text, kernel, programs, warps, size in listed:
            numbers = programs, warps, f"{size / 1e6:.2f}", f"{size / args.bandwidth / 1e6:.2f}"
            table.add_row(text, kernel, *map(str, numbers))
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
