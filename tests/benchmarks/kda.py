"""Kernels of Kimi Delta Attention on a GPU: time, and what moving bytes would take.

`python tests/benchmarks/kda.py [--rows 1 16 64 256] [--requests 1 8 64] [--tokens 16384] [--tiles]`

A layer of Kimi-Linear-48B-A3B (32 heads, 128 wide, 4 taps), in bfloat16. A decode step reads and writes each row's
state once; a prompt's floor is that of its inputs and outputs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from mixers import CUDA, SETS, copy_rate, draw, graph_us
from torch import Tensor

from dovetail_backends.kernels.triton import kda, kda_pieces
from dovetail_testing.conformance.kernels_mixers import MixerRequests, Weights

HEADS, DIM, TAPS = 32, 128, 4
CHANNELS = 3 * HEADS * DIM
TILES = tuple((*shape, stages) for shape in ((16, 4), (16, 8), (32, 4), (32, 8), (64, 8)) for stages in (1, 2))


def weights() -> list[Tensor]:
    """What heads are made with."""
    generator = torch.Generator().manual_seed(1)
    return [Weights.draw(HEADS, generator, CUDA).a_log, Weights.draw(HEADS * DIM, generator, CUDA).dt_bias]


def decode(num: int) -> float:
    """Microseconds of a layer's decode step of so many rows."""
    total, numbers, weight = max(SETS * num, 64), weights(), draw(CHANNELS, TAPS)
    rings, states = draw(total, TAPS, CHANNELS), draw(total, HEADS, DIM, DIM, dtype=torch.float32)
    q, k, v, f = draw(num, 4 * HEADS * DIM).view(num, 4, HEADS, DIM).unbind(1)
    b, order = draw(num, HEADS), torch.randperm(total, device="cuda")
    positions = torch.randint(99, 9999, (num,), device="cuda")

    def call(rows: Tensor) -> Callable[[], Tensor]:
        return lambda: kda.kda_decode(q, k, v, b, f, rows, positions, weight, *numbers, rings, states)

    sets = [order[first : first + num].clone() for first in range(0, total - num + 1, num)][:64]
    torch.cuda.synchronize()  # the kernel reads rows before it waits for what comes right before it
    return graph_us([call(rows) for rows in sets])


def prompt(num: int, requests: int) -> dict[str, Callable[[], float]]:
    """A layer's folds of so many tokens in all."""
    x, b, f = draw(num, CHANNELS), draw(num, HEADS), draw(num, HEADS, DIM)
    given = MixerRequests([num // requests] * requests, [0] * requests, CUDA, requests + 2, saves=False)
    states = [draw(size, HEADS, DIM, DIM, dtype=torch.float32) for size in (requests + 2, 2)]
    operands: list[Any] = [x, b, f, *weights(), *given.plan(), *states]
    return {
        "fold": lambda: graph_us([lambda: kda_pieces.kda_prefill(*operands)]),
        "fold by token": lambda: graph_us([lambda: kda.kda_prefill_by_token(*operands)]),
    }


def main() -> None:
    """Print a line for each figure, as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--tiles", action="store_true", help="try other blocks, warps and stages of the fold, too")
    args, rate = parser.parse_args(), copy_rate()
    print(f"{torch.cuda.get_device_name()}, copies at {rate / 1e6:.2f} TB/s; us a layer", flush=True)
    for num in args.rows:
        floor = num * (2 * 4 * HEADS * DIM * DIM + 2 * 2 * TAPS * CHANNELS + 2 * 5 * HEADS * DIM) / rate
        took = decode(num)
        print(f"decode, {num} rows: {took:.2f}, floor {floor:.2f} ({floor / took:.2f})", flush=True)
    floor = args.tokens * 2 * (CHANNELS + HEADS + 2 * HEADS * DIM) / rate
    own = kda_pieces.TILE
    for requests, tile in itertools.product(args.requests, TILES if args.tiles else (own,)):
        with mock.patch.object(kda_pieces, "TILE", tile):
            for kernel, run in prompt(args.tokens, requests).items():
                if kernel == "fold" or tile == own:
                    what = f"{kernel}, {args.tokens} tokens of {requests}, values, warps, stages {tile}"
                    print(f"{what}: {run():.0f}, floor {floor:.0f}", flush=True)


if __name__ == "__main__":
    main()
