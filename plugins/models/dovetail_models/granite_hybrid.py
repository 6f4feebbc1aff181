"""Granite 4 H: Mamba 2 and a few layers of attention, Granite's factors, experts beside a shared MLP, or that alone.

Weights: as `GraniteMoeHybridForCausalLM` of transformers writes them. Source: the models' cards.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, cast

from torch import nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import either, with_missing, without_rope
from dovetail.sdk.layers.routing import Routing
from dovetail_models.experts import MOE, ExpertDecoder, ExpertModel, needed, num_experts, with_experts
from dovetail_models.granite import FUSED, GraniteExpertDecoder, granite_config
from dovetail_models.llama import LAYER
from dovetail_models.mamba2 import MambaDecoder, MambaShape, counted, mamba_rules, mixed_types, with_mamba

SHARED = LAYER + r"shared_mlp\."


class GraniteHybridDecoder(MambaDecoder, GraniteExpertDecoder):
    """Mamba 2 or attention, and experts or an MLP."""

    def mlp(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        return super().mlp(config, index, ctx) if config.experts else super(ExpertDecoder, self).mlp(config, index, ctx)


class GraniteMoeHybrid(ExpertModel):
    """Serves `GraniteMoeHybridForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("GraniteMoeHybridForCausalLM",)
    batch_invariant = True
    decoder = GraniteHybridDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        hidden, shared = needed(hf, "hidden_size"), int(hf.get("shared_intermediate_size") or 1024)
        is_mamba = mixed_types(hf, either(hf, "layer_types", "layers_block_type", None))
        given: Any = ChainMap({"layer_types": None, "intermediate_size": shared}, cast("MutableMapping[str, Any]", hf))
        config = granite_config(given)
        if hf.get("position_embedding_type") != "rope":
            config = without_rope(config, [True] * config.num_layers)
        shape = MambaShape.of(hf, inner=int(hf.get("mamba_expand") or 2) * hidden)
        config = with_mamba(config, shape, is_mamba)
        top_k = needed(with_missing(hf, num_experts_per_tok=2), "num_experts_per_tok")
        inner = int(hf.get("intermediate_size") or 0)
        if hf.get("num_local_experts") == 0:  # then these two are there, and mean nothing
            return counted(config)
        routing = Routing(num=num_experts(hf), top_k=top_k, score="chosen")
        return counted(with_experts(config, routing, inner or needed(hf, "intermediate_size"), shared_inner=shared))

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        to = MOE + "shared." if config.experts else MOE
        shared = (
            WeightRule(SHARED + "input_linear", to + "gate_up"),
            WeightRule(SHARED + "output_linear", to + "down"),
        )
        rules = mamba_rules(LAYER + r"mamba\.", r"layers.\1.attention.")
        return (*FUSED, *shared, *rules, *super().weight_map(config))
