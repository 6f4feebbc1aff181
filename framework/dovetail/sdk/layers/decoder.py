"""Decoder layers: where the norms stand around attention and MLP, and what is added to the residual stream when.

Built from parts, so that an architecture chooses its own attention and MLP. Each is told its norm and where its result
belongs: one that has no kernels for that calls `norm(x.total())` itself and returns `add.plus(result)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext, Stream
from dovetail.sdk.layers.norm import RMSNorm

MakeNorm = Callable[[int, float, BuildContext], nn.Module]
"""Makes a norm of a width, an epsilon and a context."""


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer: attention and MLP each add to the residual stream what they make of its norm.

    Args:
        config: The model's.
        ctx: Device, dtype, rank and path.
        attention: Called with the stream, the rotary embedding and the batch.
        mlp: Called with the stream.
        norm: Makes the norms.
        scale: Factor of what is added.
    """

    def __init__(
        self,
        config: ModelConfig,
        ctx: BuildContext,
        attention: nn.Module,
        mlp: nn.Module,
        *,
        norm: MakeNorm = RMSNorm,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.attention_norm = norm(config.hidden_size, config.norm_eps, ctx)
        self.attention = attention
        self.mlp_norm = norm(config.hidden_size, config.norm_eps, ctx)
        self.mlp = mlp
        self._scaled: dict[str, Any] = {} if scale == 1.0 else {"scale": scale}

    def forward(self, stream: Stream, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Stream:
        """Return the residual stream with this layer's part added."""
        stream = self.attention(stream, rope, batch, norm=self.attention_norm, add=stream, **self._scaled)
        added: Stream = self.mlp(stream, norm=self.mlp_norm, add=stream, **self._scaled)
        return added


class _NormedLayer(nn.Module):
    """What the layers below share: their norms, by name, around attention and MLP."""

    norms: ClassVar[tuple[str, ...]] = ("attention_norm", "mlp_norm")
    attention_norm: nn.Module
    mlp_norm: nn.Module

    def __init__(
        self, config: ModelConfig, ctx: BuildContext, attention: nn.Module, mlp: nn.Module, *, norm: MakeNorm = RMSNorm
    ) -> None:
        super().__init__()
        for name in self.norms:
            setattr(self, name, norm(config.hidden_size, config.norm_eps, ctx))
        self.attention, self.mlp = attention, mlp


class SandwichLayer(_NormedLayer):
    """Decoder layer with a norm before and one behind attention and MLP each (Gemma 2, GLM-4)."""

    norms = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
    attention_out_norm: nn.Module
    mlp_out_norm: nn.Module

    def forward(self, stream: Stream, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Stream:
        """Return the residual stream with this layer's part added."""
        attended = self.attention(stream, rope, batch, norm=self.attention_norm)
        stream = stream.plus(self.attention_out_norm(attended))
        return stream.plus(self.mlp_out_norm(self.mlp(stream, norm=self.mlp_norm)))


class PostNormLayer(_NormedLayer):
    """Decoder layer that normalises only what attention and MLP make, before it is added (OLMo 2, EXAONE 4)."""

    def forward(self, stream: Stream, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Stream:
        """Return the residual stream with this layer's part added."""
        stream = stream.plus(self.attention_norm(self.attention(stream, rope, batch)))
        return stream.plus(self.mlp_norm(self.mlp(stream)))


class ParallelLayer(_NormedLayer):
    """Decoder layer whose attention and MLP read the same norm of the stream (Cohere, GPT-J)."""

    norms = ("attention_norm",)

    def forward(self, stream: Stream, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Stream:
        """Return the residual stream with this layer's part added."""
        normed = self.attention_norm(stream.total())
        stream = self.attention(normed, rope, batch, add=stream)
        added: Stream = self.mlp(normed, add=stream)
        return added
