"""What encoders share: layers that see the whole text, no cache and no output head, and the heads that score texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext, Stream
from dovetail.contracts.model import CausalLM, ModelPlugin
from dovetail.sdk.layers.decoder import MakeNorm
from dovetail.sdk.layers.embedding import Embedding
from dovetail.sdk.layers.norm import LayerNorm, RMSNorm
from dovetail.sdk.layers.rotary import Rotaries
from dovetail.sdk.layers.transformer import MLP, SelfAttention

SCORES = "ForSequenceClassification"


def encoder_config(config: ModelConfig, hf: Mapping[str, Any], **extra: Any) -> ModelConfig:
    """Return the facts of a decoder as those of an encoder: it sees both ways, keeps nothing and generates nothing."""
    scores = config.architecture.endswith(SCORES)
    return replace(
        config,
        layers=tuple(replace(spec, causal=False) for spec in config.layers),
        generates=False,
        num_labels=num_labels(hf) if scores else 0,
        pool="first",
        tie_word_embeddings=True,  # there is no head of its own
        extra={**config.extra, **extra},
    )


def num_labels(hf: Mapping[str, Any]) -> int:
    """Return how many labels a classifier has; two where nothing is said, as in transformers."""
    names, num = hf.get("id2label"), hf.get("num_labels")
    return len([names[key] for key in names]) if names else int(num or 2)


class EncoderHead(nn.Module):
    """Scores of labels: a matrix, an activation, and another matrix (RoBERTa; BERT calls the first its pooler).

    Args:
        config: The model's.
        ctx: Device, dtype, rank and path.
        act: Between the matrices.
        norm: Behind it.
        bias: On the first matrix.
    """

    def __init__(
        self,
        config: ModelConfig,
        ctx: BuildContext,
        *,
        act: Callable[[Tensor], Tensor] = torch.tanh,
        norm: nn.Module | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.dense = ctx.linear("dense", config.hidden_size, config.hidden_size, bias=bias)
        self.norm, self._act = norm, act
        self.scores = ctx.linear("scores", config.hidden_size, config.num_labels, bias=True)

    def forward(self, pooled: Tensor) -> Tensor:
        """Map `[R, H]` to `[R, N]`."""
        inner = self._act(self.dense(pooled))
        return self.scores(inner if self.norm is None else self.norm(inner))


class LearnedEmbedding(nn.Module):
    """Embeddings of the token, of its place and, where texts come in pairs, of which one it is in; then a norm.

    `offset` is the place of the first token. The one before it is the padding's: tokens of padding that stand in a text
    have it, and are not counted.
    """

    def __init__(self, config: ModelConfig, ctx: BuildContext, *, offset: int = 0) -> None:
        super().__init__()
        num_types = config.extra["num_types"]
        self.tokens = Embedding(config.vocab_size, config.hidden_size, ctx)
        self.places = Embedding(config.max_position_embeddings + offset, config.hidden_size, ctx, shard=None)
        self.types = Embedding(num_types, config.hidden_size, ctx, shard=None) if num_types else None
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, ctx)
        self._offset, self._num_types = offset, num_types

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to `[T, H]`."""
        places = counted(ids, batch, self._offset - 1) if self._offset else batch.positions
        summed = self.tokens(ids) + self.places(places)
        if self.types is not None:
            first = torch.zeros_like(ids) if batch.segments is None else batch.segments
            summed = summed + self.types(first.clamp(max=self._num_types - 1))
        normed: Tensor = self.norm(summed)
        return normed


def counted(ids: Tensor, batch: ForwardBatch, padding: int) -> Tensor:
    """Return each token's place `[T]`: how many of its text are up to it, without padding, behind that one's place."""
    is_real = (ids != padding).long()
    sums = is_real.cumsum(0)
    starts = batch.q_starts[:-1].long()
    lens = batch.q_starts.diff().long()
    before = torch.repeat_interleave(sums[starts] - is_real[starts], lens, output_size=len(ids))
    return (sums - before) * is_real + padding


class SumNormLayer(nn.Module):
    """Layer that normalises the stream itself, each time something was added to it (BERT)."""

    def __init__(
        self, config: ModelConfig, ctx: BuildContext, attention: nn.Module, mlp: nn.Module, *, norm: MakeNorm = RMSNorm
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (norm(config.hidden_size, config.norm_eps, ctx) for _ in range(2))
        self.attention, self.mlp = attention, mlp

    def forward(self, stream: Stream, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Stream:
        """Return the residual stream with this layer's part added."""
        stream = Stream(self.attention_norm(self.attention(stream, rope, batch, add=stream)))
        return Stream(self.mlp_norm(self.mlp(stream, add=stream)))


class Encoder(nn.Module):
    """A stack of layers over an embedding; a relative overrides the class variable or method that makes what differs.

    Where the model scores labels, `classify` is its head.
    """

    block: ClassVar[Callable[..., nn.Module]] = SumNormLayer
    """Where the norms stand."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.embed = self.embedding(config, ctx)
        self.rotary = Rotaries(config, ctx)
        self.layers = nn.ModuleList(
            self.layer(config, index, ctx.at(f"layers.{index}")) for index in range(config.num_layers)
        )
        if config.num_labels:
            self.classify = self.head(config, ctx.at("classify"))

    @staticmethod
    def make_norm(size: int, eps: float, ctx: BuildContext) -> nn.Module:
        """Make any of its norms."""
        return LayerNorm(size, eps, ctx)

    def embedding(self, config: ModelConfig, ctx: BuildContext) -> nn.Module:
        """Make the embedding."""
        return LearnedEmbedding(config, ctx, offset=config.extra.get("offset", 0))

    def layer(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        """Make a layer."""
        attention, mlp = self.attention(config, index, ctx), self.mlp(config, index, ctx)
        return self.block(config, ctx, attention, mlp, norm=self.make_norm)

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        """Make a layer's attention."""
        return SelfAttention(config, index, ctx.at("attention"), qkv_bias=True, out_bias=True)

    def mlp(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        """Make a layer's MLP."""
        return MLP(config, ctx.at("mlp"), bias=True)

    def head(self, config: ModelConfig, ctx: BuildContext) -> nn.Module:
        """Make what scores labels."""
        return EncoderHead(config, ctx)

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to final hidden states `[T, H]`."""
        stream, ropes = Stream(self.embed(ids, batch)), self.rotary(batch.positions)
        for layer, rope in zip(self.layers, ropes, strict=True):
            stream = layer(stream, rope, batch)
        return self.last(stream)

    def last(self, stream: Stream) -> Tensor:
        """Return the final hidden states of what the layers have made."""
        return stream.total()

    def lm_head(self, hidden: Tensor) -> Tensor:
        """An encoder has none.

        Raises:
            ModelError: Always.
        """
        raise ModelError("an encoder has no output head")


class EncoderPlugin(ModelPlugin):
    """A family of encoders: its base, the same below a head of masked language models, and below one that scores.

    The head of a masked language model is not loaded.
    """

    architectures: ClassVar[Sequence[str]] = ()
    encoder: ClassVar[type[Encoder]] = Encoder

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        return cls.encoder(config, ctx)


ACTS: Mapping[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh}
"""Activations of heads, by the names of transformers."""
