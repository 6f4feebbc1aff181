"""Places and operands of the operations that fold tokens into states, and what is asked of them beyond equality.

Decays are as trained models have them, steps of 0.001 to 0.1: with those of fresh weights a state forgets in a few
tokens, and hides where it was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dovetail.contracts.kernels import Ask
from dovetail.sdk.layers.pieces import Pieces

SHAPES: Sequence[dict[str, int]] = (
    {"G": 2, "J": 2, "D": 16, "W": 16, "K": 4},
    {"G": 1, "J": 3, "D": 24, "W": 40, "K": 3},
    {"G": 2, "J": 1, "D": 128, "W": 128, "K": 4},
)
CONVS: Sequence[dict[str, int]] = ({"P": 200, "K": 3}, {"P": 63, "K": 4})
SCANS: Sequence[dict[str, int]] = ({"P": 72, "D": 16}, {"P": 33, "D": 5})
NORMS: Sequence[dict[str, int]] = ({"N": 5, "W": 40}, {"N": 4, "W": 128})
GROUPS: Sequence[dict[str, int]] = ({"N": 3, "W": 40}, {"N": 1, "W": 8192})
GATES: Sequence[dict[str, int]] = ({"N": 5, "D": 24}, {"N": 3, "D": 256})
EPS, PIECE = 1e-6, 64
STEPS = 0.002, 0.08
"""Bounds of a step of Mamba 2: some are beyond them."""
BY_REQUEST = frozenset(
    {"conv_qkv", "short_conv_prefill", "gdn_prefill", "ssd_prefill", "selective_scan_prefill", "kda_prefill"}
)
"""Operations whose tokens depend on those before them of their request, and on nothing else."""
FOLDS = BY_REQUEST | {"short_conv_decode", "gdn_decode", "ssd_decode", "selective_scan_decode", "kda_decode"}
"""Those that write states."""
OF_TOKENS: Sequence[str] = ("q", "k", "v", "x", "b", "a", "dt", "c", "f", "gate", "before", "behind")
"""Operands of such an operation that have a row for each token."""
CUTS = ((64, 74), (128, 129), (64, 128, 192, 230))
"""Where a request is cut: its last end is its length. An operation's first place takes all, others the first."""


def places(op: str) -> Sequence[dict[str, int]] | None:
    """Return widths of the places of an operation; None for one that is not such a one."""
    if op.startswith("short_conv"):
        return CONVS
    if op.startswith("selective_scan"):
        return SCANS
    if op.startswith("kda_"):
        letters = "GDW" if op.endswith("_prefill") else "GDWK"
        return [{letter: shape[letter] for letter in letters} for shape in (SHAPES[2], SHAPES[1])]
    if op in FOLDS:
        return [shape if not op.endswith("_prefill") else _without_taps(shape) for shape in SHAPES]
    return {"gated_rms_norm": NORMS, "gated_group_norm": GROUPS, "sigmoid_gate": GATES}.get(op)


def options(op: str) -> Sequence[dict[str, Any]]:
    """Return the options of such an operation that are tried."""
    if op.startswith("gdn_"):
        return {"rate": 1.0}, {"rate": 2.0}
    if op.startswith("kda_"):
        return {"bound": 0.0}, {"bound": -5.0}
    if op == "gated_rms_norm":
        return {"act": "silu"}, {"act": "sigmoid"}
    if op.startswith("short_conv"):
        return {"act": "none"}, {"act": "silu"}
    return ({"norm_first": False}, {"norm_first": True}) if op == "gated_group_norm" else ({},)


def _without_taps(shape: Mapping[str, int]) -> dict[str, int]:
    return {letter: number for letter, number in shape.items() if letter != "K"}


class Weights(NamedTuple):
    """What a head is made with: `[N]` float32 each."""

    a_log: Tensor
    dt_bias: Tensor

    @classmethod
    def draw(cls, num: int, generator: torch.Generator, device: torch.device) -> Weights:
        """Draw them as trained models have them."""
        step = 10 ** (torch.rand(num, generator=generator) * 2 - 3)
        return cls((1 + 15 * torch.rand(num, generator=generator)).log().to(device), step.expm1().log().to(device))


