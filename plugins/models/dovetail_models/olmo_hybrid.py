"""OLMo Hybrid: three layers of Gated DeltaNet to one of attention, each kind with its norms where its family has them.

Rates of the fold reach 2, so that a token may turn around what the state holds of its key. What the hub has rotates
nothing. Weights: as `OlmoHybridForCausalLM` of transformers writes them. Source: the models' cards.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

from torch import nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.checkpoint import dense_numel
from dovetail.sdk.config import dense_config, with_missing, without_rope
from dovetail.sdk.layers.decoder import DecoderLayer, PostNormLayer
from dovetail_models.experts import needed
from dovetail_models.folding import FoldingDecoder
from dovetail_models.gated_delta import AT, RULES, TO, DeltaShape, GatedDeltaNet
from dovetail_models.llama import LAYER, Llama
from dovetail_models.olmo3 import Olmo3Decoder
from dovetail_models.olmoe import WHOLE_NORM
from dovetail_models.qwen3_next import LINEAR, delta_types

NORM_EPS = 1e-5
"""Of the gated norm, whatever the config says."""
UNREAD = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
"""Keys that transformers reads only to make fresh weights."""
DELTA = (
    WeightRule(AT + "([qkv])_proj", TO + "qkvz", r"\2"),
    WeightRule(AT + "g_proj", TO + "qkvz", "z"),
    WeightRule(AT + "([ab])_proj", TO + "ba", r"\2"),
    WeightRule(AT + "([qkv])_conv1d", TO + "conv", r"\2"),
    WeightRule(AT + "o_norm", TO + "norm"),
    WeightRule(AT + "o_proj", TO + "out"),
)
FIRST, SECOND = "(?:input_layernorm|attention_layer_norm)", "(?:post_attention_layernorm|feedforward_layer_norm)"
"""Names of the norms, in either kind of file: the second one stands behind attention, or before an MLP."""


class OlmoHybridDecoder(FoldingDecoder, Olmo3Decoder):
    """Gated DeltaNet with norms before it and the MLP, attention with norms behind it and the MLP."""

    def layer(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        attention, mlp = self.attention(config, index, ctx), self.mlp(config, index, ctx)
        block = DecoderLayer if config.layer(index).state else PostNormLayer
        return block(config, ctx, attention, mlp, norm=self.make_norm)

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        if config.layer(index).state:
            return GatedDeltaNet(config, index, ctx.at("attention"), config.extra["delta"])
        return super().attention(config, index, ctx)


class OlmoHybrid(Llama):
    """Serves `OlmoHybridForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("OlmoHybridForCausalLM",)
    batch_invariant = True
    decoder = OlmoHybridDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        for key in UNREAD:
            hf.get(key)
        types = delta_types(hf, 4)
        given: Any = ChainMap({"layer_types": None}, cast("MutableMapping[str, Any]", hf))
        config = dense_config(given, has_windows=False, bias=bool(hf.get("attention_bias", False)))
        config = config if rotates(hf) else without_rope(config, [True] * len(types))
        shape = cls._shape(hf, config)
        specs = [
            shape.spec(spec.index) if kind == LINEAR else spec for spec, kind in zip(config.layers, types, strict=True)
        ]
        norms = config.layers[0].num_qo_heads * config.layers[0].qk_dim
        norms += config.layers[0].num_kv_heads * config.layers[0].qk_dim
        own = sum(shape.numel(config.hidden_size) if kind == LINEAR else norms for kind in types)
        config = replace(config, layers=tuple(specs))
        return replace(config, num_params=dense_numel(config) + own, extra={**config.extra, "delta": shape})

    @staticmethod
    def _shape(hf: Mapping[str, Any], config: ModelConfig) -> DeltaShape:
        keys = hf.get("linear_num_key_heads") or needed(hf, "num_attention_heads")
        dim = hf.get("linear_key_head_dim") or int(0.75 * config.hidden_size / int(keys))
        absent = {"linear_num_key_heads": keys, "linear_key_head_dim": dim, "linear_value_head_dim": 2 * int(dim)}
        absent["linear_num_value_heads"] = needed(hf, "num_attention_heads")
        turns = hf.get("linear_allow_neg_eigval")
        shape = DeltaShape.of(with_missing(hf, **absent))
        return shape._replace(rate=1.0 if turns is False else 2.0, norm_eps=NORM_EPS)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        attends = "|".join(str(spec.index) for spec in config.layers if not spec.state)
        layer = rf"model\.layers\.({attends})\."
        norms = (
            WeightRule(layer + SECOND, r"layers.\1.attention_norm"),
            WeightRule(layer + "post_feedforward_layernorm", r"layers.\1.mlp_norm"),
            WeightRule(LAYER + FIRST, r"layers.\1.attention_norm"),
            WeightRule(LAYER + SECOND, r"layers.\1.mlp_norm"),
        )
        return (*norms, *DELTA, *RULES, WHOLE_NORM, *super().weight_map(config))


def rotates(hf: Mapping[str, Any]) -> bool:
    """Whether attention rotates: not where the base is there, and null."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    said = rope if "rope_theta" in rope else hf
    return "rope_theta" not in said or said["rope_theta"] is not None
