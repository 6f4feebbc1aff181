"""LFM2 and LFM2-MoE: short convolutions between two gates, a few layers of attention, an MLP or experts.

Weights: as `Lfm2ForCausalLM` and `Lfm2MoeForCausalLM` of transformers write them. Source: arXiv:2511.23404.

T tokens, H hidden size, K taps. A layer's state is the last K inputs of its convolution.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
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
from dovetail.sdk.checkpoint import dense_numel
from dovetail.sdk.config import dense_config, either, with_missing
from dovetail.sdk.layers.mixer import Mixer, States
from dovetail.sdk.layers.ops.conv import PIECE
from dovetail.sdk.layers.pieces import Pieces
from dovetail.sdk.layers.routing import Routing
from dovetail_models.experts import EXPERTS, MOE, ExpertDecoder, needed, num_experts, with_experts
from dovetail_models.folding import ConvTaps, FoldingDecoder
from dovetail_models.llama import LAYER, Llama

CONV, FULL = "conv", "full_attention"
UNREAD = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta", "use_pos_enc"),
)
"""Keys that transformers does not read either."""
ATTENTION, AT, TO = LAYER + r"self_attn\.", LAYER + r"conv\.", r"layers.\1.attention."
FEED_FORWARD = LAYER + r"feed_forward"
PARTS = {"w1": "gate", "w3": "up"}
RULES = (
    WeightRule(AT + "in_proj", TO + "proj"),
    WeightRule(AT + "conv", TO + "conv"),
    WeightRule(AT + "out_proj", TO + "out"),
    WeightRule(ATTENTION + "out_proj", TO + "out"),
    WeightRule(ATTENTION + "([qk])_layernorm", TO + "qk_norm", r"\2"),
    WeightRule(LAYER + "operator_norm", r"layers.\1.attention_norm"),
    WeightRule(LAYER + "ffn_norm", r"layers.\1.mlp_norm"),
    *(WeightRule(rf"{FEED_FORWARD}\.{name}", MOE + "gate_up", part) for name, part in PARTS.items()),
    WeightRule(FEED_FORWARD + r"\.w2", MOE + "down"),
    WeightRule(FEED_FORWARD + r"\.gate", MOE + "router"),
    WeightRule(FEED_FORWARD, MOE + "router"),  # the correction stands beside the router
    *(
        WeightRule(rf"{FEED_FORWARD}\.experts\.(\d+)\.{name}", EXPERTS + "gate_up", part, r"\2")
        for name, part in PARTS.items()
    ),
    WeightRule(FEED_FORWARD + r"\.experts\.(\d+)\.w2", EXPERTS + "down", expert=r"\2"),
    WeightRule(FEED_FORWARD + r"\.experts\.gate_up_proj", EXPERTS + "gate_up"),
    WeightRule(FEED_FORWARD + r"\.experts\.down_proj", EXPERTS + "down"),
    WeightRule(r"model\.embedding_norm", "norm"),
)


class ConvShape(NamedTuple):
    """Sizes of such a layer.

    Attributes:
        hidden: H.
        taps: K.
        bias: Whether the convolution and both projections have biases.
    """

    hidden: int
    taps: int
    bias: bool

    def spec(self, index: int) -> LayerSpec:
        """Return the layer as data."""
        ring = CacheTensor("conv", (self.taps, self.hidden), shard=1)
        return LayerSpec(index=index, reach=Recurrent(PIECE, in_place=True), state=(ring,))

    def numel(self) -> int:
        """Count a layer's weights."""
        return 4 * self.hidden**2 + self.hidden * self.taps + self.bias * 5 * self.hidden


