"""GLM-4.5 to 4.7: Llama with a part of each head rotated, and experts as in DeepSeek-V3 behind dense first layers.

Weights: as `Glm4MoeForCausalLM` of transformers writes them. Source: arXiv:2508.06471.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.sdk.config import dense_config, with_missing
from dovetail.sdk.layers.routing import Routing
from dovetail_models.absent import with_absent
from dovetail_models.experts import ExpertModel, expert_groups, needed, num_experts, with_experts


def sigmoid_routing(hf: Mapping[str, Any]) -> Routing:
    """DeepSeek-V3's: sigmoid in float32, a bias for the choice, groups chosen by their best two."""
    return Routing(
        num=num_experts(hf),
        top_k=needed(hf, "num_experts_per_tok"),
        score="sigmoid",
        normalise=bool(hf.get("norm_topk_prob", True)),
        scale=float(hf.get("routed_scaling_factor", 1.0)),
        correction=True,
        is_wide=True,
        **expert_groups(hf),
    )


class Glm4Moe(ExpertModel):
    """Serves `Glm4MoeForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Glm4MoeForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        hf = with_absent(hf, cls.architectures[0])
        qk_norm = bool(hf.get("use_qk_norm", False))
        bias = bool(hf.get("attention_bias", False))
        config = dense_config(hf, has_windows=False, rotates_parts=True, qkv_bias=bias, qk_norm=qk_norm)
        first, inner = int(hf.get("first_k_dense_replace", 0)), needed(hf, "moe_intermediate_size")
        return with_experts(
            config,
            sigmoid_routing(hf),
            inner,
            shared_inner=inner * int(hf.get("n_shared_experts") or 0),
            sparse=[index >= first for index in range(config.num_layers)],
        )


class Glm4vMoeText(Glm4Moe):
    """The text part of GLM-4.5V: biases, and no norm of queries and keys."""

    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        first = {"attention_bias": True, "first_k_dense_replace": 1, "n_shared_experts": 1}
        return super().config_from_hf(with_missing(hf, **first))
