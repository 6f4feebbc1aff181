"""Qwen3, dense: Llama with an RMS norm on every query and key head, and a head dim of its own.

Source: arXiv:2505.09388.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail_models import dense
from dovetail_models.llama import Llama


class Qwen3(Llama):
    """Serves `Qwen3ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Qwen3ForCausalLM",)
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return dense.Qwen3Facts.config_from_hf(hf)
