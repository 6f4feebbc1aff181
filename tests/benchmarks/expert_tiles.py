"""Which tiles are fastest for a model's experts, and how far from the bandwidth they are.

    python tests/benchmarks/expert_tiles.py [--shape E,K,H,I …] [--tokens 1 4 16 64 256] [--seconds 60]

Each candidate runs in a CUDA graph over as many copies of the weights as the L2 cache cannot hold, ids drawn at random.
Printed beside the best tiles: microseconds a layer, the share of the copy bandwidth that the experts which are read
would take, and what torch's grouped product takes for the same.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dovetail.contracts.layers import BuildContext, ExpertsSpec
from dovetail.sdk.layers.experts import GatedExperts
from dovetail.sdk.layers.plain import PLAIN
from dovetail_backends.kernels.triton.experts import (
    MAX_SLOTS,
    ExpertWeights,
    SlotTiles,
    SortedTiles,
    few,
    many,
    slot_tiles,
    sorted_tiles,
)

SHAPES = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "DeepSeek-V2-Lite": (64, 6, 2048, 1408),
    "gpt-oss-20b": (32, 4, 2880, 2880),
}
BANDWIDTH = 4.18e12
NUM_REPLAYS = 7
SLOT = (1, 1024, 4)


def graph_us(run: Callable[[], Any]) -> float:
    """Median time of a graph of `run`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still be filling what `run` reads
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    times = []
    for _ in range(NUM_REPLAYS):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def slot_candidates() -> Iterator[SlotTiles]:
    """Tiles of the one kernel, then of the other, beside the usual ones."""
    for tile in itertools.product((1, 2, 4), (512, 1024, 2048), (2, 4, 8)):
        yield SlotTiles(tile, SLOT)
    for tile in itertools.product((1, 2, 4), (256, 512, 1024), (2, 4, 8)):
        yield SlotTiles(SLOT, tile)


def sorted_candidates(rows: int) -> Iterator[SortedTiles]:
    """As `slot_candidates`."""
    blocks = (16,) if rows <= 12 else (16, 32, 64) if rows <= 48 else (64, 128)
    for block_m in blocks:
        usual = (64, 64, 4, 4)
        for tile in itertools.product((32, 64, 128), (64, 128, 256), (4, 8), (3, 4)):
            if tile[0] == 64 and tile[2] == 8 and tile[3] == 4:
                continue  # see `skinny.TILES`
            yield SortedTiles(block_m, tile, usual)
            yield SortedTiles(block_m, usual, tile)


def measured(run: Callable[[Any, int], Tensor], tiles: Any, layers: int) -> float | None:
    """Microseconds a layer, or None where the tiles do not fit."""
    try:
        return graph_us(lambda: [run(tiles, layer) for layer in range(layers)]) / layers
    except Exception as error:
        if "out of resource" not in str(error) and "shape" not in str(error):
            raise
        return None


def best_of(run: Callable[[Any, int], Tensor], candidates: Iterator[Any], layers: int, until: float) -> Any:
    """The best tile of each kernel among those tried until the time is over."""
    found: dict[Any, tuple[float, Any]] = {}
    usual: Any = None
    for tiles in candidates:
        if time.perf_counter() > until:
            break
        took = measured(run, tiles, layers)
        if took is None:
            continue
        block_m = getattr(tiles, "block_m", 0)
        usual = SlotTiles(SLOT, SLOT) if not block_m else SortedTiles(block_m, (64, 64, 4, 4), (64, 64, 4, 4))
        part = "gate_up" if tiles.gate_up != usual.gate_up else "down"
        found[block_m, part] = min(found.get((block_m, part), (1e9, None)), (took, getattr(tiles, part)))
    best = []
    for block_m in {key[0] for key in found}:
        up, down = (found.get((block_m, part), (1e9, None))[1] for part in ("gate_up", "down"))
        if up and down:
            tiles = SortedTiles(block_m, up, down) if block_m else SlotTiles(up, down)
            best.append((measured(run, tiles, layers) or 1e9, tiles))
    return min(best, key=lambda one: one[0]) if best else (float("nan"), None)


