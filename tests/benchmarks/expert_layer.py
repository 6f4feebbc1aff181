"""What a layer of experts takes for a few tokens, from the stream to the stream, by how its steps are put together.

    python tests/benchmarks/expert_layer.py [--models gpt-oss-20b …] [--tokens 1 4 8] [--rounds 2] [--tiles]

Needs a GPU. gpt-oss' experts in mxfp4 with biases, and a router that chooses by random weights: a CUDA graph goes
through layers that the cache cannot hold, and each way is timed in turns with the others. `apart` is a kernel for every
step (norm, logits, choice, integers, gated half, integers, other half with the residual); `router`, which layers use,
has norm, logits, choice and first integers in one. First comes the router alone, for 32 experts and 128; `--tiles`
tries other tiles, each compiled for seconds. Printed: microseconds a layer, launches, and the difference from the first
way. `gpt-oss-20b-half` is one of two ranks' share.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from quant_experts import MODELS, experts
from quant_products import BANDWIDTH, graph_us, relative
from torch import Tensor

from dovetail.contracts.layers import RMSScale
from dovetail.sdk.layers.routing import Routing
from dovetail_backends.kernels.triton import norms, products
from dovetail_backends.kernels.triton.packed_integers import Words
from dovetail_backends.kernels.triton.packed_slots import PackedExpertWeights, PackedSlotTiles, of_slots, slot_tiles
from dovetail_backends.kernels.triton.route import route
from dovetail_backends.kernels.triton.router import routed

EPS = 1e-5
LAYERS = 8
HIDDEN, EXPERTS, COPIES = 2880, (32, 128), 64
"""Of routers alone: their inputs, how many they choose among, and how many a graph goes through."""
ROUTER_TILES = ((1, 4096, 2), (1, 4096, 8), (1, 1024, 1), (2, 1024, 2), (2, 4096, 4))
GATE_TILES = ((8, 1024, 1), (2, 1024, 1), (4, 512, 1), (8, 1024, 2))
DOWN_TILES = ((2, 512, 1), (2, 1024, 1), (1, 512, 1), (4, 512, 1), (2, 256, 1), (4, 512, 2))


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights."""

    norm: RMSScale
    router: Tensor
    bias: Tensor
    routing: Routing
    experts: PackedExpertWeights


def layer_of(name: str) -> Layer:
    """Random weights."""
    kind, num, top_k, hidden, inner, act = MODELS[name]
    biases = (torch.randn(num, size, device="cuda").bfloat16() for size in (2 * inner, hidden))
    return Layer(
        RMSScale(torch.rand(hidden, device="cuda").bfloat16() + 0.5, EPS), drawn_router(num, hidden),
        torch.randn(num, device="cuda").bfloat16(), Routing(num=num, top_k=top_k, score="chosen", bias=True),
        PackedExpertWeights(*experts(kind, num, hidden, inner), *biases, 0, act, False),
    )  # fmt: skip


