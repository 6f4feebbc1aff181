"""Kernels of Kimi Delta Attention on a GPU: time, and what moving bytes would take.

`python tests/benchmarks/kda.py [--rows 1 16 64 256] [--requests 1 8 64] [--tokens 16384] [--tiles]`, and without a GPU
`python tests/benchmarks/kda.py --compiled` for what the kernels are made of.

A layer of Kimi-Linear-48B-A3B (32 heads, 128 wide, 4 taps), in bfloat16. A decode step reads and writes each row's
state once; a prompt's floor is that of its inputs and outputs. Each kernel of a fold is also timed alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from mixers import CUDA, SETS, copy_rate, draw, graph_us, kernels_of
from sass import compiled, report
from torch import Tensor

from dovetail_backends.kernels.triton import kda, kda_pieces
from dovetail_testing.conformance.kernels_mixers import MixerRequests, Weights

HEADS, DIM, TAPS = 32, 128, 4
CHANNELS = 3 * HEADS * DIM
TILES = tuple((*shape, stages) for shape in ((16, 4), (16, 8), (32, 4), (32, 8), (64, 8)) for stages in (1, 2))
PREPARES = ((32, 4), (64, 4), (64, 8), (128, 8))
"""Numbers of a key that a program goes through at a time, and its warps."""


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


def prompt(num: int, requests: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """A layer's folds of so many tokens in all: in pieces, and token by token."""
    x, b, f = draw(num, CHANNELS), draw(num, HEADS), draw(num, HEADS, DIM)
    given = MixerRequests([num // requests] * requests, [0] * requests, CUDA, requests + 2, saves=False)
    states = [draw(size, HEADS, DIM, DIM, dtype=torch.float32) for size in (requests + 2, 2)]
    operands: list[Any] = [x, b, f, *weights(), *given.plan(), *states]
    return lambda: kda_pieces.kda_prefill(*operands), lambda: kda.kda_prefill_by_token(*operands)


def print_compiled() -> None:
    """Print registers, local and shared memory, and the inner loop of each kernel of a fold, for an H200."""
    longs = (1, 2, 2, (9, 3), 9)  # rows, starts, pieces, table, saves
    x, b, f = (
        torch.empty(512, *size, dtype=torch.bfloat16, device="meta") for size in ((CHANNELS,), (HEADS,), (HEADS, DIM))
    )
    numbers = [torch.empty(size, device="meta") for size in (HEADS, HEADS * DIM)]
    plan = [torch.empty(size, dtype=torch.int64, device="meta") for size in longs]
    states = [torch.empty(3, HEADS, DIM, DIM, device="meta") for _ in range(2)]
    with mock.patch.object(kda_pieces, "shared_bytes", return_value=227 << 10):
        kernels = compiled(lambda: kda_pieces.kda_prefill(x, b, f, *numbers, *plan, *states))
    for kernel in kernels:
        print(report(kernel), flush=True)


def main() -> None:
    """Print a line for each figure, as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--tiles", action="store_true", help="try other blocks, warps and stages of the folds, too")
    parser.add_argument("--compiled", action="store_true", help="print what kernels are compiled to; needs no GPU")
    args = parser.parse_args()
    if args.compiled:
        print_compiled()
        return
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copies at {rate / 1e6:.2f} TB/s; us a layer", flush=True)
    for num in args.rows:
        floor = num * (2 * 4 * HEADS * DIM * DIM + 2 * 2 * TAPS * CHANNELS + 2 * 5 * HEADS * DIM) / rate
        took = decode(num)
        print(f"decode, {num} rows: {took:.2f}, floor {floor:.2f} ({floor / took:.2f})", flush=True)
    floor = args.tokens * 2 * (CHANNELS + HEADS + 2 * HEADS * DIM) / rate
    for requests in args.requests:
        in_pieces, by_token = prompt(args.tokens, requests)
        what = f"{args.tokens} tokens of {requests}"
        print(f"fold by token, {what}: {graph_us([by_token]):.0f}, floor {floor:.0f}", flush=True)
        print(f"fold, {what}: {graph_us([in_pieces]):.0f}, floor {floor:.0f}", flush=True)
        for name, run in kernels_of(in_pieces).items():
            print(f"  {name} alone: {graph_us([run]):.0f}", flush=True)
        if args.tiles:
            try_tiles(in_pieces, what)


def try_tiles(run: Callable[[], Tensor], what: str) -> None:
    """Print how long the kernels take in other shapes."""
    for some, warps in PREPARES:
        with mock.patch.multiple(kda_pieces, SOME=some, WARPS=warps):
            took = graph_us([kernels_of(run)["_prepare_kernel"]])
        print(f"  _prepare_kernel, {what}, numbers {some}, warps {warps}: {took:.0f}", flush=True)
    for tile in TILES:
        with mock.patch.object(kda_pieces, "TILE", tile):
            took = graph_us([kernels_of(run)["_fold_kernel"]])
        print(f"  _fold_kernel, {what}, values, warps, stages {tile}: {took:.0f}", flush=True)


if __name__ == "__main__":
    main()
