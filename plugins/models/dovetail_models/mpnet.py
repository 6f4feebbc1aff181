"""MPNet: RoBERTa with a bias of scores by how far tokens are apart, one for all layers, and no types of text.

No attention backend adds such a bias, and nothing is cached, so its attention is computed here. Weights: as
`MPNetModel`, `MPNetForMaskedLM` and `MPNetForSequenceClassification` of transformers write them.
Source: arXiv:2004.09297; the buckets are T5's, arXiv:1910.10683.

n tokens of a text, Hq heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext, Stream
from dovetail.contracts.model import WeightRule
from dovetail.sdk.layers.embedding import Embedding
from dovetail.sdk.layers.transformer import SelfAttention
from dovetail_models.bert import BODY, LAYER, RULES, UNUSED, bert_config
from dovetail_models.encoder import Encoder, EncoderPlugin
from dovetail_models.roberta import HEAD

NUM_BUCKETS = 32
"""transformers has so many, whatever the config says of the table."""
MAX_DISTANCE = 128
"""Tokens that are further apart share a bucket."""


class BiasedAttention(SelfAttention):
    """Self-attention with a bias of the scores, which stands in place of the rotation."""

    def attend(self, qkv: Tensor, rope: Any, batch: ForwardBatch) -> Tensor:
        """See `SelfAttention.attend`; `rope` has the bias of each text."""
        heads = qkv.view(-1, 3, self.hq, self.d).transpose(0, 2)
        texts = torch.split(heads, batch.q_lens_cpu, dim=2)
        found = [
            F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias, scale=self.layer.scale)[0]
            for (q, k, v), bias in zip((text.unbind(1) for text in texts), rope, strict=True)
        ]
        return torch.cat(found, dim=1).transpose(0, 1).reshape(-1, self.hq * self.d)


class MPNetEncoder(Encoder):
    """Knows how far tokens are apart."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.distance = Embedding(config.extra["num_buckets"], config.layers[0].num_qo_heads, ctx, shard=None)
        self._parallel = ctx.parallel

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        return BiasedAttention(config, index, ctx.at("attention"), qkv_bias=True, out_bias=True)

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        stream, biases = Stream(self.embed(ids, batch)), self.biases(batch)
        for layer in self.layers:
            stream = layer(stream, biases, batch)
        return stream.total()

    def biases(self, batch: ForwardBatch) -> list[Tensor]:
        """Return what is added to the scores of each text, `[Hq, n, n]`; texts of one length share it."""
        table = self.distance.weight.chunk(self._parallel.size, dim=1)[self._parallel.rank]
        made = {num: table[buckets(num, table.device)].permute(2, 0, 1) for num in set(batch.q_lens_cpu)}
        return [made[num] for num in batch.q_lens_cpu]


def buckets(num: int, device: torch.device) -> Tensor:
    """Return the bucket of every pair of tokens `[n, n]`: near ones have their own, far ones by their logarithm."""
    places = torch.arange(num, device=device)
    behind = places[:, None] - places
    half, exact = NUM_BUCKETS // 2, NUM_BUCKETS // 4
    far = torch.log(behind.abs().float() / exact) / math.log(MAX_DISTANCE / exact) * (half - exact)
    # A distance of 0 has no logarithm, and is near.
    bucket = torch.where(behind.abs() < exact, behind.abs(), (exact + far.clamp(min=0).long()).clamp(max=half - 1))
    return bucket + half * (behind < 0)


class MPNet(EncoderPlugin):
    """Serves `MPNetModel` and what stands on it."""

    architectures: ClassVar[Sequence[str]] = ("MPNetModel", "MPNetForMaskedLM", "MPNetForSequenceClassification")
    encoder = MPNetEncoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        num = int(hf.get("relative_attention_num_buckets", NUM_BUCKETS))
        return bert_config(hf, first_place=2, num_types=0, num_buckets=num)  # the padding's place is 1, always

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        own = (
            WeightRule(LAYER + r"attention\.attn\.([qkv])", r"layers.\1.attention.qkv", r"\2"),
            WeightRule(LAYER + r"attention\.attn\.o", r"layers.\1.attention.out"),
            WeightRule(LAYER + r"attention\.LayerNorm", r"layers.\1.attention_norm"),
            WeightRule(BODY + r"encoder\.relative_attention_bias", "distance"),
        )
        return (*(HEAD if config.num_labels else ()), *own, *RULES, UNUSED)