def drawn_router(num: int, hidden: int) -> Tensor:
    """Random weights of a router."""
    return torch.randn(num, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5


def chosen_by_steps(x: Tensor, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Normed tokens, ids and shares, in three kernels."""
    rows = norms.rms_norm(x, layer.norm.weight, EPS)
    logits = products.linear(rows, layer.router, layer.bias)
    return rows, *route(logits, None, 1.0, routing=layer.routing, dtype=x.dtype)


def layer_output(x: Tensor, layer: Layer, *, in_one: bool, tiles: PackedSlotTiles, router_tile: Any = None) -> Tensor:
    """The stream behind a layer."""
    of = layer.experts
    if not in_one:
        rows, ids, shares = chosen_by_steps(x, layer)
        return of_slots(rows, ids, shares, of, x, tiles)
    found = routed(
        x, layer.norm, layer.router, layer.bias, None, layer.routing, scale=1.0, words=Words(of.gate_up.kind, True),
        tile=router_tile,
    )  # fmt: skip
    return of_slots(x, found.ids, found.shares, of, x, tiles, given=found.rows)  # type: ignore[arg-type]


def ways(layer: Layer, tokens: int, *, has_tiles: bool) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """What each is called, its launches, and arguments of `layer_output`."""
    usual = slot_tiles(layer.experts, tokens * layer.routing.top_k)
    yield "apart", 7, {"in_one": False, "tiles": usual}
    yield "router", 4, {"in_one": True, "tiles": usual}
    if not has_tiles:
        return
    for tile in ROUTER_TILES:
        yield f"router {tile}", 4, {"in_one": True, "tiles": usual, "router_tile": tile}
    for tile in GATE_TILES:
        yield f"router, gate {tile}", 4, {"in_one": True, "tiles": replace(usual, gate_up=tile)}
    for tile in DOWN_TILES:
        yield f"router, down {tile}", 4, {"in_one": True, "tiles": replace(usual, down=tile)}


def in_turns(runs: list[Callable[[], Any]], rounds: int) -> list[float]:
    """The least of each one's medians."""
    times = [[graph_us(run) for run in runs] for _ in range(rounds)]
    return [min(of_one) for of_one in zip(*times, strict=True)]


def timed(name: str, tokens: int, layers: list[Layer], rounds: int, *, has_tiles: bool) -> Iterator[str]:
    """A line for each way."""
    x = torch.randn(tokens, MODELS[name][3], device="cuda").bfloat16()
    known = list(ways(layers[0], tokens, has_tiles=has_tiles))

    def through(**way: Any) -> list[Tensor]:
        return [layer_output(x, layer, **way) for layer in layers]

    times = in_turns([partial(through, **way) for _, _, way in known], rounds)
    want = through(**known[0][2])
    read = sum(len(chosen_by_steps(x, layer)[1].unique()) for layer in layers) / len(layers) / MODELS[name][1]
    floor = read * (layers[0].experts.gate_up.num_bytes + layers[0].experts.down.num_bytes) / BANDWIDTH * 1e6
    for (text, launches, way), took in zip(known, times, strict=True):
        off = max(relative(found - x, right - x) for found, right in zip(through(**way), want, strict=True))
        yield f"{name} {tokens} tokens, {text}: {took / len(layers):.1f} us, {launches} launches, off {off:.0e}"
    yield f"{name} {tokens} tokens: its experts are read in {floor:.1f} us at {BANDWIDTH / 1e12:.2f} TB/s"


def routers(rounds: int, *, has_tiles: bool) -> Iterator[str]:
    """A line for each number of experts and way of its router."""
    x, words = torch.randn(1, HIDDEN, device="cuda").bfloat16(), Words("mxfp4", True)
    for num in EXPERTS:
        norm = RMSScale(torch.ones(HIDDEN, device="cuda").bfloat16(), EPS)
        routing, none = Routing(num=num, top_k=4, score="chosen", bias=True), torch.zeros(num, device="cuda").bfloat16()
        weights = [drawn_router(num, HIDDEN) for _ in range(COPIES)]

        def by_steps(weights: Any = weights, norm: Any = norm, none: Any = none, routing: Any = routing) -> None:
            for weight in weights:
                logits = products.linear(norms.rms_norm(x, norm.weight, EPS), weight, none)
                route(logits, None, 1.0, routing=routing, dtype=x.dtype)

        def at_once(
            tile: Any = None, weights: Any = weights, norm: Any = norm, none: Any = none, routing: Any = routing
        ) -> None:
            for weight in weights:
                routed(x, norm, weight, none, None, routing, scale=1.0, words=words, tile=tile)

        tiles: list[Any] = [None, *(ROUTER_TILES if has_tiles else ())]
        times = in_turns([by_steps, *(partial(at_once, tile) for tile in tiles)], rounds)
        for text, took in zip(("norm, logits, choice", *(f"in one {tile}" for tile in tiles)), times, strict=True):
            yield f"router of {num}, {text}: {took / len(weights):.2f} us"


def main() -> None:
    """Measure, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    possible = [name for name, (kind, *_) in MODELS.items() if kind == "mxfp4"]
    parser.add_argument("--models", nargs="*", default=possible, choices=possible)
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiles", action="store_true")
    args = parser.parse_args()
    for line in routers(args.rounds, has_tiles=args.tiles):
        print(line, flush=True)
    for name in args.models:
        layers = [layer_of(name) for _ in range(LAYERS)]
        for tokens in args.tokens:
            for line in timed(name, tokens, layers, args.rounds, has_tiles=args.tiles):
                print(line, flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