class MixerRequests:
    """Some requests of a step, in device rows in any order.

    Args:
        new: Tokens of each.
        before: Tokens of each that are folded already.
        device: Where tensors are.
        num_rows: Device rows.
        saves: Whether copies are taken behind every other piece.
    """

    def __init__(
        self, new: Sequence[int], before: Sequence[int], device: torch.device, num_rows: int, *, saves: bool = True
    ) -> None:
        starts = torch.tensor([0, *new]).cumsum(0)
        lens = torch.tensor([sum(pair) for pair in zip(new, before, strict=True)])
        self.rows = torch.arange(num_rows - 1, num_rows - 1 - len(new), -1).to(device)
        batch: Any = SimpleNamespace(
            seq_lens=lens.to(device), rows=self.rows, q_starts=starts.int().to(device), saves=(), save_table=None,
            num_tokens=int(starts[-1]),
        )  # fmt: skip
        self.pieces = Pieces(batch, 0)
        size = len(self.pieces.table)
        at = torch.arange(size, device=device)
        wanted = (at % 2 == 0) & (self.pieces.table[:, 2] > 0)
        self.saves = torch.where(wanted & torch.tensor(saves), at + 1, -1)
        self.num_copies = size + 1

    def plan(self) -> list[Tensor]:
        """Return the operands that say which tokens are whose."""
        return [self.rows, self.pieces.starts, self.pieces.pieces, self.pieces.table, self.saves]


def divided(rows: int, device: torch.device) -> MixerRequests:
    """Divide so many tokens among requests: one without any among them, one that begins within a piece."""
    third = rows // 3
    new = [third, 0, rows - 2 * third, third] if rows > 3 else [rows]
    return MixerRequests(new, [64, 128, 37, 0][: len(new)], device, len(new) + 2)


