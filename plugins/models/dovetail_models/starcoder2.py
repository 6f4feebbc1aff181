"""StarCoder 2: Llama with layer norms, biases, and an MLP without a gate.

Weights: as `Starcoder2ForCausalLM` of transformers writes them. Source: arXiv:2402.19173.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.checkpoint import dense_numel
from dovetail.sdk.config import dense_config, with_missing
from dovetail.sdk.layers.norm import LayerNorm
from dovetail.sdk.layers.transformer import MLP
from dovetail_models.llama import LAYER, DenseDecoder, Llama

PLAIN_MLP = (
    WeightRule(LAYER + r"mlp\.c_fc", r"layers.\1.mlp.up"),
    WeightRule(LAYER + r"mlp\.c_proj", r"layers.\1.mlp.down"),
)


class Starcoder2Decoder(DenseDecoder):
    """Layer norms, and an MLP without a gate."""

    @staticmethod
    def make_norm(size: int, eps: float, ctx: BuildContext) -> nn.Module:
        return LayerNorm(size, eps, ctx)

    def mlp(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        return MLP(config, ctx.at("mlp"), bias=config.extra["mlp_bias"])


class Starcoder2(Llama):
    """Serves `Starcoder2ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Starcoder2ForCausalLM",)
    decoder = Starcoder2Decoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        bias = bool(hf.get("use_bias", True))
        given = with_missing(hf, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True)
        config = dense_config(given, norm_eps="norm_epsilon", qkv_bias=bias, out_bias=bias, mlp_bias=bias)
        gates = config.num_layers * config.hidden_size * config.intermediate_size
        return replace(config, num_params=dense_numel(config) - gates)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*PLAIN_MLP, *super().weight_map(config))
