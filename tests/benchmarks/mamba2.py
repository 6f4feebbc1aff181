"""Kernels of Mamba 2 on a GPU: time, and share of what moving their bytes at the measured copy rate would take.

`python tests/benchmarks/mamba2.py [--shape granite nemotron falcon small] [--rows 1 16 64 256] [--requests 1 8 64]
[--tokens 16384] [--tiles]`

Shapes, in bfloat16: `granite` is a layer of Granite-4-H-Small (128 heads of 64 in one group, states 128 wide),
`nemotron` one of Nemotron-H-8B (128 heads of 64 in 8 groups, 128), `falcon` one of Falcon-H1-34B (32 heads of 128 in 2
groups, 256), `small` one of Falcon-H1-1.5B (48 heads of 64 in one group, 256). A decode step reads and writes each
row's state once; a prompt's floor is that of its inputs and outputs. Several sets of rows take turns, so that no state
is left in the cache.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from mixers import CUDA, SETS, copy_rate, draw, graph_us
from torch import Tensor

from dovetail_backends.kernels.triton import delta_pieces, ssd, ssd_pieces
from dovetail_testing.conformance.kernels_mixers import MixerRequests, Weights

TAPS = 4
LIMITS = 0.0, math.inf


class Shape(NamedTuple):
    """A layer's groups, heads, width of states, width of heads."""

    groups: int
    heads: int
    dim: int
    width: int

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.width

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.groups * self.dim + self.inner

    def inputs(self, num: int) -> list[Tensor]:
        """What the projection makes of tokens: queries, keys, values, steps, gates. Views, as in a model."""
        keys = self.groups * self.dim
        gate, v, k, q, dt = draw(num, self.channels + self.inner + self.heads).split(
            [self.inner, self.inner, keys, keys, self.heads], 1
        )
        return [one.unflatten(1, (self.groups, -1)) for one in (q, k, v, dt, gate)]

    def weights(self) -> tuple[Any, ...]:
        """What heads are made with, and the bounds of their steps."""
        made = Weights.draw(self.heads, torch.Generator().manual_seed(1), CUDA)
        return *made, draw(self.heads, dtype=torch.float32), *LIMITS

    def decode(self, num: int) -> dict[str, Callable[[], float]]:
        """A layer's decode step of so many rows."""
        weight, bias, norm = (
            draw(self.channels, TAPS),
            draw(self.channels),
            draw(self.groups, self.inner // self.groups),
        )
        total, weights = max(SETS * num, 64), self.weights()
        rings, states = draw(total, TAPS, self.channels), draw(total, self.heads, self.dim, self.width).float()
        order, (q, k, v, dt, gate) = torch.randperm(total, device="cuda"), self.inputs(num)
        positions, read = torch.randint(99, 9999, (num,), device="cuda"), draw(num, self.groups, norm.shape[1])

        def call(rows: Tensor) -> Callable[[], Tensor]:
            return lambda: ssd.ssd_decode(q, k, v, dt, rows, positions, weight, bias, *weights, rings, states)

        calls = [call(order[first : first + num].clone()) for first in range(0, total - num + 1, num)][:64]
        torch.cuda.synchronize()  # kernels read rows before they wait for what comes right before them
        return {
            "decode": lambda: graph_us(calls),
            "decode's norm": lambda: graph_us(
                [lambda: ssd.gated_group_norm(read, gate, norm, 1e-6, norm_first=False)] * 8
            ),
        }

    def decode_bytes(self, num: int) -> dict[str, int]:
        """What these must move: states and rings twice, inputs, outputs."""
        state, ring = 2 * 4 * self.heads * self.dim * self.width, 2 * TAPS * self.channels
        return {
            "decode": num * (state + ring + 2 * (self.channels + self.inner + self.heads)),
            "decode's norm": num * 3 * 2 * self.inner,
        }

    def prompt(self, num: int, requests: int) -> dict[str, Callable[[], float]]:
        """A layer's kernels for prompts of so many tokens in all."""
        q, k, v, dt, gate = self.inputs(num)
        weight, bias, x = draw(self.channels, TAPS), draw(self.channels), draw(num, self.channels)
        given = MixerRequests([num // requests] * requests, [0] * requests, CUDA, requests + 2, saves=False)
        rings = [draw(size, TAPS, self.channels) for size in (requests + 2, 2)]
        states = [draw(size, self.heads, self.dim, self.width).float() for size in (requests + 2, 2)]
        norm, plan, weights = draw(self.groups, self.inner // self.groups), given.plan(), self.weights()
        read = draw(num, *norm.shape)
        return {
            "convolution": lambda: graph_us(
                [lambda: delta_pieces.conv_qkv(q, k, v, weight, bias, given.pieces.lens, *plan, *rings)]
            ),
            "fold": lambda: graph_us([lambda: ssd_pieces.ssd_prefill(x, dt, *weights, *plan, *states)]),
            "fold by token": lambda: graph_us([lambda: ssd.ssd_prefill_by_token(x, dt, *weights, *plan, *states)]),
            "gated norm": lambda: graph_us([lambda: ssd.gated_group_norm(read, gate, norm, 1e-6, norm_first=False)]),
        }

    def prompt_bytes(self, num: int) -> dict[str, int]:
        """What kernels of a prompt must move: inputs and outputs."""
        return {
            "convolution": num * 2 * 2 * self.channels,
            "fold": num * 2 * (self.channels + self.inner + self.heads),
            "gated norm": num * 3 * 2 * self.inner,
        }


SHAPES = {
    **{"granite": Shape(1, 128, 128, 64), "nemotron": Shape(8, 128, 128, 64)},
    **{"falcon": Shape(2, 32, 256, 128), "small": Shape(1, 48, 256, 64)},
}


def say(what: str, took: float, floor: float) -> None:
    """Print a line."""
    share = f", floor {floor:.2f} ({floor / took:.2f})" if floor else ""
    print(f"{what}: {took:.2f}{share}", flush=True)


def main() -> None:
    """Print a line for each figure, as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=["granite"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--tiles", action="store_true", help="try other blocks and warps of the decode step, too")
    args, rate = parser.parse_args(), copy_rate()
    print(f"{torch.cuda.get_device_name()}, copies at {rate / 1e6:.2f} TB/s; us a layer")
    own = ssd.tile
    tiles: list[Any] = list(itertools.product((16, 32, 64), (2, 4, 8))) if args.tiles else [None]
    for name in args.shape:
        shape = SHAPES[name]
        for num, tile in itertools.product(args.rows, tiles):
            made = own if tile is None else lambda dim, width, t=tile: (triton.next_power_of_2(dim), *t)
            with mock.patch.object(ssd, "tile", made):
                for kernel, run in shape.decode(num).items():
                    floor, what = shape.decode_bytes(num)[kernel] / rate, f"values, warps {tile or 'as set'}"
                    say(f"{name}, {kernel}, {num} rows, {what}", run(), floor)
        for requests in args.requests:
            for kernel, run in shape.prompt(args.tokens, requests).items():
                floor = shape.prompt_bytes(args.tokens).get(kernel, 0) / rate
                say(f"{name}, {kernel}, {args.tokens} tokens of {requests}", run(), floor)


if __name__ == "__main__":
    main()
