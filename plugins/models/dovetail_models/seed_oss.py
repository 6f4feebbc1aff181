"""Seed-OSS: Llama with biases on the projections of queries, keys and values, and heads of a width of their own.

Weights: as `SeedOssForCausalLM` of transformers writes them. Source: the model's card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.sdk.config import dense_config, with_missing
from dovetail_models.llama import Llama


class SeedOss(Llama):
    """Serves `SeedOssForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("SeedOssForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return dense_config(
            hf if "head_dim" in hf else with_missing(hf, head_dim=128),
            has_windows=False,
            qkv_bias=bool(hf.get("attention_bias", True)),
            out_bias=bool(hf.get("attention_out_bias", False)),
            mlp_bias=bool(hf.get("mlp_bias", False)),
        )
