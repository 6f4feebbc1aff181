"""OLMoE: Llama with experts, an RMS norm over all queries and one over all keys.

Source: arXiv:2409.02060.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.routing import Routing
from dovetail.sdk.layers.transformer import WholeNormAttention
from dovetail_models.absent import with_absent
from dovetail_models.experts import ExpertDecoder, ExpertModel, needed, num_experts, with_experts
from dovetail_models.llama import LAYER

WHOLE_NORM = WeightRule(LAYER + r"self_attn\.([qk])_norm", r"layers.\1.attention.\2_norm")


class OlmoeDecoder(ExpertDecoder):
    """Norms over all heads."""

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        bias = bool(config.extra["bias"])
        return WholeNormAttention(config, index, ctx.at("attention"), qkv_bias=bias, out_bias=bias)


class Olmoe(ExpertModel):
    """Serves `OlmoeForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("OlmoeForCausalLM",)
    decoder = OlmoeDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = dense_config(
            with_absent(hf, cls.architectures[0]), has_windows=False, bias=bool(hf.get("attention_bias", False))
        )
        normalise = bool(hf.get("norm_topk_prob", False))
        routing = Routing(num=num_experts(hf), top_k=needed(hf, "num_experts_per_tok"), normalise=normalise)
        return with_experts(config, routing, config.intermediate_size)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (WHOLE_NORM, *super().weight_map(config))
