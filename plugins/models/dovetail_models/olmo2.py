"""OLMo 2: OLMo 3 without windows, and one rope for all layers.

Weights: as `Olmo2ForCausalLM` of transformers writes them. Source: arXiv:2501.00656.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.sdk.config import dense_config
from dovetail_models.absent import with_absent
from dovetail_models.olmo3 import Olmo3


class Olmo2(Olmo3):
    """Serves `Olmo2ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Olmo2ForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return dense_config(
            with_absent(hf, cls.architectures[0]), has_windows=False, bias=bool(hf.get("attention_bias", False))
        )
