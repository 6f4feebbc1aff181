"""Bamba: Mamba 2 and a few layers of attention that rotates half of each head, a gated MLP in all.

Weights: as `BambaForCausalLM` of transformers writes them. Source: the models' cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import dense_config, with_missing
from dovetail_models.experts import needed
from dovetail_models.llama import LAYER, Llama
from dovetail_models.mamba2 import (
    ATTENTION,
    MAMBA,
    MambaDecoder,
    MambaShape,
    counted,
    mamba_rules,
    mixed_types,
    with_mamba,
)

FEED_FORWARD = (
    WeightRule(LAYER + r"feed_forward\.(gate|up)_proj", r"layers.\1.mlp.gate_up", r"\2"),
    WeightRule(LAYER + r"feed_forward\.down_proj", r"layers.\1.mlp.down"),
    WeightRule(LAYER + "pre_ff_layernorm", r"layers.\1.mlp_norm"),
    WeightRule(r"model\.final_layernorm", "norm"),
)


class Bamba(Llama):
    """Serves `BambaForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("BambaForCausalLM",)
    batch_invariant = True
    decoder = MambaDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        attends = set(hf.get("attn_layer_indices") or ())
        types = [(ATTENTION if index in attends else MAMBA)[0] for index in range(needed(hf, "num_hidden_layers"))]
        bias, mlp_bias = bool(hf.get("attention_bias", False)), bool(hf.get("mlp_bias", False))
        given = with_missing(hf, partial_rotary_factor=0.5, rms_norm_eps=1e-5)
        config = dense_config(
            given, has_windows=False, rotates_parts=True, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias
        )
        shape = MambaShape.of(hf, inner=int(hf.get("mamba_expand") or 2) * config.hidden_size)
        return counted(with_mamba(config, shape, mixed_types(hf, types)))

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*mamba_rules(LAYER + r"mamba\.", r"layers.\1.attention."), *FEED_FORWARD, *super().weight_map(config))
