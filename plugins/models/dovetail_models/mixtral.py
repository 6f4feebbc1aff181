"""Mixtral: Mistral with experts in every layer, the best two of eight by softmax.

Source: arXiv:2401.04088.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.routing import Routing
from dovetail_models.absent import with_absent
from dovetail_models.experts import ExpertModel, needed, num_experts, with_experts


class Mixtral(ExpertModel):
    """Serves `MixtralForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("MixtralForCausalLM",)
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = dense_config(with_absent(hf, cls.architectures[0]))
        return with_experts(
            config, Routing(num=num_experts(hf), top_k=needed(hf, "num_experts_per_tok")), config.intermediate_size
        )
