"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and one more that every token goes through, weighed by a gate.

Source: arXiv:2407.10671.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.routing import Routing
from dovetail_models.experts import ExpertModel, needed, num_experts, sparse_layers, with_experts


class Qwen2Moe(ExpertModel):
    """Serves `Qwen2MoeForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Qwen2MoeForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        has_windows = bool(hf.get("use_sliding_window"))  # absent means no, whatever its size
        config = dense_config(hf, has_windows=has_windows, qkv_bias=bool(hf.get("qkv_bias", True)))
        normalise = bool(hf.get("norm_topk_prob", False))
        return with_experts(
            config,
            Routing(num=num_experts(hf), top_k=needed(hf, "num_experts_per_tok"), normalise=normalise),
            needed(hf, "moe_intermediate_size"),
            shared_inner=needed(hf, "shared_expert_intermediate_size"),
            has_shared_gate=True,
            sparse=sparse_layers(hf),
        )
