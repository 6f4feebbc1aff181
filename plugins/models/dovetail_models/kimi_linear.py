"""Kimi-Linear: three layers of Kimi Delta Attention to one of latent attention that rotates nothing, and experts.

Weights: as `KimiLinearForCausalLM` of transformers writes them, or as the hub has them. Source: arXiv:2510.26692.

T tokens, G heads of width D, K taps of a convolution over P = 3 G D channels.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.cache import CacheTensor, Recurrent
from dovetail.contracts.config import LayerSpec, ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext, Norm, Part, Stream
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import either, with_missing, without_rope
from dovetail.sdk.layers.base import Slot
from dovetail.sdk.layers.mixer import Mixer, States
from dovetail.sdk.layers.ops.conv import PIECE
from dovetail.sdk.layers.pieces import Pieces
from dovetail_models.absent import with_absent
from dovetail_models.deepseek import RULES, LatentDecoder, add_experts, check_choice, latent_config
from dovetail_models.experts import ExpertModel, needed
from dovetail_models.folding import ConvTaps, FoldingDecoder, HeadNumbers
from dovetail_models.gated_delta import GatedRMSNorm
from dovetail_models.glm4_moe import sigmoid_routing
from dovetail_models.llama import LAYER

LINEAR, FULL = "linear_attention", "full_attention"
UNREAD = (
    *("head_dim", "rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "use_grouped_topk"),
    "tie_word_embeddings",
)
"""Keys that transformers does not read either: it never ties this family's head."""
SECOND = {
    **{"max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize"},
    **{"n_group": "num_expert_group", "num_experts_per_tok": "num_experts_per_token"},
    **{"n_shared_experts": "num_shared_experts"},
}
"""The hub's names of keys."""


