"""Granite 3 and 4: Llama with factors of embeddings, scores, what layers add, and logits; and the same with experts.

Weights: as `GraniteForCausalLM` and `GraniteMoeForCausalLM` of transformers write them. Source: the models' cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.decoder import DecoderLayer
from dovetail.sdk.layers.embedding import Embedding, LMHead
from dovetail.sdk.layers.routing import Routing
from dovetail_models.experts import AT, EXPERTS, MOE, ExpertDecoder, ExpertModel, needed, num_experts, with_experts
from dovetail_models.llama import DenseDecoder, Llama

FUSED = (
    WeightRule(AT + r"router\.layer", MOE + "router"),
    WeightRule(AT + "input_linear", EXPERTS + "gate_up"),
    WeightRule(AT + "output_linear", EXPERTS + "down"),
)


class GraniteDecoder(DenseDecoder):
    """Factors wherever there may be one."""

    def embedding(self, config: ModelConfig, ctx: BuildContext) -> Embedding:
        return Embedding(config.vocab_size, config.hidden_size, ctx, scale=config.extra["embed_scale"])

    def head(self, config: ModelConfig, ctx: BuildContext, tied: Embedding | None) -> LMHead:
        return LMHead(config.vocab_size, config.hidden_size, ctx, tied, scale=config.extra["logit_scale"])

    def layer(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        attention, mlp = self.attention(config, index, ctx), self.mlp(config, index, ctx)
        return DecoderLayer(config, ctx, attention, mlp, scale=config.extra["residual_scale"])


class GraniteExpertDecoder(GraniteDecoder, ExpertDecoder):
    """The same with experts."""


def granite_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate what both have in common.

    Raises:
        ModelError: Logits would be divided by zero.
    """
    bias, divisor = bool(hf.get("attention_bias", False)), float(hf.get("logits_scaling") or 1.0)
    if divisor == 0:
        raise ModelError("config.json: logits_scaling is 0, and logits are divided by it")
    return dense_config(
        hf,
        has_windows=False,
        scale=float(hf.get("attention_multiplier", 1.0)),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        embed_scale=float(hf.get("embedding_multiplier", 1.0)),
        residual_scale=float(hf.get("residual_multiplier", 1.0)),
        logit_scale=1.0 / divisor,
    )


class Granite(Llama):
    """Serves `GraniteForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("GraniteForCausalLM",)
    decoder = GraniteDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return granite_config(hf)


class GraniteMoe(ExpertModel):
    """Serves `GraniteMoeForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("GraniteMoeForCausalLM",)
    decoder = GraniteExpertDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = granite_config(hf)
        routing = Routing(num=num_experts(hf), top_k=needed(hf, "num_experts_per_tok"), score="chosen")
        return with_experts(config, routing, config.intermediate_size)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*FUSED, *super().weight_map(config))
