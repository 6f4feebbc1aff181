"""Operands of every operation that a kernel set may claim, at odd widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts.kernels import Ask
from dovetail.contracts.layers import Act, Parallel
from dovetail_testing.conformance import kernels_mixers as mixers
from dovetail_testing.conformance import kernels_packed as packed
from dovetail_testing.conformance.kernels_steps import STEP_OPERANDS, Draws

Operands = list[Any]
Draw = Callable[..., Tensor]

DIMS: Mapping[str, Sequence[int]] = {
    "H": (63, 100, 2000),
    "F": (1, 63, 100),
    "D": (16, 80),
    "R": (20,),
    "V": (63, 300),
    "N": (5, 96),
    "K": (63, 128),
}
"""Widths by letter."""
ACTS: Sequence[Act] = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "clamped_silu_and_mul")
OPTIONS: Mapping[str, Sequence[Any]] = {"act": ACTS}
"""Values by option."""
HEADS, NOPE, EPS = 5, 6, 1e-6
NUM_RANKS = 2
"""Of sums over ranks: one stands for all, so that every share is its own."""


def sample(
    ask: Ask,
    rows: int,
    device: torch.device,
    seed: int,
    *,
    is_strided: bool = False,
    requests: mixers.MixerRequests | None = None,
) -> Operands:
    """Return operands for an operation, with as many rows.

    Args:
        ask: The operation, with its widths.
        rows: T.
        device: Where they are.
        seed: Of their numbers.
        is_strided: Those that have rows are slices of wider tensors.
        requests: Whose tokens they are, where that matters; None: of several.
    """
    generator = torch.Generator().manual_seed(seed * 7919 + rows)
    dtype = getattr(torch, ask.dtype)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def by_row(*shape: int) -> Tensor:
        if not is_strided:
            return draw(rows, *shape)
        wide = draw(rows, shape[0] + 3, *shape[1:])
        return wide[:, : shape[0]]

    if packed.places(ask.op, ask.dtype) is not None:
        return packed.PackedOperands(ask, rows, device, generator, draw, by_row).make()
    if mixers.places(ask.op) is not None:
        return mixers.MixerOperands(ask, rows, device, generator, draw, by_row).make(requests)
    if ask.op in STEP_OPERANDS:
        return STEP_OPERANDS[ask.op](Draws(dict(ask.dims), rows, device, generator, by_row))
    return _OPERANDS[ask.op](dict(ask.dims), by_row, draw, rows, device)


def _rms_norm(dims: Mapping[str, int], by_row: Draw, draw: Draw, rows: int, device: torch.device) -> Operands:
    return [by_row(dims["H"]), draw(dims["H"]), EPS]


def _add_rms_norm(dims: Mapping[str, int], by_row: Draw, draw: Draw, rows: int, device: torch.device) -> Operands:
    return [by_row(dims["H"]), by_row(dims["H"]), draw(dims["H"]), EPS]


def _wide_rms_norm(dims: Mapping[str, int], by_row: Draw, draw: Draw, rows: int, device: torch.device) -> Operands:
    return [by_row(dims["H"]), draw(dims["H"], dtype=torch.float32), EPS]


def _layer_norm(dims: Mapping[str, int], by_row: Draw, draw: Draw, rows: int, device: torch.device) -> Operands:
    return [by_row(dims["H"]), draw(dims["H"]), draw(dims["H"]), EPS]


def _rotations(dims: Mapping[str, int], by_row: Draw, draw: Draw, rows: int, device: torch.device) -> Operands:
    half = dims["D"] // 2
    freqs = 1.0 / 10000 ** (torch.arange(half, device=device) / half)
    factor = 1.3 if dims["F"] == 1 else 1.0 + draw(half, dtype=torch.float32).abs()
    return [torch.arange(rows, device=device) * 37, freqs, factor]


def _norm_rotate(dims: Mapping[str, int], by_row: Draw, draw: Draw, rows: int, device: torch.device) -> Operands:
    dim = dims["D"]
    weight = draw(HEADS, dim) if rows % 2 else None
    rope = draw(rows, 1, dim), draw(rows, 1, dim)
    if rows % 3 == 0:  # towers rotate in float32
        rope = rope[0].float(), rope[1].float()
    return [by_row(HEADS, dim), weight, EPS, *rope]


def _latent_rows(dims: Mapping[str, int], by_row: Draw, draw: Draw, rows: int, device: torch.device) -> Operands:
    rank, dim = dims["R"], dims["D"]
    rope = draw(rows, 1, dim), draw(rows, 1, dim)
    return [by_row(HEADS, NOPE + dim), by_row(rank + dim), draw(rank), EPS, *rope]


def _act_and_mul(dims: Mapping[str, int], by_row: Draw, draw: Draw, rows: int, device: torch.device) -> Operands:
    return [by_row(2 * dims["F"])]


def _linear(dims: Mapping[str, int], by_row: Draw, draw: Draw, rows: int, device: torch.device) -> Operands:
    bias = draw(dims["N"]) if rows % 2 else None
    return [by_row(dims["K"]), draw(dims["N"], dims["K"]), bias]


def _linear_add(dims: Mapping[str, int], by_row: Draw, draw: Draw, rows: int, device: torch.device) -> Operands:
    return [*_linear(dims, by_row, draw, rows, device), by_row(dims["N"])]


def _norm_linear(dims: Mapping[str, int], by_row: Draw, draw: Draw, rows: int, device: torch.device) -> Operands:
    x, *matrix = _linear(dims, by_row, draw, rows, device)
    return [x, draw(dims["K"]), EPS, *matrix]


def _norm_gate(dims: Mapping[str, int], by_row: Draw, draw: Draw, rows: int, device: torch.device) -> Operands:
    return _norm_linear({"N": 2 * dims["F"], "K": dims["K"]}, by_row, draw, rows, device)


def _doubled(share: Tensor) -> Tensor:
    return (share.float() * NUM_RANKS).to(share.dtype)


def _rank_sum(dims: Mapping[str, int], by_row: Draw, draw: Draw, rows: int, device: torch.device) -> Operands:
    return [by_row(dims["H"]), Parallel(size=NUM_RANKS, all_reduce=_doubled)]


def _rank_sum_add(dims: Mapping[str, int], by_row: Draw, draw: Draw, rows: int, device: torch.device) -> Operands:
    share, ranks = _rank_sum(dims, by_row, draw, rows, device)
    return [share, by_row(dims["H"]), ranks]


def _rank_sum_norm(dims: Mapping[str, int], by_row: Draw, draw: Draw, rows: int, device: torch.device) -> Operands:
    share, value, ranks = _rank_sum_add(dims, by_row, draw, rows, device)
    return [share, value, draw(dims["H"]), EPS, ranks]


_OPERANDS: Mapping[str, Callable[..., Operands]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "wide_rms_norm": _wide_rms_norm,
    "layer_norm": _layer_norm,
    "rotations": _rotations,
    "norm_rotate": _norm_rotate,
    "latent_rows": _latent_rows,
    "act_and_mul": _act_and_mul,
    "linear": _linear,
    "wide_linear": _linear,
    "linear_add": _linear_add,
    "norm_linear": _norm_linear,
    "norm_gate": _norm_gate,
    "rank_sum": _rank_sum,
    "rank_sum_add": _rank_sum_add,
    "rank_sum_norm": _rank_sum_norm,
}
