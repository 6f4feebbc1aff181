"""OLMo: Llama with layer norms that have no weights; queries, keys and values may be clamped.

Weights: as `OlmoForCausalLM` of transformers writes them. Source: arXiv:2402.00838.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts import BuildContext, CausalLM, ForwardBatch, ModelConfig, ModelPlugin, Stream, WeightRule
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.embedding import Embedding, LMHead
from dovetail.sdk.layers.rotary import Rotaries
from dovetail.sdk.layers.transformer import GatedMLP, SelfAttention

LAYER = r"model\.layers\.(\d+)\."
RULES = (
    WeightRule(r"model\.embed_tokens", "embed"),
    WeightRule(LAYER + r"self_attn\.([qkv])_proj", r"layers.\1.attention.qkv", r"\2"),
    WeightRule(LAYER + r"self_attn\.qkv_proj", r"layers.\1.attention.qkv"),
    WeightRule(LAYER + r"self_attn\.o_proj", r"layers.\1.attention.out"),
    WeightRule(LAYER + r"mlp\.(gate|up)_proj", r"layers.\1.mlp.gate_up", r"\2"),
    WeightRule(LAYER + r"mlp\.gate_up_proj", r"layers.\1.mlp.gate_up"),
    WeightRule(LAYER + r"mlp\.down_proj", r"layers.\1.mlp.down"),
    WeightRule(r".*rotary_emb\.inv_freq", ""),
)


class PlainNorm(nn.Module):
    """Layer norm over the last axis without weight and bias, computed in float32."""

    def forward(self, x: Tensor | Stream) -> Tensor:
        """Normalise `[T, H]`; a stream is added up first."""
        x = x.total() if isinstance(x, Stream) else x
        return F.layer_norm(x.float(), x.shape[-1:], eps=1e-5).to(x.dtype)


class OlmoAttention(SelfAttention):
    """Self-attention whose queries, keys and values are clamped before rotation."""

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext) -> None:
        bias = bool(config.extra["bias"])
        super().__init__(config, index, ctx, qkv_bias=bias, out_bias=bias)
        self.clip = config.extra["clip"]

    def attend(self, qkv: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """Map the projection `[T, (Hq + 2 Hk) D]` to `[T, Hq D]`."""
        return super().attend(qkv if self.clip is None else qkv.clamp(-self.clip, self.clip), rope, batch)


class OlmoLayer(nn.Module):
    """Attention and MLP, each of what the norm makes of the stream."""

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext) -> None:
        super().__init__()
        self.norm = PlainNorm()
        self.attention = OlmoAttention(config, index, ctx.at(f"layers.{index}.attention"))
        self.mlp = GatedMLP(config, ctx.at(f"layers.{index}.mlp"))

    def forward(self, stream: Stream, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Stream:
        """Return the residual stream with this layer's part added."""
        stream = self.attention(stream, rope, batch, norm=self.norm, add=stream)
        added: Stream = self.mlp(stream, norm=self.norm, add=stream)
        return added


class Decoder(nn.Module):
    """Embedding, layers, final norm, output head."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.embed = Embedding(config.vocab_size, config.hidden_size, ctx)
        self.rotary = Rotaries(config, ctx)
        self.layers = nn.ModuleList(OlmoLayer(config, index, ctx) for index in range(config.num_layers))
        self.norm = PlainNorm()
        tied = self.embed if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, ctx, tied)

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to final hidden states `[T, H]`."""
        stream, ropes = Stream(self.embed(ids)), self.rotary(batch.positions)
        for layer, rope in zip(self.layers, ropes, strict=True):
            stream = layer(stream, rope, batch)
        hidden: Tensor = self.norm(stream)
        return hidden


class Olmo(ModelPlugin):
    """Serves `OlmoForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("OlmoForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Translate `config.json`."""
        clip = hf.get("clip_qkv")
        bias = bool(hf.get("attention_bias", False))
        return dense_config(hf, bias=bias, clip=None if clip is None else float(clip))

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        """Build the module; weights are loaded afterwards."""
        return Decoder(config, ctx)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        """Say where each tensor of the checkpoint goes."""
        tied = config.tie_word_embeddings
        return (*RULES, WeightRule(r"lm_head\.weight", "") if tied else WeightRule("lm_head", "lm_head"))
