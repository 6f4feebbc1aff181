"""GLM-4: norms around attention and MLP, half of each head rotated, pairs of neighbours.

Weights: as `Glm4ForCausalLM` of transformers writes them. Source: arXiv:2406.12793 and the model's card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import dense_config, with_missing
from dovetail.sdk.layers.decoder import SandwichLayer
from dovetail.sdk.rope_config import interleaved
from dovetail_models.absent import with_absent
from dovetail_models.llama import LAYER, DenseDecoder, Llama

SANDWICH = (
    WeightRule(LAYER + "post_self_attn_layernorm", r"layers.\1.attention_out_norm"),
    WeightRule(LAYER + "post_mlp_layernorm", r"layers.\1.mlp_out_norm"),
)


class SandwichDecoder(DenseDecoder):
    """Norms before and behind attention and MLP."""

    block = SandwichLayer


class Glm4(Llama):
    """Serves `Glm4ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Glm4ForCausalLM",)
    decoder = SandwichDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        given = with_missing(with_absent(hf, cls.architectures[0]), partial_rotary_factor=0.5)
        return interleaved(
            dense_config(given, has_windows=False, rotates_parts=True, qkv_bias=bool(hf.get("attention_bias", True)))
        )

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*SANDWICH, *super().weight_map(config))


class Glm4vText(Glm4):
    """The text part of GLM-4.1V."""

    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return super().config_from_hf(with_missing(hf, rms_norm_eps=1e-5))
