"""Seed-OSS: Llama with biases on the query, key and value projections, and a head dim of its own.

Weights: as `SeedOssForCausalLM` of transformers writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.model import ModelConfig
from dovetail.runtime.hf_config import dense_config
from dovetail_models.llama import Llama


class SeedOss(Llama):
    """Serves `SeedOssForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("SeedOssForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        bias, out = bool(hf.get("attention_bias", True)), bool(hf.get("attention_out_bias", False))
        return dense_config(hf, qkv_bias=bias, out_bias=out, mlp_bias=bool(hf.get("mlp_bias", False)))
