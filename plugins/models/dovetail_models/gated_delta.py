"""Gated DeltaNet as a layer: linear attention whose state forgets, and corrects what it holds of a key.

Source: arXiv:2412.06464. T tokens, G key heads of width D, each with J value heads of width W; N = G J; K taps of a
convolution over P = 2 G D + N W channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.cache import CacheTensor, Recurrent
from dovetail.contracts.config import LayerSpec, ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext, Norm, Part, Stream
from dovetail.contracts.model import WeightRule
from dovetail.sdk.layers.base import Layer
from dovetail.sdk.layers.mixer import Mixer, States
from dovetail.sdk.layers.ops.conv import PIECE
from dovetail.sdk.layers.ops.delta import GateAct
from dovetail.sdk.layers.pieces import Pieces
from dovetail_models.folding import ConvTaps, HeadNumbers
from dovetail_models.llama import LAYER

AT, TO = LAYER + r"linear_attn\.", r"layers.\1.attention."
RULES = (
    WeightRule(AT + "in_proj_qkvz", TO + "qkvz", "heads"),
    WeightRule(AT + "in_proj_qkv", TO + "qkvz", ("q", "k", "v")),
    WeightRule(AT + "in_proj_z", TO + "qkvz", "z"),
    WeightRule(AT + "in_proj_ba", TO + "ba", "heads"),
    WeightRule(AT + "in_proj_([ba])", TO + "ba", r"\2"),
    WeightRule(AT + "conv1d", TO + "conv"),
    WeightRule(AT + "A_log", TO + "a_log"),
    WeightRule(AT + "dt_bias", TO + "dt_bias"),
    WeightRule(AT + "norm", TO + "norm"),
    WeightRule(AT + "out_proj", TO + "out"),
)


class DeltaShape(NamedTuple):
    """Heads and widths of such a layer.

    Attributes:
        keys: G.
        per_key: J.
        dim: D.
        width: W.
        taps: K.
        interleaved: The projections' rows stand by key head: queries, keys, values and gates of each; rates, decays.
        rate: Largest rate of the fold.
        norm_eps: Of the gated norm; None: that of the model's norms.
    """

    keys: int
    per_key: int
    dim: int
    width: int
    taps: int
    interleaved: bool = False
    rate: float = 1.0
    norm_eps: float | None = None

    @classmethod
    def of(cls, hf: Mapping[str, Any], *, interleaved: bool = False) -> DeltaShape:
        """Read it.

        Raises:
            ModelError: Value heads are no multiple of key heads.
        """
        keys, values = int(hf.get("linear_num_key_heads") or 16), int(hf.get("linear_num_value_heads") or 32)
        if keys < 1 or values % keys:
            raise ModelError(
                f"config.json: linear_num_value_heads is {values}; possible: multiples of linear_num_key_heads, {keys}"
            )
        dim, width = (int(hf.get(f"linear_{name}_head_dim") or 128) for name in ("key", "value"))
        return cls(keys, values // keys, dim, width, int(hf.get("linear_conv_kernel_dim") or 4), interleaved)

    @property
    def values(self) -> int:
        """N."""
        return self.keys * self.per_key

    @property
    def channels(self) -> int:
        """P."""
        return 2 * self.keys * self.dim + self.values * self.width

    def spec(self, index: int) -> LayerSpec:
        """Return the layer as data."""
        shape = self.values, self.dim, self.width
        state = CacheTensor("state", shape, "float32", shard=0, dtypes=("bfloat16", "float16"))
        return LayerSpec(
            index=index,
            reach=Recurrent(PIECE, in_place=True),
            state=(CacheTensor("conv", (self.taps, self.channels), shard=1), state),
        )

    def numel(self, hidden: int) -> int:
        """Count a layer's weights."""
        inner = self.values * self.width
        return (
            hidden * (self.channels + 2 * inner + 2 * self.values)
            + self.channels * self.taps
            + 2 * self.values
            + self.width
        )

    def parts(self) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """Return what the projections consist of: inputs of the convolution with gates, and rates with decays."""
        if self.interleaved:
            unit = 2 * self.dim + 2 * self.per_key * self.width
            pair = Part("heads", 2 * self.values, 2 * self.per_key)
            return (Part("heads", self.keys * unit, unit),), (pair,)
        return self.plain_parts(), tuple(Part(name, self.values, self.per_key) for name in "ba")

    def plain_parts(self) -> tuple[Part, ...]:
        """Return queries, keys, values and gates, one after the other."""
        dim, values = self.dim, self.per_key * self.width
        widths = (("q", dim), ("k", dim), ("v", values), ("z", values))
        return tuple(Part(name, self.keys * width, width) for name, width in widths)

    def split(self, found: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """Return parts of what a projection made, `[T, G, width]` each: views."""
        if self.interleaved:
            return list(torch.split(found.view(len(found), -1, sum(widths)), list(widths), 2))
        keys = found.shape[1] // sum(widths)
        parts = torch.split(found, [keys * width for width in widths], 1)
        return [part.view(len(found), keys, width) for part, width in zip(parts, widths, strict=True)]


class GatedDeltaNet(Mixer):
    """Projections, a short convolution, the fold, a gated norm, and the way out.

    Args:
        config: The model's.
        index: Number of the layer.
        ctx: Device, dtype, rank and path.
        shape: Heads and widths of the whole model.
    """

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext, shape: DeltaShape) -> None:
        super().__init__(index, ctx)
        self.shape, values = shape, shape.per_key * shape.width
        wide, narrow = shape.parts()
        self.qkvz = ctx.linear("qkvz", config.hidden_size, wide, shard="out")
        self.ba = ctx.linear("ba", config.hidden_size, narrow, shard="out")
        self.conv = ConvTaps(shape.taps, shape.plain_parts()[:3], ctx.at("conv"))
        self.a_log, self.dt_bias = (
            HeadNumbers(shape.values, shape.per_key, ctx.at(name)) for name in ("a_log", "dt_bias")
        )
        self._widths = (shape.dim, shape.dim, values, values), (shape.per_key, shape.per_key)
        keys = shape.keys // ctx.parallel.size
        eps = config.norm_eps if shape.norm_eps is None else shape.norm_eps
        self.norm = GatedRMSNorm(keys * shape.per_key, shape.width, eps, ctx)
        self.out = ctx.linear("out", shape.values * shape.width, config.hidden_size, shard="in")
        dims = {"G": keys, "J": shape.per_key, "D": shape.dim, "W": shape.width}
        self._conv, self._prefill = (
            ctx.operation("conv_qkv", **dims, K=shape.taps),
            ctx.operation("gdn_prefill", **dims, rate=shape.rate),
        )
        self._decode = ctx.operation("gdn_decode", **dims, K=shape.taps, rate=shape.rate)

    def forward(
        self,
        x: Stream,
        pieces: Pieces | None,
        batch: ForwardBatch,
        *,
        norm: Norm,
        add: Stream | None = None,
        scale: float = 1.0,
    ) -> Tensor | Stream:
        """Map `[T, H]` to `[T, H]`; `pieces` are the step's, the rest is as for a `Linear`."""
        normed = norm(x.total())
        wide, narrow = self._widths
        inputs = [*self.shape.split(self.qkvz(normed), wide), *self.shape.split(self.ba(normed), narrow)]
        return self.out(self.mix(inputs, batch, pieces), add=add, scale=scale)

    def fold_tokens(self, inputs: Sequence[Tensor], states: States, rows: Tensor, positions: Tensor) -> Tensor:
        weights = self.conv.weight, self.a_log.weight, self.dt_bias.weight, self.norm.weight
        found: Tensor = self._decode(*inputs, rows, positions, *weights, self.norm.eps, states["conv"], states["state"])
        return found

    def fold_requests(
        self, inputs: Sequence[Tensor], states: States, copies: States, pieces: Pieces, saves: Tensor
    ) -> Tensor:
        q, k, v, z, b, a = inputs
        plan = pieces.rows, pieces.starts, pieces.pieces, pieces.table, saves
        x = self._conv(q, k, v, self.conv.weight, None, pieces.lens, *plan, states["conv"], copies["conv"])
        read = self._prefill(x, b, a, self.a_log.weight, self.dt_bias.weight, *plan, states["state"], copies["state"])
        found: Tensor = self.norm(read, z.reshape(read.shape))
        return found


class GatedRMSNorm(Layer):
    """RMS norm of each head, times `act` of a gate; one weight `[W]` for all heads (Gated DeltaNet)."""

    def __init__(self, num_heads: int, size: int, eps: float, ctx: BuildContext, *, act: GateAct = "silu") -> None:
        super().__init__()
        self.weight = self.empty(size, device=ctx.device, dtype=ctx.dtype)
        self.eps = eps
        self._norm: Callable[..., Tensor] = ctx.operation("gated_rms_norm", N=num_heads, W=size, act=act)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map heads and their gates `[T, N, W]` to `[T, N W]`."""
        return self._norm(x, gate, self.weight, self.eps)
