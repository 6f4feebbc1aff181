"""Gemma 2: norms around attention and MLP, `1 + w` in each, scores and logits capped, windows in every second layer.

Weights: as `Gemma2ForCausalLM` of transformers writes them. Source: arXiv:2408.00118.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import alternating, dense_config, with_missing
from dovetail.sdk.layers.decoder import SandwichLayer
from dovetail.sdk.layers.embedding import Embedding, LMHead
from dovetail.sdk.layers.norm import ZeroCenteredRMSNorm
from dovetail.sdk.layers.transformer import SelfAttention
from dovetail_models.absent import with_absent
from dovetail_models.llama import LAYER, DenseDecoder, Llama

SANDWICH = (
    WeightRule(LAYER + "post_attention_layernorm", r"layers.\1.attention_out_norm"),
    WeightRule(LAYER + "pre_feedforward_layernorm", r"layers.\1.mlp_norm"),
    WeightRule(LAYER + "post_feedforward_layernorm", r"layers.\1.mlp_out_norm"),
)


class GemmaDecoder(DenseDecoder):
    """Embeddings times the root of their width, rounded as they are."""

    block = SandwichLayer

    @staticmethod
    def make_norm(size: int, eps: float, ctx: BuildContext) -> nn.Module:
        return ZeroCenteredRMSNorm(size, eps, ctx)

    def embedding(self, config: ModelConfig, ctx: BuildContext) -> Embedding:
        scale = torch.tensor(config.hidden_size**0.5).to(ctx.dtype).item()
        return Embedding(config.vocab_size, config.hidden_size, ctx, scale=scale)

    def head(self, config: ModelConfig, ctx: BuildContext, tied: Embedding | None) -> LMHead:
        return LMHead(config.vocab_size, config.hidden_size, ctx, tied, soft_cap=config.extra["logit_cap"])

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        bias, qk_norm = config.extra["bias"], config.extra["qk_norm"]
        at = ctx.at("attention")
        return SelfAttention(config, index, at, qkv_bias=bias, out_bias=bias, qk_norm=qk_norm, qk_norm_offset=1.0)


def gemma_config(hf: Mapping[str, Any], *, qk_norm: bool) -> ModelConfig:
    """Translate what Gemma 2 and 3 have in common; the norm of queries and keys takes the place of a cap of scores."""
    given = with_missing(hf, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True)
    cap, logit_cap = given.get("attn_logit_softcapping"), given.get("final_logit_softcapping")
    return dense_config(
        given,
        scale=float(given.get("query_pre_attn_scalar", 256)) ** -0.5,
        soft_cap=None if cap is None or qk_norm else float(cap),
        bias=bool(given.get("attention_bias", False)),
        logit_cap=None if logit_cap is None else float(logit_cap),
        qk_norm=qk_norm,
    )


class Gemma2(Llama):
    """Serves `Gemma2ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Gemma2ForCausalLM",)
    batch_invariant = True
    decoder = GemmaDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        types = alternating(int(hf.get("num_hidden_layers", 0)), 2)
        return gemma_config(with_missing(with_absent(hf, cls.architectures[0]), layer_types=types), qk_norm=False)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*SANDWICH, *super().weight_map(config))
