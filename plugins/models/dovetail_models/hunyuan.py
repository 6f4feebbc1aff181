"""Hunyuan dense, version 1: Llama with a norm of each query and key behind the rotation, not before it.

Weights: as `HunYuanDenseV1ForCausalLM` of transformers writes them. Source: the model's card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.ops.reference import rms_norm
from dovetail.sdk.layers.transformer import LateAttention
from dovetail_models.absent import with_absent
from dovetail_models.llama import LAYER, DenseDecoder, Llama

NORMS = (
    WeightRule(LAYER + r"self_attn\.query_layernorm", r"layers.\1.attention.qk_norm", "q"),
    WeightRule(LAYER + r"self_attn\.key_layernorm", r"layers.\1.attention.qk_norm", "k"),
)


class LateNormAttention(LateAttention):
    """Queries and keys are rotated, then normalised."""

    def late(self, turned: Tensor, batch: ForwardBatch) -> Tensor:
        return turned if self.qk_norm is None else rms_norm(turned, self.qk_norm.weight, self.qk_norm.eps)


class HunYuanDecoder(DenseDecoder):
    """Norms behind the rotation."""

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        bias = config.extra["bias"]
        return LateNormAttention(config, index, ctx.at("attention"), qkv_bias=bias, out_bias=bias, qk_norm=True)


class HunYuanDense(Llama):
    """Serves `HunYuanDenseV1ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("HunYuanDenseV1ForCausalLM",)
    decoder = HunYuanDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = dense_config(
            with_absent(hf, cls.architectures[0]), has_windows=False, bias=bool(hf.get("attention_bias", False))
        )
        given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        if config.rope.kind != "dynamic" or not given.get("alpha"):
            return config
        # Called dynamic, and with a factor of the base that does not depend on the length.
        dim = config.layers[0].qk_dim
        theta = config.rope.theta * float(given["alpha"]) ** (dim / (dim - 2))
        return replace(config, rope=replace(config.rope, kind="default", params={}, theta=theta))

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*NORMS, *super().weight_map(config))
