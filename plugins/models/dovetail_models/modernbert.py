"""ModernBERT: an encoder with norms before each part, rotated heads, a gated MLP, and windows in two of three layers.

Weights: as `ModernBertModel`, `ModernBertForMaskedLM` and `ModernBertForSequenceClassification` of transformers write
them. Source: arXiv:2412.13663.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig, Pool
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext, Stream
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import dense_config, with_missing
from dovetail.sdk.layers.decoder import DecoderLayer
from dovetail.sdk.layers.embedding import Embedding
from dovetail.sdk.layers.norm import LayerNorm
from dovetail.sdk.layers.transformer import GatedMLP, SelfAttention
from dovetail.sdk.rope_config import with_window_ropes
from dovetail_models.encoder import ACTS, Encoder, EncoderHead, EncoderPlugin, encoder_config

LAYER = r"(?:model\.)?layers\.(\d+)\."
RULES = (
    WeightRule(r"(?:model\.)?embeddings\.tok_embeddings", "embed.tokens"),
    WeightRule(r"(?:model\.)?embeddings\.norm", "embed.norm"),
    WeightRule(LAYER + r"attn_norm", r"layers.\1.attention_norm"),
    WeightRule(LAYER + r"attn\.Wqkv", r"layers.\1.attention.qkv"),
    WeightRule(LAYER + r"attn\.Wo", r"layers.\1.attention.out"),
    WeightRule(LAYER + r"mlp_norm", r"layers.\1.mlp_norm"),
    WeightRule(LAYER + r"mlp\.Wi", r"layers.\1.mlp.gate_up"),
    WeightRule(LAYER + r"mlp\.Wo", r"layers.\1.mlp.down"),
    WeightRule(r"(?:model\.)?final_norm", "norm"),
)
HEAD = (
    WeightRule(r"head\.dense", "classify.dense"),
    WeightRule(r"head\.norm", "classify.norm"),
    WeightRule("classifier", "classify.scores"),
)
UNUSED = WeightRule(r"(?:head|decoder)\..*", "")
POOLS: dict[str, Pool] = {"cls": "first", "mean": "mean"}


class NormedEmbedding(nn.Module):
    """Embedding of the token and a norm; places are rotations."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.tokens = Embedding(config.vocab_size, config.hidden_size, ctx)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, ctx, bias=config.extra["norm_bias"])

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        normed: Tensor = self.norm(self.tokens(ids))
        return normed


class ModernBertEncoder(Encoder):
    """The first layer has no norm before its attention: the embedding's stands there."""

    block = DecoderLayer

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        self._norm_bias: bool = config.extra["norm_bias"]
        super().__init__(config, ctx)
        self.norm = self._norm(config.hidden_size, config.norm_eps, ctx)

    def _norm(self, size: int, eps: float, ctx: BuildContext) -> LayerNorm:
        return LayerNorm(size, eps, ctx, bias=self._norm_bias)

    def embedding(self, config: ModelConfig, ctx: BuildContext) -> nn.Module:
        return NormedEmbedding(config, ctx)

    def layer(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        bias = bool(config.extra["attention_bias"])
        attention = SelfAttention(config, index, ctx.at("attention"), qkv_bias=bias, out_bias=bias)
        mlp = GatedMLP(config, ctx.at("mlp"), bias=config.extra["mlp_bias"])
        made = DecoderLayer(config, ctx, attention, mlp, norm=self._norm)
        if index == 0:
            made.attention_norm = None  # type: ignore[assignment]
        return made

    def head(self, config: ModelConfig, ctx: BuildContext) -> nn.Module:
        norm = self._norm(config.hidden_size, config.norm_eps, ctx)
        return EncoderHead(config, ctx, act=ACTS[config.extra["head_act"]], norm=norm, bias=config.extra["head_bias"])

    def last(self, stream: Stream) -> Tensor:
        normed: Tensor = self.norm(stream)
        return normed


class ModernBert(EncoderPlugin):
    """Serves `ModernBertModel` and what stands on it."""

    architectures: ClassVar[Sequence[str]] = (
        "ModernBertModel",
        "ModernBertForMaskedLM",
        "ModernBertForSequenceClassification",
    )
    encoder = ModernBertEncoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        every = int(hf.get("global_attn_every_n_layers") or 3)
        num, reach = int(hf.get("num_hidden_layers", 0)), int(hf.get("local_attention") or 128)
        types = ["sliding_attention" if index % every else "full_attention" for index in range(num)]
        # Half of the window lies to either side, and a token sees itself.
        given = with_missing(hf, layer_types=types, hidden_activation="gelu", sliding_window=reach // 2 + 1)
        if hf.get("rope_parameters") is None:
            given = with_missing(given, rope_theta=float(hf.get("global_rope_theta") or 160000.0))
        act, pool = str(hf.get("classifier_activation", "gelu")), str(hf.get("classifier_pooling", "cls"))
        if act not in ACTS or pool not in POOLS:
            possible = f"activations {', '.join(ACTS)}; pooling {', '.join(POOLS)}"
            raise ModelError(
                f"config.json: a classifier of {act!r} and {pool!r} is not supported; possible: {possible}"
            )
        config = dense_config(given, norm_eps="norm_eps", has_windows=True)
        config = with_window_ropes(config, theta=float(hf.get("local_rope_theta") or 10000.0))
        for key in ("position_embedding_type", "layer_norm_eps", "repad_logits_with_grad"):
            hf.get(key)  # in its makers' own files, and without a meaning there
        names = ("norm_bias", "attention_bias", "mlp_bias")
        extra = {"head_act": act, "head_bias": bool(hf.get("classifier_bias", False))}
        extra |= {name: bool(hf.get(name, False)) for name in names}
        made = encoder_config(config, hf, **extra)
        return replace(made, pool=POOLS[pool] if made.num_labels else "first")

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*(HEAD if config.num_labels else ()), *RULES, UNUSED)