class ShortConv(Mixer):
    """A projection to inputs and two gates, the convolution, and the way out.

    Args:
        config: The model's.
        index: Number of the layer.
        ctx: Device, dtype, rank and path.
        shape: Sizes of the whole model.
    """

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext, shape: ConvShape) -> None:
        super().__init__(index, ctx)
        hidden, bias, width = shape.hidden, shape.bias, shape.hidden // ctx.parallel.size
        parts = tuple(Part(name, hidden) for name in ("before", "behind", "x"))
        self.proj = ctx.linear("proj", hidden, parts, bias=bias, shard="out")
        self.conv = ConvTaps(shape.taps, (Part("", hidden),), ctx.at("conv"), bias=bias)
        self.out = ctx.linear("out", hidden, hidden, bias=bias, shard="in")
        self._prefill, self._decode = (
            ctx.operation(f"short_conv_{step}", P=width, K=shape.taps, act="none") for step in ("prefill", "decode")
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
        before, behind, value = torch.chunk(self.proj(x, norm=norm), 3, 1)
        return self.out(self.mix((value, before, behind), batch, pieces), add=add, scale=scale)

    def fold_tokens(self, inputs: Sequence[Tensor], states: States, rows: Tensor, positions: Tensor) -> Tensor:
        found: Tensor = self._decode(*inputs, self.conv.weight, self.conv.bias, rows, positions, states["conv"])
        return found

    def fold_requests(
        self, inputs: Sequence[Tensor], states: States, copies: States, pieces: Pieces, saves: Tensor
    ) -> Tensor:
        plan = pieces.lens, pieces.rows, pieces.starts, pieces.pieces, pieces.table, saves
        found: Tensor = self._prefill(*inputs, self.conv.weight, self.conv.bias, *plan, states["conv"], copies["conv"])
        return found


class Lfm2Decoder(FoldingDecoder, ExpertDecoder):
    """A decoder of short convolutions and attention, and of experts where the config says so."""

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        if config.layer(index).state:
            return ShortConv(config, index, ctx.at("attention"), config.extra["conv"])
        return super().attention(config, index, ctx)


class Lfm2(Llama):
    """Serves `Lfm2ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Lfm2ForCausalLM",)
    batch_invariant = True
    decoder = Lfm2Decoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = lfm2_config(hf, adjusted_inner(hf))
        return counted(replace(config, extra={**config.extra, "sparse": (False,) * config.num_layers}))

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*RULES, *super().weight_map(config))


class Lfm2Moe(Lfm2):
    """Serves `Lfm2MoeForCausalLM`: experts behind the first layers."""

    architectures: ClassVar[Sequence[str]] = ("Lfm2MoeForCausalLM",)
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = lfm2_config(hf, needed(hf, "intermediate_size"))
        routing = Routing(
            num=num_experts(hf),
            top_k=int(hf.get("num_experts_per_tok", 4)),
            score="sigmoid",
            normalise=bool(hf.get("norm_topk_prob", True)),
            scale=float(hf.get("routed_scaling_factor", 1.0)),
            correction=bool(hf.get("use_expert_bias", True)),
            least=1e-6,
        )
        dense = int(hf.get("num_dense_layers", 2))
        sparse = [index >= dense for index in range(config.num_layers)]
        return counted(with_experts(config, routing, needed(hf, "moe_intermediate_size"), sparse=sparse))


def adjusted_inner(hf: Mapping[str, Any]) -> int:
    """Return the width between of MLPs: two thirds of what is given, times a factor, up to a multiple."""
    older, inner = hf.get("block_ff_dim"), needed(hf, "intermediate_size")
    inner = inner if older is None else int(older)
    multiple, factor = int(hf.get("block_multiple_of") or 256), float(hf.get("block_ffn_dim_multiplier") or 1.0)
    if hf.get("block_auto_adjust_ff_dim") is False:
        return inner
    return -(-int(factor * (2 * inner // 3)) // multiple) * multiple


def lfm2_config(hf: Mapping[str, Any], inner: int) -> ModelConfig:
    """Translate everything but the experts.

    Raises:
        ModelError: A layer is of another type than these two.
    """
    num, attends = needed(hf, "num_hidden_layers"), hf.get("full_attn_idxs")
    for key in UNREAD:
        hf.get(key)
    attends = range(num) if attends is None else attends
    types = list(hf.get("layer_types") or (FULL if index in attends else CONV for index in range(num)))
    if len(types) != num or not set(types) <= {CONV, FULL}:
        raise ModelError(f"config.json: layer_types is {types}; possible: {num} of {CONV} and {FULL}")
    if (act := either(hf, "hidden_act", "hidden_activation", "silu")) != "silu":
        raise ModelError(f"config.json: hidden_act is {act!r}; possible: silu")
    changed: dict[str, Any] = {"layer_types": None, "intermediate_size": inner}
    tied = hf.get("tie_embedding")
    changed |= {} if tied is None else {"tie_word_embeddings": tied}
    hf.get("tie_word_embeddings")  # does not hold where the other one is there
    given: Any = ChainMap(changed, cast("MutableMapping[str, Any]", hf))
    given = with_missing(given, rope_theta=1e6, tie_word_embeddings=True)
    config = dense_config(given, has_windows=False, norm_eps="norm_eps", qk_norm=True)
    shape = ConvShape(config.hidden_size, int(hf.get("conv_L_cache") or 3), bool(hf.get("conv_bias", False)))
    specs = [shape.spec(spec.index) if kind == CONV else spec for spec, kind in zip(config.layers, types, strict=True)]
    return replace(config, layers=tuple(specs), extra={**config.extra, "conv": shape})


def counted(config: ModelConfig) -> ModelConfig:
    """Add the weights of convolutions, and of the norms of queries and keys, to the others."""
    shape: ConvShape = config.extra["conv"]
    own = sum(shape.numel() if spec.state else 2 * spec.qk_dim for spec in config.layers)
    return replace(config, num_params=dense_numel(config) + own)
