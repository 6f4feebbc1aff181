"""Mamba 1 as a layer: a state for each channel, which forgets by steps that each token chooses (selective scan).

Source: arXiv:2312.00752. T tokens, P channels, D numbers of a channel's state, R width of what steps are made of; K
taps of a convolution over the channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.cache import CacheTensor, Recurrent
from dovetail.contracts.config import LayerSpec, ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext, Norm, Part, Stream
from dovetail.contracts.model import WeightRule
from dovetail.sdk.layers.base import Slot
from dovetail.sdk.layers.mixer import Mixer, States
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.ops.conv import PIECE
from dovetail.sdk.layers.pieces import Pieces
from dovetail_models.folding import ConvTaps, HeadNumbers

SELECTED = ("dt", "b", "c")


def scan_rules(at: str, to: str) -> tuple[WeightRule, ...]:
    """Return the rules of a layer, whose modules stand in checkpoints behind `at`, and here behind `to`."""
    return (
        WeightRule(at + "in_proj", to + "proj"),
        WeightRule(at + "conv1d", to + "conv"),
        WeightRule(at + "x_proj", to + "select"),
        WeightRule(at + r"dt_proj\.bias", to + "dt_bias"),
        WeightRule(at + "dt_proj", to + "step"),
        WeightRule(at + "(dt|b|c)_layernorm", to + r"norms.\2"),
        WeightRule(at + "A_log", to + "a_log"),
        WeightRule(at + "D", to + "skip"),
        WeightRule(at + "out_proj", to + "out"),
    )


class ScanShape(NamedTuple):
    """Widths of such a layer.

    Attributes:
        channels: P.
        dim: D.
        rank: R.
        taps: K.
        conv_bias: Whether the convolution has biases.
        bias: Whether the projection and the way out have.
        norm: Whether what a token selects is normed, with weights or without.
        norm_eps: Of these norms.
    """

    channels: int
    dim: int
    rank: int
    taps: int
    conv_bias: bool = True
    bias: bool = False
    norm: Literal["none", "plain", "weights"] = "none"
    norm_eps: float = 1e-6

    @classmethod
    def of(cls, hf: Mapping[str, Any], hidden: int, *, prefix: str, names: Sequence[str]) -> ScanShape:
        """Read it.

        Args:
            hf: Parsed `config.json`.
            hidden: Width of the model.
            prefix: Of the keys `expand`.
            names: Keys of D, R, K, and whether there are biases of the convolution and of projections.

        Raises:
            ModelError: R is below 1.
        """
        dim, rank, taps, conv_bias, bias = (hf.get(name) for name in names)
        expanded = int((hf.get(f"{prefix}expand") or 2) * hidden)
        rank = math.ceil(hidden / 16) if rank in (None, "auto") else int(rank)
        if rank < 1:
            raise ModelError(f"config.json: {names[1]} is {rank}; it must be 1 at least")
        conv_bias = True if conv_bias is None else bool(conv_bias)
        return cls(expanded, int(dim or 16), rank, int(taps or 4), conv_bias, bool(bias))

    def spec(self, index: int) -> LayerSpec:
        """Return the layer as data."""
        state = CacheTensor("state", (self.channels, self.dim), "float32", shard=0, dtypes=("bfloat16", "float16"))
        ring = CacheTensor("conv", (self.taps, self.channels), shard=1)
        return LayerSpec(index=index, reach=Recurrent(PIECE, in_place=True), state=(ring, state))

    def numel(self, hidden: int) -> int:
        """Count a layer's weights."""
        selected = self.rank + 2 * self.dim
        biases = self.conv_bias * self.channels + self.bias * (2 * self.channels + hidden)
        norms = selected if self.norm == "weights" else 0
        own = self.channels * (selected + self.rank + self.taps + self.dim + 2)
        return 3 * hidden * self.channels + own + biases + norms


