"""OLMo 3: norms behind attention and MLP, one over all queries and one over all keys, three windows to one full layer.

The rope's kind holds for layers that see everything; windowed ones rotate plainly. Weights: as `Olmo3ForCausalLM` of
transformers writes them. Source: arXiv:2512.13961.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import alternating, dense_config, with_missing
from dovetail.sdk.layers.decoder import PostNormLayer
from dovetail.sdk.rope_config import with_window_ropes
from dovetail_models.absent import with_absent
from dovetail_models.llama import LAYER, DenseDecoder, Llama
from dovetail_models.olmoe import WHOLE_NORM, WholeNormAttention

POST_NORMS = (
    WeightRule(LAYER + "post_attention_layernorm", r"layers.\1.attention_norm"),
    WeightRule(LAYER + "post_feedforward_layernorm", r"layers.\1.mlp_norm"),
)


class Olmo3Decoder(DenseDecoder):
    """Norms behind attention and MLP."""

    block = PostNormLayer

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        bias = config.extra["bias"]
        return WholeNormAttention(config, index, ctx.at("attention"), qkv_bias=bias, out_bias=bias)


class Olmo3(Llama):
    """Serves `Olmo3ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Olmo3ForCausalLM",)
    decoder = Olmo3Decoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        hf = with_absent(hf, cls.architectures[0])
        given = with_missing(hf, layer_types=alternating(int(hf.get("num_hidden_layers", 0)), 4), rope_theta=500000.0)
        config = dense_config(given, bias=bool(hf.get("attention_bias", False)))
        return with_window_ropes(config, theta=float(given["rope_theta"]))

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (WHOLE_NORM, *POST_NORMS, *super().weight_map(config))
