"""How fast experts with packed weights are.

    python tests/benchmarks/quant_experts.py [--tokens 1 64 …] [--seconds 40]

Needs a GPU. What is to be measured is compiled before, by several processes, which takes about as long again. For
gpt-oss-20b's experts in mxfp4 and Qwen3-30B-A3B's in fp8, with ids drawn at random: microseconds a layer with the usual
tiles and the best of some others, the share of the copy bandwidth that the experts which are read would take, the error
against written-out weights, and what these take in bfloat16. `--models gpt-oss-20b-half` is one of two ranks' share.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from quant_products import BANDWIDTH, CACHE_BYTES, FORMS, PROCESSES, drawn, graph_us, relative

from dovetail_backends.kernels.triton.experts import ExpertWeights, gated_experts
from dovetail_backends.kernels.triton.packed_experts import ExpertTiles, expert_tiles, packed_gated_experts
from dovetail_backends.kernels.triton.packed_slots import PackedExpertWeights, PackedSlotTiles, slot_tiles
from dovetail_backends.kernels.triton.packed_weight import PackedWeight, stacked
from dovetail_backends.kernels.triton.packed_write import written

DRAWS = 6
"""Choices of experts that a graph goes through."""
MODELS: dict[str, tuple[str, int, int, int, int, Any]] = {
    "gpt-oss-20b": ("mxfp4", 32, 4, 2880, 2880, "clamped_silu_and_mul"),
    "Qwen3-30B-A3B": ("fp8-blocks", 128, 8, 2048, 768, "silu_and_mul"),
    "gpt-oss-20b-half": ("mxfp4", 32, 4, 2880, 1440, "clamped_silu_and_mul"),
    "Qwen3-30B-A3B-half": ("fp8-blocks", 128, 8, 2048, 384, "silu_and_mul"),
}
SLOT_TILES = {
    "scaled": (
        ((2, 2048, 4), (4, 1024, 2), (4, 1024, 4), (8, 1024, 4), (4, 512, 2)),
        ((2, 256, 4), (4, 256, 4), (8, 256, 8), (2, 1024, 8), (1, 1024, 4)),
    ),
    "words": (
        ((2, 1024, 1), (8, 1024, 1), (4, 2048, 2), (8, 2048, 2), (4, 4096, 4), (16, 1024, 4)),
        (
            (2, 512, 1),
            (4, 512, 1),
            (2, 256, 1),
            (2, 1024, 1),
            (4, 1024, 1),
            (1, 2048, 2),
            (2, 2048, 2),
            (1, 4096, 4),
            (4, 1024, 4),
        ),
    ),
}
"""Beside the usual ones, of either kernel."""


def experts(kind: str, num: int, hidden: int, inner: int) -> tuple[PackedWeight, PackedWeight]:
    """Random matrices."""
    form = FORMS[kind]
    return (
        stacked(drawn(form, 2 * inner, hidden) for _ in range(num)),
        stacked(drawn(form, hidden, inner) for _ in range(num)),
    )


def part_of(weight: PackedWeight, expert: int) -> PackedWeight:
    """One expert's matrix."""
    names = ("numbers", "scale", "offset", "row_scale")
    parts = [None if getattr(weight, name) is None else getattr(weight, name)[expert] for name in names]
    return PackedWeight(weight.kind, *parts, weight.group, weight.num_out, weight.num_in)  # type: ignore[arg-type]


def plain_of(weight: PackedWeight) -> torch.Tensor:
    """All experts' matrices in bfloat16."""
    return torch.stack([written(part_of(weight, expert), torch.bfloat16) for expert in range(len(weight.numbers))])


def others(kind: str, rows: int) -> list[ExpertTiles]:
    """Tiles beside the usual ones for so many rows of an expert."""
    depths = (64, 128) if kind.startswith("fp8") else (128, 256)
    block_ms = (16,) if rows <= 8 else (16, 32) if rows <= 16 else (32, 64) if rows <= 32 else (64, 128)
    found = []
    for block_m, (block_n, warps), depth, stages in itertools.product(block_ms, ((128, 8), (64, 4)), depths, (4, 3)):
        if block_m * block_n <= 2048 * warps:
            found.append(ExpertTiles(block_m, *2 * ((block_n, depth, warps, stages),)))
    return found


