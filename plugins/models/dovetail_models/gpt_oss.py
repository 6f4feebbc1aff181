"""gpt-oss: experts with biases and a clamped gate, sinks in attention, windows in every second layer.

Weights: as `GptOssForCausalLM` of transformers writes them in bfloat16. Source: arXiv:2508.10925.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import alternating, dense_config, with_missing
from dovetail.sdk.layers.moe import MixtureOfExperts
from dovetail.sdk.layers.routing import Routing
from dovetail_models.absent import with_absent
from dovetail_models.experts import AT, EXPERTS, ExpertDecoder, ExpertModel, needed, num_experts, with_experts
from dovetail_models.llama import LAYER

GATE = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""What the clamped gate is made with."""
RULES = (
    WeightRule(AT + r"experts\.gate_up_proj", EXPERTS + "gate_up", steps=("transpose", "deinterleave")),
    WeightRule(AT + r"experts\.down_proj", EXPERTS + "down", steps=("transpose",)),
    WeightRule(LAYER + r"self_attn\.sinks", r"layers.\1.attention.sinks"),
)


class GptOssDecoder(ExpertDecoder):
    """Experts with biases and the clamped gate."""

    def mlp(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        routing, inner = config.extra["routing"], config.extra["inner"]
        return MixtureOfExperts(config, ctx.at("mlp"), routing, inner, act="clamped_silu_and_mul", bias=True)


class GptOss(ExpertModel):
    """Serves `GptOssForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("GptOssForCausalLM",)
    decoder = GptOssDecoder
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        hf = with_absent(hf, cls.architectures[0])
        types = alternating(int(hf.get("num_hidden_layers", 0)), 2)
        bias = bool(hf.get("attention_bias", True))
        config = dense_config(with_missing(hf, layer_types=types), sinks=True, qkv_bias=bias, out_bias=bias)
        for key, value in GATE.items():
            if float(hf.get(key, value)) != value:
                raise ModelError(f"config.json: {key} {hf[key]} is not supported; possible: {value}")
        top_k = needed(hf, "num_experts_per_tok")
        if (other := int(hf.get("experts_per_token") or top_k)) != top_k:  # the hub's files have both
            raise ModelError(f"config.json: num_experts_per_tok is {top_k}, and experts_per_token {other}")
        routing = Routing(num=num_experts(hf), top_k=top_k, score="chosen", bias=True)
        return with_experts(config, routing, config.intermediate_size)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*RULES, *super().weight_map(config))
