"""Mamba 2 as a layer: a state that forgets by a step that each token chooses (state space duality).

Source: arXiv:2405.21060. T tokens, G groups with a key and a query of width D (B and C of the paper), each with J heads
of width W; N = G J; K taps of a convolution over P = 2 G D + N W channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.cache import CacheTensor, Recurrent
from dovetail.contracts.config import LayerSpec, ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext, Norm, Part, Stream
from dovetail.contracts.model import WeightRule
from dovetail.sdk.checkpoint import dense_numel
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.mixer import Mixer, States
from dovetail.sdk.layers.ops.conv import PIECE
from dovetail.sdk.layers.pieces import Pieces
from dovetail_models.experts import needed
from dovetail_models.folding import ConvTaps, FoldingDecoder, HeadNumbers, check_silu

MAMBA, ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")
"""Names of types of layers, in either version of transformers."""


def mamba_rules(at: str, to: str) -> tuple[WeightRule, ...]:
    """Return the rules of a layer, whose modules stand in checkpoints behind `at`, and here behind `to`."""
    return (
        WeightRule(at + "in_proj", to + "proj"),
        WeightRule(at + "conv1d", to + "conv", ("v", "k", "q")),
        WeightRule(at + "A_log", to + "a_log"),
        WeightRule(at + "dt_bias", to + "dt_bias"),
        WeightRule(at + "D", to + "skip"),
        WeightRule(at + "norm", to + "norm"),
        WeightRule(at + "out_proj", to + "out"),
    )


def step_limits(given: Sequence[Any]) -> tuple[float, float]:
    """Return the bounds of a step; transformers writes an infinite one as `{"__float__": "Infinity"}`.

    Raises:
        ModelError: They are not two numbers.
    """
    try:
        low, high = (float(one["__float__"] if isinstance(one, Mapping) else one) for one in given)
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"config.json: time_step_limit is {given!r}; possible: two numbers") from None
    return low, high


class MambaShape(NamedTuple):
    """Heads and widths of such a layer.

    Attributes:
        groups: G.
        per_group: J.
        dim: D.
        width: W.
        taps: K.
        low: A step is at least that.
        high: It is at most that.
        conv_bias: Whether the convolution has biases.
        proj_bias: Whether the projection has.
        out_bias: Whether the way out has.
        norm: Whether there is a norm of groups, and whether the gate comes before it or behind.
        factors: Of gates, values, keys, queries, steps, as the projection makes them; none: they are as they are.
    """

    groups: int
    per_group: int
    dim: int
    width: int
    taps: int = 4
    low: float = 0.0
    high: float = math.inf
    conv_bias: bool = True
    proj_bias: bool = False
    out_bias: bool = False
    norm: Literal["gate first", "norm first", "none"] = "gate first"
    factors: tuple[float, ...] = ()

    @classmethod
    def of(cls, hf: Mapping[str, Any], *, inner: int, heads: int = 128, dim: int = 256) -> MambaShape:
        """Read the keys `mamba_…`, which Bamba and its relatives share.

        Args:
            hf: Parsed `config.json`.
            inner: N W, as the rest of the config has it.
            heads: N where the config does not say.
            dim: D where the config does not say.

        Raises:
            ModelError: The heads do not have that width together, or are no multiple of the groups.
        """
        heads, groups = int(hf.get("mamba_n_heads") or heads), int(hf.get("mamba_n_groups") or 1)
        given = hf.get("mamba_d_head") or "auto"
        width = inner // heads if given == "auto" else int(given)
        if width * heads != inner:
            raise ModelError(f"config.json: {heads} mamba_n_heads of {width} numbers (mamba_d_head) are not {inner}")
        if groups < 1 or heads % groups:
            raise ModelError(f"config.json: mamba_n_heads is {heads}; possible: multiples of mamba_n_groups, {groups}")
        low, high = step_limits(hf.get("time_step_limit") or (0.0, math.inf))
        conv_bias, bias = hf.get("mamba_conv_bias"), bool(hf.get("mamba_proj_bias"))
        return cls(
            groups, heads // groups, int(hf.get("mamba_d_state") or dim), width, int(hf.get("mamba_d_conv") or 4),
            low, high, True if conv_bias is None else bool(conv_bias), bias, bias,
        )  # fmt: skip

    @property
    def heads(self) -> int:
        """N."""
        return self.groups * self.per_group

    @property
    def inner(self) -> int:
        """N W."""
        return self.heads * self.width

    @property
    def channels(self) -> int:
        """P."""
        return 2 * self.groups * self.dim + self.inner

    def spec(self, index: int) -> LayerSpec:
        """Return the layer as data."""
        shape = self.heads, self.dim, self.width
        state = CacheTensor("state", shape, "float32", shard=0, dtypes=("bfloat16", "float16"))
        keys = self.groups * self.dim, self.dim
        ring = CacheTensor("conv", (self.taps, self.channels), shard=1, parts=(keys, keys, (self.inner, self.width)))
        return LayerSpec(index=index, reach=Recurrent(PIECE, in_place=True), state=(ring, state))

    def numel(self, hidden: int) -> int:
        """Count a layer's weights."""
        wide, biases = self.channels + self.inner + self.heads, self.conv_bias * self.channels
        biases += self.proj_bias * wide + self.out_bias * hidden
        norm = 0 if self.norm == "none" else self.inner
        return hidden * (wide + self.inner) + self.channels * self.taps + biases + 3 * self.heads + norm

    def parts(self, ranks: int) -> tuple[Part, ...]:
        """Return what the projection consists of: gates, values, keys, queries, steps."""
        repeat = max(1, ranks // self.groups)
        keys = tuple(Part(name, self.groups * self.dim, self.dim, repeat) for name in "kq")
        values = tuple(Part(name, self.inner, self.width) for name in "zv")
        return *values, *keys, Part("dt", self.heads)


class Mamba2(Mixer):
    """A projection, a short convolution, the fold, a gated norm, and the way out.

    Args:
        config: The model's.
        index: Number of the layer.
        ctx: Device, dtype, rank and path.
        shape: Heads and widths of the whole model.
    """

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext, shape: MambaShape) -> None:
        super().__init__(index, ctx)
        hidden, ranks = config.hidden_size, ctx.parallel.size
        parts = shape.parts(ranks)
        self.proj = ctx.linear("proj", hidden, parts, bias=shape.proj_bias, shard="out")
        by_name = {part.name: part for part in parts}
        taps = [by_name[name] for name in "qkv"]
        self.conv = ConvTaps(shape.taps, taps, ctx.at("conv"), bias=shape.conv_bias)
        numbers = (HeadNumbers(shape.heads, 1, ctx.at(name)) for name in ("a_log", "dt_bias", "skip"))
        self.a_log, self.dt_bias, self.skip = numbers
        self._groups, per_group = max(1, shape.groups // ranks), shape.per_group * shape.width
        first, inner = shape.norm == "norm first", shape.inner // ranks
        self.norm: GatedGroupNorm | None = None
        if shape.norm != "none":
            self.norm = GatedGroupNorm(
                shape.groups, per_group, config.norm_eps, ctx.at("norm"), shape.width, norm_first=first
            )
        self._gate = ctx.operation("gated_group_norm", N=1, W=inner, norm_first=first)
        self.out = ctx.linear("out", shape.inner, hidden, bias=shape.out_bias, shard="in")
        heads, keys = shape.heads // ranks, self._groups * shape.dim
        self._widths, self._limits = (inner, inner, keys, keys, heads), (shape.low, shape.high)
        factors = [torch.full((num,), by) for num, by in zip(self._widths, shape.factors, strict=bool(shape.factors))]
        self._factors = torch.cat(factors).to(ctx.device, ctx.dtype) if factors else None
        dims = {"G": self._groups, "J": heads // self._groups, "D": shape.dim, "W": shape.width}
        self._conv = ctx.operation("conv_qkv", **dims, K=shape.taps)
        self._prefill = ctx.operation("ssd_prefill", **dims)
        self._decode = ctx.operation("ssd_decode", **dims, K=shape.taps)

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
        made = self.proj(x, norm=norm)
        made = made if self._factors is None else made * self._factors
        gate, *others = torch.split(made, list(self._widths), 1)
        v, k, q, dt = (one.view(len(one), self._groups, one.shape[1] // self._groups) for one in others)
        read = self.mix((q, k, v, dt), batch, pieces).flatten(1)
        if self.norm is not None:
            return self.out(self.norm(read, gate), add=add, scale=scale)
        return self.out(self._gate(read[:, None], gate[:, None], None, 0.0), add=add, scale=scale)

    @property
    def _weights(self) -> tuple[Tensor | float, ...]:
        return self.a_log.weight, self.dt_bias.weight, self.skip.weight, *self._limits

    def fold_tokens(self, inputs: Sequence[Tensor], states: States, rows: Tensor, positions: Tensor) -> Tensor:
        taps = self.conv.weight, self.conv.bias
        found: Tensor = self._decode(*inputs, rows, positions, *taps, *self._weights, states["conv"], states["state"])
        return found

    def fold_requests(
        self, inputs: Sequence[Tensor], states: States, copies: States, pieces: Pieces, saves: Tensor
    ) -> Tensor:
        q, k, v, dt = inputs
        plan = pieces.rows, pieces.starts, pieces.pieces, pieces.table, saves
        taps = self.conv.weight, self.conv.bias
        x = self._conv(q, k, v, *taps, pieces.lens, *plan, states["conv"], copies["conv"])
        found: Tensor = self._prefill(x, dt, *self._weights, *plan, states["state"], copies["state"])
        return found


def mixed_types(hf: Mapping[str, Any], types: Sequence[str] | None) -> list[bool]:
    """Return for each layer whether it is one of Mamba 2, by the names of either version of transformers.

    Raises:
        ModelError: A layer is of another type, or none is attention.
    """
    num = needed(hf, "num_hidden_layers")
    given = list(types or [MAMBA[0]] * num)
    if len(given) != num or not set(given) <= {*MAMBA, *ATTENTION} or not set(given) & set(ATTENTION):
        raise ModelError(
            f"config.json: layer_types is {given}; possible: {num} of {MAMBA[0]} and {ATTENTION[0]}, not all the first"
        )
    return [kind in MAMBA for kind in given]


def with_mamba(config: ModelConfig, shape: MambaShape, is_mamba: Sequence[bool]) -> ModelConfig:
    """Replace attention by Mamba 2 in the layers where `is_mamba` is true; their weights are still to be `counted`."""
    check_silu(config)
    layers = [shape.spec(spec.index) if mixed else spec for spec, mixed in zip(config.layers, is_mamba, strict=True)]
    return replace(config, layers=tuple(layers), extra={**config.extra, "mamba": shape})


def counted(config: ModelConfig) -> ModelConfig:
    """Add the weights of layers of Mamba 2 to those of the others."""
    num = sum(bool(spec.state) for spec in config.layers)
    shape: MambaShape = config.extra["mamba"]
    return replace(config, num_params=dense_numel(config) + num * shape.numel(config.hidden_size))


class MambaDecoder(FoldingDecoder):
    """A decoder of layers of Mamba 2, and of others where the config says so."""

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        if config.layer(index).state:
            return Mamba2(config, index, ctx.at("attention"), config.extra["mamba"])
        return super().attention(config, index, ctx)


class GatedGroupNorm(Matrix):
    """RMS norm over each group's heads, of what is multiplied by the SiLU of a gate (Mamba 2).

    Args:
        groups: Of the whole model, as all here.
        size: Numbers of a group.
        eps: Added to the mean square.
        ctx: Device, dtype, rank and path.
        unit: Numbers that stay together when ranks divide them: a head's.
        norm_first: The gate comes behind the norm.
    """

    weight: Tensor

    def __init__(
        self, groups: int, size: int, eps: float, ctx: BuildContext, unit: int, *, norm_first: bool = False
    ) -> None:
        super().__init__(ctx, ctx.path, 1, (Part("", groups * size, unit),), "out")
        self.store("weight", ctx.dtype, granule=None)
        self.eps, self._size, self._norm_first = eps, size, norm_first
        self._groups = max(1, self.local_out // size)
        width, options = self.local_out // self._groups, {"norm_first": norm_first}
        self._norm: Callable[..., Tensor] = ctx.operation("gated_group_norm", N=self._groups, W=width, **options)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map `[T, F]` and gates `[T, F]`, this rank's numbers, to `[T, F]`."""
        heads = self._by_group(x), self._by_group(gate)
        if self.local_out >= self._size:
            return self._norm(*heads, self.weight.view(self._groups, -1), self.eps)
        gated = x if self._norm_first else self._norm(*heads, None, self.eps)
        squares = gated.float().square().sum(-1, keepdim=True)
        ranks = self._size // self.local_out  # that have a group together
        first = self.parallel.rank // ranks * ranks
        total = self.parallel.join(squares)[:, first : first + ranks].sum(-1, keepdim=True)
        normed = (gated.float() * torch.rsqrt(total / self._size + self.eps)).to(x.dtype) * self.weight
        if not self._norm_first:
            return normed
        return self._norm(self._by_group(normed), heads[1], None, self.eps)

    def _by_group(self, x: Tensor) -> Tensor:
        return x.view(len(x), self._groups, self.local_out // self._groups)
