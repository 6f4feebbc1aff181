"""Qwen3-Next: three layers of Gated DeltaNet to one of gated attention, experts in all, norms centred around zero.

Weights: as `Qwen3NextForCausalLM` of transformers writes them. Those that predict further tokens (`mtp.`) are not used.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

from torch import nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import dense_config, with_missing
from dovetail.sdk.layers.norm import ZeroCenteredRMSNorm
from dovetail.sdk.layers.routing import Routing
from dovetail.sdk.layers.transformer import SelfAttention
from dovetail_models.experts import ExpertDecoder, ExpertModel, needed, num_experts, sparse_layers, with_experts
from dovetail_models.folding import FoldingDecoder
from dovetail_models.gated_delta import RULES, DeltaShape, GatedDeltaNet

LINEAR, FULL = "linear_attention", "full_attention"
UNUSED = r"mtp\..*"


def delta_config(hf: Mapping[str, Any], *, interleaved: bool = False, has_experts: bool = False) -> ModelConfig:
    """Translate everything but the experts; with them, the MLPs of layers are counted by `with_experts`.

    Raises:
        ModelError: As `delta_types`.
    """
    types = delta_types(hf, int(hf.get("full_attention_interval") or 4))
    given: Any = ChainMap({"layer_types": None}, cast("MutableMapping[str, Any]", hf))
    given = with_missing(given, partial_rotary_factor=0.25, head_dim=256)
    bias = bool(hf.get("attention_bias", False))
    config = dense_config(given, has_windows=False, rotates_parts=True, qkv_bias=bias, out_bias=bias)
    shape = DeltaShape.of(hf, interleaved=interleaved)
    layers = [
        shape.spec(spec.index) if kind == LINEAR else spec for spec, kind in zip(config.layers, types, strict=True)
    ]
    counted = replace(config, intermediate_size=0) if has_experts else config
    return replace(config, layers=tuple(layers), num_params=_numel(counted, shape, types), not_loaded=UNUSED,
                   extra={**config.extra, "delta": shape})  # fmt: skip


def delta_types(hf: Mapping[str, Any], every: int) -> list[str]:
    """Return the type of each layer; unless it is said, one of so many attends.

    Raises:
        ModelError: A layer is of another type than these two, or an activation is another one.
    """
    num = needed(hf, "num_hidden_layers")
    types = list(hf.get("layer_types") or (LINEAR if (index + 1) % every else FULL for index in range(num)))
    if len(types) != num or not set(types) <= {LINEAR, FULL} or FULL not in types:
        raise ModelError(
            f"config.json: layer_types is {types}; possible: {num} of {LINEAR} and {FULL}, at least one of these"
        )
    if hf.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act is {hf['hidden_act']!r}; possible: silu")
    return types


def _numel(config: ModelConfig, shape: DeltaShape, types: Sequence[str]) -> int:
    """Count the weights, with a gated MLP in each layer."""
    hidden, spec = config.hidden_size, config.layers[0]
    heads, keys = spec.num_qo_heads, spec.num_kv_heads
    attention = hidden * spec.qk_dim * (3 * heads + 2 * keys) + 2 * spec.qk_dim
    mixers = sum(shape.numel(hidden) if kind == LINEAR else attention for kind in types)
    layer = 3 * hidden * config.intermediate_size + 2 * hidden
    tables = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return mixers + config.num_layers * layer + tables + hidden


class DeltaDecoder(FoldingDecoder, ExpertDecoder):
    """A decoder of Gated DeltaNet and gated attention."""

    @staticmethod
    def make_norm(size: int, eps: float, ctx: BuildContext) -> nn.Module:
        return ZeroCenteredRMSNorm(size, eps, ctx)

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        extra, at = config.extra, ctx.at("attention")
        if config.layer(index).state:
            return GatedDeltaNet(config, index, at, extra["delta"])
        bias = {"qkv_bias": extra["qkv_bias"], "out_bias": extra["out_bias"]}
        return SelfAttention(config, index, at, **bias, qk_norm=True, qk_norm_offset=1.0, gate=True)

    def mlp(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        return super().mlp(config, index, ctx) if config.experts else super(ExpertDecoder, self).mlp(config, index, ctx)


class DeltaModel(ExpertModel):
    """What plugins of such architectures subclass."""

    decoder = DeltaDecoder

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (WeightRule(UNUSED, ""), *RULES, *super().weight_map(config))


class Qwen3Next(DeltaModel):
    """Serves `Qwen3NextForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Qwen3NextForCausalLM",)
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        normalise = bool(hf.get("norm_topk_prob", True))
        return with_experts(
            delta_config(hf, interleaved=True, has_experts=True),
            Routing(num=num_experts(hf), top_k=needed(hf, "num_experts_per_tok"), normalise=normalise),
            needed(hf, "moe_intermediate_size"),
            shared_inner=needed(hf, "shared_expert_intermediate_size"),
            has_shared_gate=True,
            sparse=sparse_layers(hf),
        )
