"""Qwen3.5 to 3.8, dense and with experts: as Qwen3-Next, the projections of Gated DeltaNet in plain order.

Weights: as `Qwen3_5ForCausalLM` and `Qwen3_5MoeForCausalLM` of transformers write them. What the hub has takes images,
too; its text part is served by `text_part`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.sdk.config import with_missing
from dovetail.sdk.layers.routing import Routing
from dovetail_models.experts import needed, num_experts, with_experts
from dovetail_models.qwen3_next import DeltaModel, delta_config


class Qwen3_5(DeltaModel):
    """Serves `Qwen3_5ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Qwen3_5ForCausalLM",)
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return delta_config(hf)


class Qwen3_5Moe(DeltaModel):
    """Serves `Qwen3_5MoeForCausalLM`: experts in all layers."""

    architectures: ClassVar[Sequence[str]] = ("Qwen3_5MoeForCausalLM",)
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        inner = needed(hf, "moe_intermediate_size")
        return with_experts(
            delta_config(with_missing(hf, intermediate_size=inner), has_experts=True),  # that of no layer
            Routing(num=num_experts(hf), top_k=needed(hf, "num_experts_per_tok")),
            inner,
            shared_inner=needed(hf, "shared_expert_intermediate_size"),
            has_shared_gate=True,
        )
