"""MiniMax-M2: OLMoE with a part of each head rotated, and shares by sigmoid, chosen with a bias of each expert.

Weights: as `MiniMaxM2ForCausalLM` of transformers writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.routing import Routing
from dovetail_models.absent import with_absent
from dovetail_models.experts import needed, num_experts, with_experts
from dovetail_models.olmoe import Olmoe


class MiniMaxM2(Olmoe):
    """Serves `MiniMaxM2ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("MiniMaxM2ForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = dense_config(with_absent(hf, cls.architectures[0]), has_windows=False, rotates_parts=True, bias=False)
        if hf.get("rotary_dim") is not None:
            share = int(hf["rotary_dim"]) / config.layers[0].qk_dim
            config = replace(config, rope=replace(config.rope, partial=share))
        routing = Routing(
            num=num_experts(hf), top_k=needed(hf, "num_experts_per_tok"), score="sigmoid", correction=True
        )
        return with_experts(config, routing, config.intermediate_size)
