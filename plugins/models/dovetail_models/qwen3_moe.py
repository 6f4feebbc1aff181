"""Qwen3-MoE: Qwen3 with experts in place of the MLP, and no shared one.

Source: arXiv:2505.09388.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from dovetail.contracts.cache import FULL, Window
from dovetail.contracts.config import ModelConfig
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.routing import Routing
from dovetail_models.experts import ExpertModel, needed, num_experts, sparse_layers, with_experts


class Qwen3Moe(ExpertModel):
    """Serves `Qwen3MoeForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Qwen3MoeForCausalLM",)
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        normalise = bool(hf.get("norm_topk_prob", False))  # published checkpoints say true
        bias = bool(hf.get("attention_bias", False))
        windowed = hf.get("sliding_window") if hf.get("use_sliding_window") else None  # then every layer has it
        config = dense_config(hf, has_windows=False, qk_norm=True, qkv_bias=bias, out_bias=bias)
        reach = FULL if windowed is None else Window(int(windowed))
        return with_experts(
            replace(config, layers=tuple(replace(spec, reach=reach) for spec in config.layers)),
            Routing(num=num_experts(hf), top_k=needed(hf, "num_experts_per_tok"), normalise=normalise),
            needed(hf, "moe_intermediate_size"),
            sparse=sparse_layers(hf),
        )