class Load:
    """Experts of several layers, and tokens for them.

    Attributes:
        layers: As a model has them.
        of: The same as the kernels take them.
    """

    def __init__(self, num: int, top_k: int, hidden: int, inner: int, num_layers: int) -> None:
        ctx = BuildContext(device=torch.device("cuda"), dtype=torch.bfloat16, factory=PLAIN)
        self.num, self.top_k, self.hidden, self.inner = num, top_k, hidden, inner
        self.layers: list[Any] = []
        for _ in range(num_layers):
            widths = {"num": num, "top_k": top_k, "hidden": hidden, "inner": inner}
            made = GatedExperts(ctx, ExpertsSpec(path="x", act="silu_and_mul", **widths))
            for param in made.parameters():
                param.data.normal_(0, 0.02)
            self.layers.append(made)
        self.of = [
            ExpertWeights(one.gate_up.weight, one.down.weight, None, None, 0, "silu_and_mul", False)
            for one in self.layers
        ]

    def draw(self, num_tokens: int) -> None:
        """Make tokens, and let each choose at random."""
        self.x = torch.randn(num_tokens, self.hidden, device="cuda", dtype=torch.bfloat16)
        self.ids = [torch.rand(num_tokens, self.num, device="cuda").topk(self.top_k).indices for _ in self.layers]
        self.shares = torch.full((num_tokens, self.top_k), 1 / self.top_k, device="cuda", dtype=torch.bfloat16)

    def floor_us(self) -> float:
        """What reading the chosen experts takes."""
        read = sum(len(ids.unique()) for ids in self.ids) / len(self.ids)
        return 1e6 * read * 3 * self.inner * self.hidden * 2 / BANDWIDTH

    def torch_us(self) -> float:
        """Torch's grouped product, a layer."""
        pairs = list(zip(self.layers, self.ids, strict=True))
        return graph_us(lambda: [layer._grouped(self.x, ids, self.shares) for layer, ids in pairs]) / len(pairs)

    def row(self, shape: str, function: Any, seconds: float) -> list[str]:
        """Measure what is set and candidates."""

        def run(tiles: Any, layer: int) -> Tensor:
            found: Tensor = function(self.x, self.ids[layer], self.shares, self.of[layer], self.x, tiles)
            return found

        num_slots, is_few = self.ids[0].numel(), function is few
        usual = slot_tiles(self.of[0]) if is_few else sorted_tiles(len(self.of[0].down), num_slots)
        candidates = slot_candidates() if is_few else sorted_candidates(num_slots // self.num)
        as_set = measured(run, usual, len(self.layers)) or float("nan")
        us, tiles = best_of(run, candidates, len(self.layers), time.perf_counter() + seconds)
        share = f"{100 * self.floor_us() / min(us, as_set):.0f} %"
        way, name = "few" if is_few else "many", str(tiles).replace("Tiles", "")
        return [shape, str(len(self.x)), way, f"{as_set:.1f}", f"{us:.1f}", share, f"{self.torch_us():.1f}", name]


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 4, 8, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=20, help="for each row")
    parser.add_argument("--layers", type=int, default=6)
    args = parser.parse_args()
    table = Table("shape", "tokens", "way", "as set, us", "best, us", "of bandwidth", "torch, us", "best tiles")
    for shape in args.shape:
        num, top_k, hidden, inner = SHAPES[shape] if shape in SHAPES else (int(n) for n in shape.split(","))
        load = Load(num, top_k, hidden, inner, args.layers)
        for num_tokens in args.tokens:
            load.draw(num_tokens)
            if num_tokens * top_k <= MAX_SLOTS:
                table.add_row(*load.row(shape, few, args.seconds))
            if num_tokens > 1:
                table.add_row(*load.row(shape, many, args.seconds))
        del load
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
