"""Tunes the one-row product for shapes of weights: `python tests/benchmarks/gemv_tiles.py FOLDER… [--ranks N]`.

Needs a GPU. The shapes are those of the dense layers that a rank of N holds of each folder's `config.json`; or give
`NxK`, with a `g` behind it for gate and up. Weights are cold: as many are walked over in a captured graph as the
device's cache cannot hold. `--compile I OF` only compiles a share of the tiles, to do that in several processes before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from pathlib import Path

import torch
import triton
from expert_tiles import BANDWIDTH, graph_us
from torch import Tensor

from dovetail_backends.kernels.triton.gemv import best_tile, gemv

COLD_BYTES = 1 << 30
"""Of weights in a graph."""
Shape = tuple[int, int, bool]
Tile = tuple[int, int, int]


def shapes_of(given: str, ranks: int) -> list[Shape]:
    """Weights `[N, K]` of a layer and of the head on one rank, and whether they are gate and up."""
    if match := re.fullmatch(r"(\d+)x(\d+)(g?)", given):
        return [(int(match[1]), int(match[2]), bool(match[3]))]
    config = json.loads((Path(given) / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    kv_heads = max(1, config.get("num_key_value_heads", heads) // ranks)
    found = [((heads // ranks + 2 * kv_heads) * width, hidden, False), (hidden, heads // ranks * width, False)]
    if not any(name in config for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        inner = config["intermediate_size"] // ranks
        found += [(2 * inner, hidden, True), (hidden, inner, False)]
    return [*found, (config["vocab_size"] // ranks, hidden, False)]


def candidates(n: int, k: int, gate: bool) -> list[Tile]:
    """Tiles with 4 to 64 numbers a thread, and enough programs for the device."""
    found = []
    for block_n, block_k, warps in itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096), (1, 2, 4, 8, 16)):
        numbers = block_n * block_k * (1 + gate) // (32 * warps)
        if block_k < 2 * k and 8 <= numbers <= 128 and n // (1 + gate) // block_n >= 132:
            found.append((block_n, block_k, warps))
    return found


def time_us(weights: list[Tensor], x: Tensor, gate: bool, tile: Tile) -> float:
    """Median microseconds of a product, in a graph that walks over all weights."""
    return graph_us(lambda: [gemv(x, weight, None, gate=gate, tile=tile) for weight in weights]) / len(weights)


def main() -> None:
    """Tune all shapes, each once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", metavar="FOLDER|NxK[g]")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--compile", nargs=2, type=int, metavar=("I", "OF"))
    parser.add_argument("--json", type=Path)
    wish = parser.parse_args()
    shapes = list(dict.fromkeys(shape for given in wish.what for shape in shapes_of(given, wish.ranks)))
    if wish.compile is not None:
        jobs = [(shape, tile) for shape in shapes for tile in candidates(*shape)]
        for (n, k, gate), tile in jobs[wish.compile[0] :: wish.compile[1]]:
            x, weight = (torch.zeros(rows, k, dtype=torch.bfloat16, device="cuda") for rows in (1, n))
            gemv(x, weight, None, gate=gate, tile=tile)
        return
    best: dict[str, Tile] = {}
    for n, k, gate in shapes:
        count = max(2, min(64, COLD_BYTES // (2 * n * k)))
        weights = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
        x = torch.randn(1, k, dtype=torch.bfloat16, device="cuda")
        now = time_us(weights, x, gate, best_tile(n, k, gate=gate))
        timed = sorted((time_us(weights, x, gate, tile), tile) for tile in candidates(n, k, gate))
        took, tile = min((time_us(weights, x, gate, tile), tile) for _, tile in timed[:3])
        whole = (tile[0] * 2, *tile[1:]) if gate else tile
        best[f"{n},{k}"] = whole
        floor = 1e6 * 2 * n * k / BANDWIDTH
        print(f"({n}, {k}){' gate' * gate}: {whole}  {took:.1f} us, {floor / took:.0%} of bandwidth; now {now:.1f}")
        del weights
    if wish.json is not None:
        wish.json.write_text(json.dumps(best))
    print(f"triton {triton.__version__}, {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
