"""Tunes the few-rows matrix kernel: best tile by shape beside cuBLAS, cold weights, in a CUDA graph (needs a GPU)."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.layers.ops.skinny import Tile, skinny

SHAPES = {
    "0.5B": [(1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896)],
    "0.6B": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
    "8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
}
COLD_BYTES = 256 << 20
"""Weights rotated through between two uses of the same one: several times the L2 cache."""


def graph_us(calls: list[Callable[[], object]]) -> float:
    """Median microseconds of one call, all of them captured in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / len(calls))
    return statistics.median(times[2:])


def tune(n: int, k: int, rows: int) -> str:
    """One line for a shape."""
    copies = max(2, min(48, COLD_BYTES // (2 * n * k)))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    best: tuple[float, Tile] | None = None
    for tile in itertools.product((16, 32, 64), (64, 128, 256), (2, 4), (3, 5), (1, 2, 4)):
        if (tile[0] + 16) * tile[1] * 2 * tile[3] > 160 * 1024:
            continue
        want = F.linear(x.float(), weights[0].float())
        error = (skinny(x, weights[0], None, tile).float() - want).norm() / want.norm()
        if error > 1e-2:
            raise RuntimeError(f"{n}x{k} {tile}: relative error {error:.1e}")

        def call(weight: Tensor, tile: Tile = tile) -> Callable[[], object]:
            return lambda: skinny(x, weight, None, tile)

        took = graph_us([call(w) for w in weights])
        if best is None or took < best[0]:
            best = (took, tile)
    cublas = graph_us([lambda w=w: F.linear(x, w) for w in weights])  # type: ignore[misc]
    if best is None:
        raise RuntimeError("no tile fits")
    floor = 2 * n * k / 4.24e6
    return f"{n}x{k} rows {rows}: {best[0]:.2f} us {best[1]}, cuBLAS {cublas:.2f}, floor {floor:.2f}"


def main() -> int:
    """Tune what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[16])
    args = parser.parse_args()
    for model in args.models:
        for (n, k), rows in itertools.product(SHAPES[model], args.rows):
            print(model, tune(n, k, rows), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