def by_first_name(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return what keys with two names say, under transformers' names; a null says nothing, except of a switch."""
    found = {name: either(hf, name, second, None) for name, second in SECOND.items()}
    return {k: v for k, v in found.items() if v is not None or (k == "norm_topk_prob" and SECOND[k] in hf)}


class KimiShape(NamedTuple):
    """Heads and widths of such a layer.

    Attributes:
        heads: G.
        dim: D.
        taps: K.
        bound: What decays are bounded by in log space; 0: by nothing.
        is_narrow: Whether decays and gates of the output are products of D numbers a token each, or of the stream.
    """

    heads: int
    dim: int
    taps: int
    bound: float = 0.0
    is_narrow: bool = True

    def spec(self, index: int) -> LayerSpec:
        """Return the layer as data."""
        shape = self.heads, self.dim, self.dim
        state = CacheTensor("state", shape, "float32", shard=0, dtypes=("bfloat16", "float16"))
        ring = CacheTensor("conv", (self.taps, 3 * self.heads * self.dim), shard=1)
        return LayerSpec(index=index, reach=Recurrent(PIECE, in_place=True), state=(ring, state))

    def numel(self, hidden: int) -> int:
        """Count a layer's weights."""
        inner = self.heads * self.dim
        made = 2 * self.dim * (hidden + inner) if self.is_narrow else 2 * hidden * inner
        return made + hidden * (4 * inner + self.heads) + inner * (3 * self.taps + 1) + self.heads + self.dim


class HeadDecays(HeadNumbers):
    """A number for each head; checkpoints have `[1, 1, N, 1]`."""

    def slots(self) -> dict[Slot, tuple[int, ...]]:
        return {slot: (1, 1, *shape, 1) for slot, shape in super().slots().items()}

    def place(self, slot: Slot, tensor: Tensor) -> Tensor | None:
        return super().place(slot, tensor.flatten())


class KimiDelta(Mixer):
    """Projections, a short convolution, the fold, a norm with a gate, and the way out.

    Args:
        config: The model's.
        index: Number of the layer.
        ctx: Device, dtype, rank and path.
        shape: Heads and widths of the whole model.
    """

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext, shape: KimiShape) -> None:
        super().__init__(index, ctx)
        hidden, dim, inner = config.hidden_size, shape.dim, shape.heads * shape.dim
        self.dim, parts = dim, tuple(Part(name, inner, dim) for name in "qkv")
        self.qkv = ctx.linear("qkv", hidden, parts, shard="out")
        self.conv = ConvTaps(shape.taps, parts, ctx.at("conv"))
        self.narrow = ctx.linear("narrow", hidden, (Part("f", dim), Part("g", dim))) if shape.is_narrow else None
        source = dim if shape.is_narrow else hidden
        self.decay, self.gate = (
            ctx.linear(name, source, (Part("", inner, dim),), shard="out") for name in ("decay", "gate")
        )
        self.rate = ctx.linear("rate", hidden, shape.heads, shard="out")
        self.a_log = (HeadDecays if shape.is_narrow else HeadNumbers)(shape.heads, 1, ctx.at("a_log"))
        self.dt_bias = HeadNumbers(inner, dim, ctx.at("dt_bias"))
        heads = shape.heads // ctx.parallel.size
        self.norm = GatedRMSNorm(heads, dim, config.norm_eps, ctx, act="sigmoid")
        self.out = ctx.linear("out", inner, hidden, shard="in")
        dims = {"G": heads, "D": dim, "W": dim}
        self._conv = ctx.operation("conv_qkv", **dims, J=1, K=shape.taps)
        self._prefill, self._decode = (
            ctx.operation("kda_prefill", **dims, bound=shape.bound),
            ctx.operation("kda_decode", **dims, K=shape.taps, bound=shape.bound),
        )

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
        f = g = normed
        if self.narrow is not None:
            f, g = (one.contiguous() for one in torch.chunk(self.narrow(normed), 2, 1))
        q, k, v = self.qkv(normed).view(len(normed), 3, -1, self.dim).unbind(1)
        decay, gate = (made.view(len(normed), -1, self.dim) for made in (self.decay(f), self.gate(g)))
        read = self.mix((q, k, v, self.rate(normed), decay), batch, pieces)
        return self.out(self.norm(read, gate), add=add, scale=scale)

    def fold_tokens(self, inputs: Sequence[Tensor], states: States, rows: Tensor, positions: Tensor) -> Tensor:
        weights = self.conv.weight, self.a_log.weight, self.dt_bias.weight
        found: Tensor = self._decode(*inputs, rows, positions, *weights, states["conv"], states["state"])
        return found

    def fold_requests(
        self, inputs: Sequence[Tensor], states: States, copies: States, pieces: Pieces, saves: Tensor
    ) -> Tensor:
        q, k, v, b, f = inputs
        plan = pieces.rows, pieces.starts, pieces.pieces, pieces.table, saves
        x = self._conv(q, k, v, self.conv.weight, None, pieces.lens, *plan, states["conv"], copies["conv"])
        numbers = self.a_log.weight, self.dt_bias.weight
        found: Tensor = self._prefill(x, b, f, *numbers, *plan, states["state"], copies["state"])
        return found


class KimiDecoder(FoldingDecoder, LatentDecoder):
    """A decoder of such layers, latent attention, and experts."""

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        if config.layer(index).state:
            return KimiDelta(config, index, ctx.at("attention"), config.extra["delta"])
        return super().attention(config, index, ctx)


def with_delta(config: ModelConfig, types: Sequence[str], shape: KimiShape) -> ModelConfig:
    """Put such layers in the place of those that attend, where `types` says so."""
    # What `latent_config` counts of a layer, without its norms, goes where another kind stands in its place.
    hidden, num = config.hidden_size, config.num_params or 0
    tables = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    each = (num - tables - hidden) // config.num_layers - 2 * hidden
    specs = [
        shape.spec(spec.index) if kind == LINEAR else spec for spec, kind in zip(config.layers, types, strict=True)
    ]
    total = num + types.count(LINEAR) * (shape.numel(hidden) - each)
    return replace(config, layers=tuple(specs), num_params=total, extra={**config.extra, "delta": shape})


