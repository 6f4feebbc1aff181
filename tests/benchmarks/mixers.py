"""Kernels of Gated DeltaNet on a GPU: time, and share of what moving their bytes at the measured copy rate would take.

    python tests/benchmarks/mixers.py [--rows 1 16 64 256] [--requests 1 8 64] [--tokens 16384] [--state float16]

With `--tiles`, a call for each place: `--rows 64 --requests` tries 12 tiles of the decode step, `--rows --requests 1`
ten of the fold. The compiler takes 1 to 3 s for each.

Shapes: a layer of Qwen3.5-9B and 35B-A3B (16 key heads, 32 value heads, 128 wide, 4 taps), in bfloat16. A decode step
reads and writes each row's state once; a prompt's floor is that of its inputs and outputs. Several sets of rows take
turns, so that no state is left in the cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from dovetail_backends.kernels.triton import delta, delta_pieces
from dovetail_testing.conformance.kernels_mixers import MixerRequests, Weights

KEYS, PER_KEY, DIM, WIDTH, TAPS = 16, 2, 128, 128, 4
HEADS, CHANNELS = KEYS * PER_KEY, 2 * KEYS * DIM + KEYS * PER_KEY * WIDTH
SETS = 4
CUDA = torch.device("cuda")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, device="cuda").to(dtype)


def graph_us(calls: list[Callable[[], Any]]) -> float:
    """Median time of a call in microseconds, in a graph that makes each in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _, call in itertools.product(range(4), calls):
            call()
    found: float = triton.testing.do_bench(graph.replay, warmup=50, rep=300, return_mode="median")
    return 1000 * found / (4 * len(calls))


