"""Ministral 3: Mistral whose queries grow with the logarithm of their position.

Weights: as `Ministral3ForCausalLM` of transformers writes them. Source: the model's card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.transformer import LateAttention
from dovetail_models.absent import with_absent
from dovetail_models.llama import DenseDecoder, Llama


class GrowingQueryAttention(LateAttention):
    """Queries at position p are multiplied by `1 + beta * ln(1 + floor(p / original))`."""

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext) -> None:
        super().__init__(config, index, ctx)
        self._beta, self._original = config.extra["query_beta"], config.extra["query_original"]

    def late(self, turned: Tensor, batch: ForwardBatch) -> Tensor:
        growth = 1 + self._beta * torch.log1p(torch.floor(batch.positions / self._original))
        turned[:, : self.hq] *= growth.to(turned.dtype)[:, None, None]
        return turned


class Ministral3Decoder(DenseDecoder):
    """Queries that grow."""

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        return GrowingQueryAttention(config, index, ctx.at("attention"))


class Ministral3(Llama):
    """Serves `Ministral3ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Ministral3ForCausalLM",)
    decoder = Ministral3Decoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        beta, original = given.get("llama_4_scaling_beta"), given.get("original_max_position_embeddings")
        if beta is None or not original:
            raise ModelError(
                "config.json: rope_parameters needs llama_4_scaling_beta and original_max_position_embeddings"
            )
        return dense_config(
            with_absent(hf, cls.architectures[0]), query_beta=float(beta), query_original=float(original)
        )