def checked(types: Iterable[str], num: int) -> list[str]:
    """Return the types of so many layers.

    Raises:
        ModelError: There are more or fewer, or one is of another type than these two.
    """
    found = list(types)
    if len(found) != num or not set(found) <= {LINEAR, FULL}:
        raise ModelError(f"config.json: layer_types is {found}; possible: {num} of {LINEAR} and {FULL}")
    return found


class KimiLinear(ExpertModel):
    """Serves `KimiLinearForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("KimiLinearForCausalLM",)
    decoder = KimiDecoder
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        hf = with_absent(hf, cls.architectures[0])
        for key in UNREAD:
            hf.get(key)
        check_choice(hf, "mla_use_nope", True)
        check_choice(hf, "moe_router_activation_func", "sigmoid")
        check_choice(hf, "hidden_act", "silu")
        changed = {"layer_types": None, **dict.fromkeys(UNREAD), **by_first_name(hf)}
        given: Any = ChainMap(changed, cast("MutableMapping[str, Any]", hf))
        given = with_missing(given, first_k_dense_replace=1, n_shared_experts=1)
        config = latent_config(given)
        config = without_rope(config, [True] * config.num_layers)
        return add_experts(with_delta(config, cls._types(hf), cls._shape(hf)), given, sigmoid_routing(given))

    @staticmethod
    def _shape(hf: Mapping[str, Any]) -> KimiShape:
        own = hf.get("linear_attn_config") or {}
        names = (
            ("num_heads", "linear_num_heads", 32),
            ("head_dim", "linear_head_dim", 128),
            ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        )
        heads, dim, taps = (int(own.get(name) or hf.get(second) or default) for name, second, default in names)
        return KimiShape(heads, dim, taps)

    @staticmethod
    def _types(hf: Mapping[str, Any]) -> list[str]:
        """Return the type of each layer.

        Raises:
            ModelError: One is of another type than these two, or none attends.
        """
        num, own = needed(hf, "num_hidden_layers"), hf.get("linear_attn_config") or {}
        types, full = hf.get("layer_types"), own.get("full_attn_layers")
        own.get("kda_layers")  # all others
        if types is None and full is not None:
            types = [FULL if index + 1 in full else LINEAR for index in range(num)]
        return checked(types or (FULL if index and index % 4 == 0 else LINEAR for index in range(num)), num)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        delta = "|".join(str(spec.index) for spec in config.layers if spec.state) or "none"
        at, to = rf"model\.layers\.({delta})\.self_attn\.", r"layers.\1.attention."
        own = (
            WeightRule(at + "([qkv])_proj", to + "qkv", r"\2"),
            WeightRule(at + "([qkv])_conv1d", to + "conv", r"\2"),
            WeightRule(at + "conv1d", to + "conv"),
            WeightRule(at + r"(?:forget_gate\.)?f_a_proj", to + "narrow", "f"),
            WeightRule(at + r"(?:forget_gate\.)?f_b_proj", to + "decay"),
            WeightRule(at + "g_a_proj", to + "narrow", "g"),
            WeightRule(at + "g_b_proj", to + "gate"),
            WeightRule(at + "b_proj", to + "rate"),
            WeightRule(at + r"(?:forget_gate\.)?A_log", to + "a_log"),
            WeightRule(at + r"(?:forget_gate\.)?dt_bias", to + "dt_bias"),
            WeightRule(at + "o_norm", to + "norm"),
            WeightRule(at + "o_proj", to + "out"),
            # transformers writes MLPs under the name of experts, too
            WeightRule(LAYER + r"block_sparse_moe\.(gate|up)_proj", r"layers.\1.mlp.gate_up", r"\2"),
            WeightRule(LAYER + r"block_sparse_moe\.down_proj", r"layers.\1.mlp.down"),
        )
        return (*own, *RULES, *super().weight_map(config))
