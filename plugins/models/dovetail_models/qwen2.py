"""Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections.

Source: arXiv:2407.10671.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail_models import dense
from dovetail_models.llama import Llama


class Qwen2(Llama):
    """Serves `Qwen2ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Qwen2ForCausalLM",)
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return dense.Qwen2Facts.config_from_hf(hf)