class MixerOperands:
    """Makes the operands of an operation.

    Args:
        ask: The operation.
        rows: T.
        device: Where they are.
        generator: Of their numbers.
        draw: Makes a tensor of a shape.
        by_row: Makes `[T, …]`, as slices of a wider tensor where strides are tried.
    """

    def __init__(
        self,
        ask: Ask,
        rows: int,
        device: torch.device,
        generator: torch.Generator,
        draw: Callable[..., Tensor],
        by_row: Callable[..., Tensor],
    ) -> None:
        self.ask, self.rows, self.device, self.generator = ask, rows, device, generator
        self.draw, self.by_row, self.dims = draw, by_row, dict(ask.dims)

    def make(self, requests: MixerRequests | None = None) -> list[Any]:
        """Return them, in order."""
        if self.ask.op == "gated_rms_norm":
            heads = self.dims["N"], self.dims["W"]
            return [self.by_row(*heads), self.by_row(*heads), self.draw(self.dims["W"]), EPS]
        if self.ask.op == "gated_group_norm":
            heads = self.dims["N"], self.dims["W"]
            weight = self.draw(*heads) if self.rows % 16 else None
            return [self.by_row(*heads), self.by_row(*heads), weight, EPS]
        if self.ask.op == "sigmoid_gate":
            return [self.by_row(self.dims["N"], self.dims["D"]) for _ in range(2)]
        if self.ask.op == "gdn_decode":
            return self._decode()
        if self.ask.op == "ssd_decode":
            return self._ssd_decode()
        if self.ask.op == "kda_decode":
            return self._kda_decode()
        if self.ask.op == "selective_scan_decode":
            return self._scan_decode()
        if self.ask.op == "short_conv_decode":
            rings = self.draw(self.rows + 2, self.dims["K"], self._channels)
            return [*self._gated(), *self._taps(), *self._places(self.rows + 2), rings]
        given = divided(self.rows, self.device) if requests is None else requests
        made = {"gdn_prefill": self._prefill, "ssd_prefill": self._ssd_prefill}
        made |= {"selective_scan_prefill": self._scan_prefill, "kda_prefill": self._kda_prefill}
        return made.get(self.ask.op, self._conv)(given)

    def _gated(self) -> list[Tensor | None]:
        gates = [self.by_row(self._channels) if self.rows % 4 else None for _ in range(2)]
        return [self.by_row(self._channels), *gates]

    def _scan(self) -> list[Tensor]:
        channels, dim = self.dims["P"], self.dims["D"]
        x, dt, gate = (self.by_row(channels) for _ in range(3))
        weights = Weights.draw(channels, self.generator, self.device)
        a_log = weights.a_log[:, None] + self.draw(channels, dim, dtype=torch.float32) / 4
        return [x, dt, self.by_row(dim), self.by_row(dim), gate, a_log, weights.dt_bias, self._skips(channels)]

    def _scan_prefill(self, requests: MixerRequests) -> list[Any]:
        shape = self.dims["P"], self.dims["D"]
        states = (
            self.draw(num, *shape, dtype=torch.float32) / 8 for num in (len(requests.rows) + 2, requests.num_copies)
        )
        return [*self._scan(), *requests.plan(), *states]

    def _scan_decode(self) -> list[Any]:
        state = self.draw(self.rows + 2, self.dims["P"], self.dims["D"], dtype=torch.float32) / 8
        return [*self._scan(), self._places(self.rows + 2)[0], state]

    def _inputs(self) -> list[Tensor]:
        keys, values, dim = self.dims["G"], self.dims.get("J", 1) * self.dims["W"], self.dims["D"]
        return [self.by_row(keys, dim), self.by_row(keys, dim), self.by_row(keys, values)]

    @property
    def _channels(self) -> int:
        if "P" in self.dims:
            return self.dims["P"]
        return self.dims["G"] * (2 * self.dims["D"] + self.dims.get("J", 1) * self.dims["W"])

    def _state(self, num: int) -> Tensor:
        shape = num, self.dims["G"] * self.dims.get("J", 1), self.dims["D"], self.dims["W"]
        return self.draw(*shape, dtype=torch.float32) / 8

    def _weights(self) -> Weights:
        return Weights.draw(self.dims["G"] * self.dims["J"], self.generator, self.device)

    def _gates(self) -> list[Tensor]:
        return [self.by_row(self.dims["G"], self.dims["J"]) for _ in range(2)]

    def _taps(self) -> tuple[Tensor, Tensor | None]:
        bias = self.draw(self._channels) if self.rows % 2 else None
        return self.draw(self._channels, self.dims["K"]), bias

    def _conv(self, requests: MixerRequests) -> list[Any]:
        (weight, bias), taps = self._taps(), self.dims["K"]
        rings = (self.draw(num, taps, self._channels) for num in (len(requests.rows) + 2, requests.num_copies))
        inputs = self._inputs() if self.ask.op == "conv_qkv" else self._gated()
        return [*inputs, weight, bias, requests.pieces.lens, *requests.plan(), *rings]

    def _prefill(self, requests: MixerRequests) -> list[Any]:
        states = self._state(len(requests.rows) + 2), self._state(requests.num_copies)
        return [self.by_row(self._channels), *self._gates(), *self._weights(), *requests.plan(), *states]

    def _ssd_prefill(self, requests: MixerRequests) -> list[Any]:
        states = self._state(len(requests.rows) + 2), self._state(requests.num_copies)
        x, dt = self.by_row(self._channels), self.by_row(self.dims["G"], self.dims["J"])
        return [x, dt, *self._weights(), self._skip(), *STEPS, *requests.plan(), *states]

    def _kda_weights(self) -> list[Tensor]:
        heads, dim = self.dims["G"], self.dims["D"]
        numbers = (Weights.draw(num, self.generator, self.device) for num in (heads, heads * dim))
        return [next(numbers).a_log, next(numbers).dt_bias]

    def _kda_prefill(self, requests: MixerRequests) -> list[Any]:
        states = self._state(len(requests.rows) + 2), self._state(requests.num_copies)
        given = [self.by_row(self._channels), self.by_row(self.dims["G"]), self.by_row(self.dims["G"], self.dims["D"])]
        return [*given, *self._kda_weights(), *requests.plan(), *states]

    def _kda_decode(self) -> list[Any]:
        num, heads = self.rows + 2, self.dims["G"]
        given = [*self._inputs(), self.by_row(heads), self.by_row(heads, self.dims["D"]), *self._places(num)]
        rings = self.draw(num, self.dims["K"], self._channels)
        return [*given, self._taps()[0], *self._kda_weights(), rings, self._state(num)]

    def _skip(self) -> Tensor:
        return self._skips(self.dims["G"] * self.dims["J"])

    def _skips(self, num: int) -> Tensor:
        return self.draw(num, dtype=torch.float32)

    def _ssd_decode(self) -> list[Any]:
        num = self.rows + 2
        given = [*self._inputs(), self.by_row(self.dims["G"], self.dims["J"]), *self._places(num), *self._taps()]
        ring = self.draw(num, self.dims["K"], self._channels)
        return [*given, *self._weights(), self._skip(), *STEPS, ring, self._state(num)]

    def _places(self, num: int) -> tuple[Tensor, Tensor]:
        rows = torch.randperm(num, generator=self.generator)[: self.rows].to(self.device)
        return rows, torch.randint(0, 99, (self.rows,), generator=self.generator).to(self.device)

    def _decode(self) -> list[Any]:
        values, num, taps = self.dims["J"] * self.dims["W"], self.rows + 2, self.dims["K"]
        rows, positions = self._places(num)
        gate = self.by_row(self.dims["G"], values)
        given = [*self._inputs(), gate, *self._gates(), rows, positions, self.draw(self._channels, taps)]
        norm, rings = self.draw(self.dims["W"]), self.draw(num, taps, self._channels)
        return [*given, *self._weights(), norm, EPS, rings, self._state(num)]