class Decays(HeadNumbers):
    """Logarithms of decays, those of each channel side by side; checkpoints have `[P, D]`."""

    def __init__(self, shape: ScanShape, ctx: BuildContext) -> None:
        super().__init__(shape.channels * shape.dim, shape.dim, ctx)
        self._dim = shape.dim

    def slots(self) -> dict[Slot, tuple[int, ...]]:
        return {slot: (shape[0] // self._dim, self._dim) for slot, shape in super().slots().items()}

    def place(self, slot: Slot, tensor: Tensor) -> Tensor | None:
        return super().place(slot, tensor.flatten())

    def by_channel(self) -> Tensor:
        """Return them as `[P, D]`, this rank's."""
        return self.weight.view(-1, self._dim)


class PlainNorm(nn.Module):
    """RMS norm without a weight over `[T, size]`."""

    def __init__(self, size: int, eps: float, ctx: BuildContext) -> None:
        super().__init__()
        self._ones, self._eps = torch.ones(size, device=ctx.device, dtype=ctx.dtype), eps
        self._norm = ctx.operation("rms_norm", H=size)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`."""
        found: Tensor = self._norm(x, self._ones, self._eps)
        return found


class SelectiveScan(Mixer):
    """A projection, a short convolution, what each token selects, the scan, and the way out.

    Args:
        config: The model's.
        index: Number of the layer.
        ctx: Device, dtype, rank and path.
        shape: Widths of the whole model.
    """

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext, shape: ScanShape) -> None:
        super().__init__(index, ctx)
        hidden, channels = config.hidden_size, shape.channels
        self.proj = ctx.linear("proj", hidden, (Part("x", channels), Part("gate", channels)), bias=shape.bias,
                               shard="out")  # fmt: skip
        self.conv = ConvTaps(shape.taps, (Part("", channels),), ctx.at("conv"), bias=shape.conv_bias)
        self._selected = {"dt": shape.rank, "b": shape.dim, "c": shape.dim}
        self.select = ctx.linear("select", channels, sum(self._selected.values()), shard="in")
        self.step = ctx.linear("step", shape.rank, channels, shard="out")
        self.a_log = Decays(shape, ctx.at("a_log"))
        self.dt_bias, self.skip = (HeadNumbers(channels, 1, ctx.at(name)) for name in ("dt_bias", "skip"))
        make = {"weights": RMSNorm, "plain": PlainNorm}.get(shape.norm)
        sizes = self._selected.items() if make is not None else ()
        self.norms = nn.ModuleDict({name: make(size, shape.norm_eps, ctx) for name, size in sizes if make is not None})
        self.out = ctx.linear("out", channels, hidden, bias=shape.bias, shard="in")
        width = channels // ctx.parallel.size
        self._convs, self._scans = (
            [ctx.operation(f"{op}_{step}", P=width, **more) for step in ("prefill", "decode")]
            for op, more in (("short_conv", {"K": shape.taps, "act": "silu"}), ("selective_scan", {"D": shape.dim}))
        )

    def forward(
        self,
        x: Tensor | Stream,
        pieces: Pieces | None,
        batch: ForwardBatch,
        *,
        norm: Norm | None = None,
        add: Stream | None = None,
        scale: float = 1.0,
    ) -> Tensor | Stream:
        """Map `[T, H]` to `[T, H]`; `pieces` are the step's, the rest is as for a `Linear`."""
        inputs = torch.chunk(self.proj(x, norm=norm), 2, 1)
        return self.out(self.mix(inputs, batch, pieces), add=add, scale=scale)

    def fold_tokens(self, inputs: Sequence[Tensor], states: States, rows: Tensor, positions: Tensor) -> Tensor:
        x, gate = inputs
        x = self._convs[1](x, None, None, self.conv.weight, self.conv.bias, rows, positions, states["conv"])
        found: Tensor = self._scans[1](*self._operands(x, gate), rows, states["state"])
        return found

    def fold_requests(
        self, inputs: Sequence[Tensor], states: States, copies: States, pieces: Pieces, saves: Tensor
    ) -> Tensor:
        (x, gate), plan = inputs, (pieces.rows, pieces.starts, pieces.pieces, pieces.table, saves)
        taps = None, None, self.conv.weight, self.conv.bias, pieces.lens
        x = self._convs[0](x, *taps, *plan, states["conv"], copies["conv"])
        found: Tensor = self._scans[0](*self._operands(x, gate), *plan, states["state"], copies["state"])
        return found

    def _operands(self, x: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        """Return what the scan takes of convolved tokens `[T, P]`."""
        parts = torch.split(self.select(x), list(self._selected.values()), 1)
        dt, b, c = (
            self.norms[name](part.contiguous()) if name in self.norms else part
            for name, part in zip(self._selected, parts, strict=True)
        )
        numbers = self.a_log.by_channel(), self.dt_bias.weight, self.skip.weight
        return x, self.step(dt), b, c, gate, *numbers