def ways(weights: PackedExpertWeights, kind: str, num_slots: int) -> list[Any]:
    """Arguments of `packed_gated_experts`: what it chooses, then others."""
    found: list[Any] = [{}, {"is_written": True, "is_few": False}]
    if num_slots <= 64:
        usual = slot_tiles(weights, num_slots)
        gates, downs = SLOT_TILES["scaled" if weights.gate_up.kind == "scaled" else "words"]
        found += [{"is_few": True, "tiles": usual}]
        found += [{"is_few": True, "tiles": PackedSlotTiles(one, usual.down)} for one in gates]
        found += [{"is_few": True, "tiles": PackedSlotTiles(usual.gate_up, one)} for one in downs]
    tiles = (expert_tiles(weights, num_slots), *others(kind, num_slots // len(weights.gate_up.numbers)))
    found += [{"is_few": False, "is_written": False, "tiles": one} for one in tiles]
    return found


def layers_of(name: str, copies: int) -> list[PackedExpertWeights]:
    """So many layers of a model."""
    kind, num, _, hidden, inner, act = MODELS[name]
    return [PackedExpertWeights(*experts(kind, num, hidden, inner), None, None, 0, act, False) for _ in range(copies)]


def drawn_tokens(name: str, tokens: int, draws: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Tokens, experts that are chosen for them in each draw, and shares."""
    _, num, top_k, hidden, _, _ = MODELS[name]
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    ids = [torch.rand(tokens, num, device="cuda").topk(top_k).indices for _ in range(draws)]
    return x, ids, torch.full((tokens, top_k), 1 / top_k, device="cuda", dtype=torch.bfloat16)


def is_too_large(error: Exception) -> bool:
    """Whether a tile does not fit into shared memory."""
    return "out of resource" in str(error)


def compile_share(args: argparse.Namespace) -> None:
    """Run each way of one share once."""
    index, count = args.compile
    place = 0
    for name in args.models:
        layer = layers_of(name, 1)[0]
        for tokens in args.tokens:
            x, ids, shares = drawn_tokens(name, tokens, 1)
            for way in ways(layer, MODELS[name][0], ids[0].numel()):
                place += 1
                if place % count == index:
                    try:
                        packed_gated_experts(x, ids[0], shares, layer, x, **way)
                    except Exception as error:
                        if not is_too_large(error):
                            raise
    torch.cuda.synchronize()


def timed(args: argparse.Namespace, name: str, layers: list[PackedExpertWeights]) -> Iterator[str]:
    """A line for each number of tokens, within a model's share of the time."""
    kind, num, _, _, _, act = MODELS[name]
    until = time.perf_counter() + args.seconds / len(args.models)
    layer_bytes = layers[0].gate_up.num_bytes + layers[0].down.num_bytes
    plain = ExpertWeights(plain_of(layers[0].gate_up), plain_of(layers[0].down), None, None, 0, act, False)
    for place, tokens in enumerate(args.tokens):
        x, ids, shares = drawn_tokens(name, tokens, DRAWS)

        def run(x: Any = x, ids: Any = ids, shares: Any = shares, **way: Any) -> None:
            for at, one in enumerate(ids):
                packed_gated_experts(x, one, shares, layers[at % len(layers)], x, **way)

        times: list[tuple[float, Any]] = []
        limit = time.perf_counter() + (until - time.perf_counter()) / (len(args.tokens) - place)
        for way in ways(layers[0], kind, ids[0].numel()):
            if time.perf_counter() > limit and len(times) > 1:
                break
            try:
                times.append((graph_us(partial(run, **way)) / len(ids), way))
            except Exception as error:
                if not is_too_large(error):
                    raise
        usual, best = times[0], min(times, key=lambda one: one[0])
        written_us = next((took for took, way in times if way.get("is_written")), float("nan"))
        bf16 = graph_us(lambda: [gated_experts(x, one, shares, plain, x) for one in ids]) / len(ids)  # noqa: B023
        want = gated_experts(x, ids[0], shares, plain, torch.zeros_like(x))
        found = packed_gated_experts(x, ids[0], shares, layers[0], torch.zeros_like(x))
        read = sum(len(one.unique()) for one in ids) / len(ids) / num * layer_bytes
        yield (
            f"{name} {kind} {tokens} tokens: usual {usual[0]:.1f} us, written {written_us:.1f}, best {best[0]:.1f} "
            f"({read / BANDWIDTH * 1e6 / best[0]:.0%}), bf16 {bf16:.1f}, error {relative(found, want):.0e}, "
            f"{len(times)} tried, {best[1]}"
        )


def main() -> None:
    """Compile, then measure, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8, 64, 1024])
    whole = [name for name in MODELS if not name.endswith("-half")]
    parser.add_argument("--models", nargs="*", default=whole, choices=list(MODELS))
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--compile", nargs=2, type=int, help="which share of how many, for a process of this script")
    args = parser.parse_args()
    if args.compile:
        return compile_share(args)
    begin = time.perf_counter()
    shares = [[sys.executable, *sys.argv, "--compile", str(index), str(PROCESSES)] for index in range(PROCESSES)]
    codes = [process.wait() for process in [subprocess.Popen(share) for share in shares]]
    print(f"compiled in {time.perf_counter() - begin:.0f} s {[code for code in codes if code]}", flush=True)
    for name in args.models:
        first = layers_of(name, 1)
        layer_bytes = first[0].gate_up.num_bytes + first[0].down.num_bytes
        for line in timed(args, name, [*first, *layers_of(name, CACHE_BYTES // layer_bytes)]):
            print(line, flush=True)
    return None


if __name__ == "__main__":
    with torch.inference_mode():
        main()