def requests_of(names: Sequence[str], operands: Sequence[Any]) -> Iterator[tuple[slice, int, list[Any]]]:
    """Yield each request by itself: its tokens, its device row, and its operands, the states as they were before."""
    by_name: dict[str, Any] = dict(zip(names, operands, strict=True))
    ends, first = by_name["starts"].tolist(), by_name["pieces"].tolist()
    for request, (start, end) in enumerate(pairwise(ends)):
        own = slice(first[request], first[request + 1])
        table = by_name["table"][own] - torch.tensor([request, start, 0], device=by_name["table"].device)
        device = table.device
        changed: dict[str, Any] = {
            "rows": by_name["rows"][request : request + 1],
            "starts": torch.tensor([0, end - start], device=device),
            "pieces": torch.tensor([0, len(table)], device=device),
            "table": table,
            "saves": by_name["saves"][own],
        }
        if "lens" in by_name:
            changed["lens"] = by_name["lens"][request : request + 1]
        tokens = {name: by_name[name][start:end] for name in OF_TOKENS if name in by_name}
        by_request: dict[str, Any] = {**by_name, **changed, **tokens}
        alone = [by_request[name] for name in names]
        yield (
            slice(start, end),
            int(changed["rows"]),
            [one.clone() if isinstance(one, Tensor) else one for one in alone],
        )


def split_at(
    names: Sequence[str], operands: Sequence[Any], cuts: Sequence[int], device: torch.device
) -> Iterator[list[Any]]:
    """Yield the operands of a lone request's tokens in parts, which go on from what the one before left."""
    by_name: dict[str, Any] = dict(zip(names, operands, strict=True))
    for start, end in pairwise((0, *cuts)):
        part = MixerRequests([end - start], [start], device, 3, saves=False)
        tokens = {name: by_name[name][start:end] for name in OF_TOKENS if name in by_name}
        plan = dict(zip(("rows", "starts", "pieces", "table", "saves"), part.plan(), strict=True))
        of_part: dict[str, Any] = {**by_name, **plan, "lens": part.pieces.lens, **tokens}
        yield [of_part[name] for name in names]
