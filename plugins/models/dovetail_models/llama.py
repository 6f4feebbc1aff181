"""Llama 2 and 3: pre-norm decoder, grouped key/value heads, rotary positions, gated MLP, no biases by default.

Weights: as `LlamaForCausalLM` of transformers writes them. Source: arXiv:2307.09288, arXiv:2407.21783.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext, Stream
from dovetail.contracts.model import CausalLM, ModelPlugin, WeightRule
from dovetail.sdk.layers.decoder import DecoderLayer
from dovetail.sdk.layers.embedding import Embedding, LMHead
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.rotary import CosSin, Rotaries
from dovetail.sdk.layers.transformer import GatedMLP, SelfAttention
from dovetail_models.absent import with_absent
from dovetail_models.dense import llama_config

LAYER = r"model\.layers\.(\d+)\."
RULES = (
    WeightRule(r"model\.embed_tokens", "embed"),
    WeightRule(LAYER + r"self_attn\.([qkv])_proj", r"layers.\1.attention.qkv", r"\2"),
    WeightRule(LAYER + r"self_attn\.qkv_proj", r"layers.\1.attention.qkv"),
    WeightRule(LAYER + r"self_attn\.o_proj", r"layers.\1.attention.out"),
    WeightRule(LAYER + r"self_attn\.([qk])_norm", r"layers.\1.attention.qk_norm", r"\2"),
    WeightRule(LAYER + r"mlp\.(gate|up)_proj", r"layers.\1.mlp.gate_up", r"\2"),
    WeightRule(LAYER + r"mlp\.gate_up_proj", r"layers.\1.mlp.gate_up"),
    WeightRule(LAYER + r"mlp\.down_proj", r"layers.\1.mlp.down"),
    WeightRule(LAYER + r"input_layernorm", r"layers.\1.attention_norm"),
    WeightRule(LAYER + r"post_attention_layernorm", r"layers.\1.mlp_norm"),
    WeightRule(r"model\.norm", "norm"),
    WeightRule(r".*rotary_emb\.inv_freq", ""),
)


class DenseDecoder(nn.Module):
    """A stack of decoder layers between embedding and output head.

    What differs is in `config.extra`, or a relative overrides the class variable or method that makes it.
    """

    block: ClassVar[Callable[..., nn.Module]] = DecoderLayer
    """Where the norms stand."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.embed = self.embedding(config, ctx)
        self.rotary = Rotaries(config, ctx)
        self.layers = nn.ModuleList(
            self.layer(config, index, ctx.at(f"layers.{index}")) for index in range(self.num_modules(config))
        )
        self.norm = self.make_norm(config.hidden_size, config.norm_eps, ctx)
        self.lm_head = self.head(config, ctx, self.embed if config.tie_word_embeddings else None)

    @staticmethod
    def num_modules(config: ModelConfig) -> int:
        """Count its layers; several specs may be of one."""
        return config.num_layers

    @staticmethod
    def make_norm(size: int, eps: float, ctx: BuildContext) -> nn.Module:
        """Make any of its norms."""
        return RMSNorm(size, eps, ctx)

    def embedding(self, config: ModelConfig, ctx: BuildContext) -> Embedding:
        """Make the embedding of the tokens."""
        return Embedding(config.vocab_size, config.hidden_size, ctx)

    def head(self, config: ModelConfig, ctx: BuildContext, tied: Embedding | None) -> LMHead:
        """Make the output head."""
        return LMHead(config.vocab_size, config.hidden_size, ctx, tied)

    def layer(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        """Make a layer."""
        attention, mlp = self.attention(config, index, ctx), self.mlp(config, index, ctx)
        return self.block(config, ctx, attention, mlp, norm=self.make_norm)

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        """Make a layer's attention."""
        extra = config.extra
        return SelfAttention(
            config,
            index,
            ctx.at("attention"),
            qkv_bias=extra.get("qkv_bias", False),
            out_bias=extra.get("out_bias", False),
            qk_norm=extra.get("qk_norm", False),
        )

    def mlp(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        """Make a layer's MLP."""
        return GatedMLP(config, ctx.at("mlp"), bias=config.extra.get("mlp_bias", False))

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to final hidden states `[T, H]`."""
        stream = Stream(self.embed(ids))
        for layer, given in zip(self.layers, self.given(self.rotary(batch.positions), batch), strict=True):
            stream = layer(stream, given, batch)
        hidden: Tensor = self.norm(stream)
        return hidden

    def given(self, ropes: list[CosSin], batch: ForwardBatch) -> Sequence[Any]:
        """Return what each layer is given beside stream and batch: its cosine and sine."""
        return ropes


class Llama(ModelPlugin):
    """Serves `LlamaForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("LlamaForCausalLM",)
    batch_invariant = True
    decoder: ClassVar[type[DenseDecoder]] = DenseDecoder
    rotates_parts: ClassVar[bool] = False
    has_windows: ClassVar[bool | None] = False
    """Both: see `dense_config`."""

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        given = with_absent(hf, cls.architectures[0])
        return llama_config(given, rotates_parts=cls.rotates_parts, has_windows=cls.has_windows)

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        return cls.decoder(config, ctx)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        tied = config.tie_word_embeddings
        return (*RULES, WeightRule(r"lm_head\.weight", "") if tied else WeightRule("lm_head", "lm_head"))
