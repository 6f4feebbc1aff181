"""Command R7B and A: attention and MLP read one layer norm; rotation in windowed layers only, pairs of neighbours.

Weights: as `Cohere2ForCausalLM` of transformers writes them. Source: arXiv:2504.00698.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext
from dovetail.sdk.config import alternating, dense_config, with_missing, without_rope
from dovetail.sdk.layers.decoder import ParallelLayer
from dovetail.sdk.layers.embedding import Embedding, LMHead
from dovetail.sdk.layers.norm import LayerNorm
from dovetail.sdk.rope_config import interleaved
from dovetail_models.absent import with_absent
from dovetail_models.llama import DenseDecoder, Llama


class Cohere2Decoder(DenseDecoder):
    """One norm a layer, without a bias."""

    block = ParallelLayer

    @staticmethod
    def make_norm(size: int, eps: float, ctx: BuildContext) -> nn.Module:
        return LayerNorm(size, eps, ctx, bias=False)

    def head(self, config: ModelConfig, ctx: BuildContext, tied: Embedding | None) -> LMHead:
        return LMHead(config.vocab_size, config.hidden_size, ctx, tied, scale=config.extra["logit_scale"])


class Cohere2(Llama):
    """Serves `Cohere2ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Cohere2ForCausalLM",)
    decoder = Cohere2Decoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        pattern = int(hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 4)
        types = alternating(int(hf.get("num_hidden_layers", 0)), pattern)
        bias = bool(hf.get("attention_bias", False))
        config = dense_config(
            with_missing(with_absent(hf, cls.architectures[0]), layer_types=types, tie_word_embeddings=True),
            norm_eps="layer_norm_eps",
            qkv_bias=bias,
            out_bias=bias,
            logit_scale=float(hf.get("logit_scale", 0.0625)),
        )
        return without_rope(interleaved(config), [spec.sliding_window is None for spec in config.layers])
