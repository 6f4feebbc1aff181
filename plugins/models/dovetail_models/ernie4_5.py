"""ERNIE 4.5: Llama that rotates pairs of neighbours; and the same with experts, chosen with a bias of each.

Weights: as `Ernie4_5ForCausalLM` and `Ernie4_5_MoeForCausalLM` of transformers write them. Source: the technical report
of ERNIE 4.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import dense_config, with_missing
from dovetail.sdk.layers.routing import Routing
from dovetail.sdk.rope_config import interleaved
from dovetail_models.absent import with_absent
from dovetail_models.experts import AT, MOE, ExpertModel, needed, with_experts
from dovetail_models.llama import Llama

SMALL = 1e-6
"""Shares of chosen experts add up to more, so that a smaller bound never matters."""


def ernie_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate what both have in common."""
    bias = bool(hf.get("use_bias", False))
    given = with_missing(hf, rope_theta=500000.0, tie_word_embeddings=True)
    return interleaved(dense_config(given, has_windows=False, qkv_bias=bias, out_bias=bias, mlp_bias=bias))


class Ernie45(Llama):
    """Serves `Ernie4_5ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Ernie4_5ForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return ernie_config(with_absent(hf, cls.architectures[0]))


class Ernie45Moe(ExpertModel):
    """Serves `Ernie4_5_MoeForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Ernie4_5_MoeForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = ernie_config(with_absent(hf, cls.architectures[0]))
        if float(hf.get("moe_norm_min") or 0) > SMALL:
            raise ModelError(f"config.json: moe_norm_min {hf['moe_norm_min']} is not supported; at most {SMALL}")
        inner, num = needed(hf, "moe_intermediate_size"), config.num_layers
        num_experts, top_k = needed(hf, "moe_num_experts", "num_experts"), needed(hf, "moe_k", "num_experts_per_tok")
        routing = Routing(num=num_experts, top_k=top_k, correction=True, is_wide=True)
        first, last = int(hf.get("moe_layer_start_index", 1)), int(hf.get("moe_layer_end_index", -1))
        last, every = last if last >= 0 else num - 1, int(hf.get("moe_layer_interval") or 1)
        sparse = [first <= index <= last and (index + 1) % every == 0 for index in range(num)]
        shared = inner * int(hf.get("moe_num_shared_experts") or 0)
        return with_experts(config, routing, inner, shared_inner=shared, sparse=sparse)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        correction = WeightRule(AT + "moe_statics", MOE + "router", steps=("flatten",))  # it stands as one row
        return (correction, *super().weight_map(config))
