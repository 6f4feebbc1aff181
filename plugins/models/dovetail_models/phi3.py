"""Phi-3 and Phi-4: Llama with queries, keys and values in one tensor, gate and up too, and long ropes.

Weights: as `Phi3ForCausalLM` of transformers writes them. Source: arXiv:2404.14219.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail_models.llama import Llama


class Phi3(Llama):
    """Serves `Phi3ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Phi3ForCausalLM",)
    rotates_parts = True
    has_windows = None

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = super().config_from_hf(hf)
        hf.get("original_max_position_embeddings")  # there for every rope, and only the long one goes by it
        return config