def kernels_of(run: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """Return each kernel of Triton that a call launches, by name: launched alone, with the operands that it had."""
    found: dict[str, Callable[[], Any]] = {}
    launch = JITFunction.run

    def keep(self: JITFunction[Any], *args: Any, **kwargs: Any) -> Any:
        found[self.fn.__name__] = lambda: launch(self, *args, **kwargs)
        return launch(self, *args, **kwargs)

    with mock.patch.object(JITFunction, "run", keep):
        run()
    return found


def copy_rate() -> float:
    """Bytes a microsecond, read and written, of a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    found: float = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * source.numel() / (1000 * found)


def inputs(num: int) -> tuple[list[Tensor], list[Tensor]]:
    """What the projections make of tokens: queries, keys, values, gates; rates and decays. Views, as in a model."""
    heads = draw(num, CHANNELS + HEADS * WIDTH).split([KEYS * DIM] * 2 + [HEADS * WIDTH] * 2, 1)
    gates = draw(num, 2 * HEADS).split([HEADS] * 2, 1)
    return [one.unflatten(1, (KEYS, -1)) for one in heads], [one.unflatten(1, (KEYS, -1)) for one in gates]


def decode(num: int, kept: torch.dtype = torch.float32) -> Callable[[], float]:
    """A layer's decode step of so many rows, whose states are kept in a dtype."""
    weight, norm = draw(CHANNELS, TAPS), draw(WIDTH)
    weights = Weights.draw(HEADS, torch.Generator().manual_seed(1), CUDA)
    total = max(SETS * num, 64)
    rings, states = draw(total, TAPS, CHANNELS), draw(total, HEADS, DIM, WIDTH, dtype=kept)
    order, (heads, gates) = torch.randperm(total, device="cuda"), inputs(num)
    positions = torch.randint(99, 9999, (num,), device="cuda")

    def call(rows: Tensor) -> Callable[[], Tensor]:
        return lambda: delta.gdn_decode(
            *heads, *gates, rows, positions, weight, *weights, norm, 1e-6, rings, states
        )  # fmt: skip

    calls = [call(order[first : first + num].clone()) for first in range(0, total - num + 1, num)][:64]
    torch.cuda.synchronize()  # kernels read rows before they wait for what comes right before them
    return lambda: graph_us(calls)


def decode_bytes(num: int, item: int = 4) -> int:
    """What a step must move: states and rings twice, inputs, outputs."""
    ring = 2 * CHANNELS * (TAPS - 1 + 1)
    return num * (2 * item * HEADS * DIM * WIDTH + ring + 2 * (CHANNELS + 2 * HEADS * WIDTH + 2 * HEADS))


def prompt(num: int, requests: int) -> dict[str, Callable[[], float]]:
    """A layer's kernels for prompts of so many tokens in all."""
    (q, k, v, z), (b, a) = inputs(num)
    weight, norm, x = draw(CHANNELS, TAPS), draw(WIDTH), draw(num, CHANNELS)
    weights = Weights.draw(HEADS, torch.Generator().manual_seed(1), CUDA)
    given = MixerRequests([num // requests] * requests, [0] * requests, CUDA, requests + 2, saves=False)
    rings = [draw(size, TAPS, CHANNELS) for size in (requests + 2, 2)]
    states = [draw(size, HEADS, DIM, WIDTH, dtype=torch.float32) for size in (requests + 2, 2)]
    read, gate = draw(num, HEADS, WIDTH), z.reshape(num, HEADS, WIDTH)
    return {
        "convolution": lambda: graph_us(
            [lambda: delta_pieces.conv_qkv(q, k, v, weight, None, given.pieces.lens, *given.plan(), *rings)]
        ),
        "fold": lambda: graph_us([lambda: delta_pieces.gdn_prefill(x, b, a, *weights, *given.plan(), *states)]),
        "fold by token": lambda: graph_us(
            [lambda: delta.gdn_prefill_by_token(x, b, a, *weights, *given.plan(), *states)]
        ),
        "gated norm": lambda: graph_us([lambda: delta.gated_rms_norm(read, gate, norm, 1e-6)]),
    }


def prompt_bytes(num: int) -> dict[str, int]:
    """What kernels of a prompt must move, inputs and outputs, where these are all that they do."""
    return {"convolution": num * 2 * 2 * CHANNELS, "gated norm": num * 3 * 2 * HEADS * WIDTH}


def main() -> None:
    """Print a line for each figure, as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--tiles", action="store_true", help="try other blocks, warps and stages, too")
    parser.add_argument("--state", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path)
    args, rate, found = parser.parse_args(), copy_rate(), []
    name, kept = torch.cuda.get_device_name(), getattr(torch, args.state)
    print(f"{name}, copies at {rate / 1e6:.2f} TB/s; us a layer; states in {args.state}", flush=True)
    tiles = [(block, warps) for block in (16, 32, 64) for warps in (1, 2, 4, 8)] if args.tiles else [None]
    for num, tile in itertools.product(args.rows, tiles):
        own = delta.tile if tile is None else lambda dim, width, t=tile: (triton.next_power_of_2(dim), *t)
        with mock.patch.object(delta, "tile", own):
            took, floor = decode(num, kept)(), decode_bytes(num, kept.itemsize) / rate
        what = f"values, warps {tile or 'as set'}"
        print(f"decode, {num} rows, {what}: {took:.2f}, floor {floor:.2f} ({floor / took:.2f})", flush=True)
        found.append({"rows": num, "tile": tile, "us": took, "floor_us": floor})
    shapes = ((16, 2), (16, 4), (32, 4), (32, 8), (64, 8))
    tiles = [(*one, stages) for one in shapes for stages in (2, 3)] if args.tiles else [None]
    for requests, tile in itertools.product(args.requests, tiles):
        own = delta_pieces.tile if tile is None else lambda width, t=tile: t
        with mock.patch.object(delta_pieces, "tile", own):
            for kernel, run in prompt(args.tokens, requests).items():
                if tile is None or kernel == "fold":
                    took, what = run(), f"values, warps, stages {tile or 'as set'}"
                    floor = prompt_bytes(args.tokens).get(kernel, 0) / rate
                    share = f", floor {floor:.0f} ({floor / took:.2f})" if floor else ""
                    print(f"{kernel}, {args.tokens} tokens of {requests}, {what}: {took:.0f}{share}", flush=True)
                    found.append({"requests": requests, "kernel": kernel, "tile": tile, "us": took, "floor_us": floor})
    if args.json:
        args.json.write_text(json.dumps({"device": name, "bytes_per_us": rate, "found": found}))


if __name__ == "__main__":
    main()
