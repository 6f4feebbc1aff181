"""OLMo 2: Llama with the norms behind attention and MLP, and an RMS norm over all queries and one over all keys.

Weights: as `Olmo2ForCausalLM` of transformers writes them. Source: arXiv:2501.00656.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dovetail.contracts import BuildContext, CausalLM, ForwardBatch, ModelConfig, ModelPlugin, Stream, WeightRule
from dovetail.layers import ops
from dovetail.layers.attention import attend
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.norm import RMSNorm, ShardedRMSNorm
from dovetail.layers.rotary import Rotaries
from dovetail.layers.transformer import GatedMLP, SelfAttention
from dovetail.runtime.hf_config import dense_config

LAYER = r"model\.layers\.(\d+)\."
RULES = (
    WeightRule(r"model\.embed_tokens", "embed"),
    WeightRule(LAYER + r"self_attn\.([qkv])_proj", r"layers.\1.attention.qkv", r"\2"),
    WeightRule(LAYER + r"self_attn\.qkv_proj", r"layers.\1.attention.qkv"),
    WeightRule(LAYER + r"self_attn\.o_proj", r"layers.\1.attention.out"),
    WeightRule(LAYER + r"self_attn\.([qk])_norm", r"layers.\1.attention.\2_norm"),
    WeightRule(LAYER + r"mlp\.(gate|up)_proj", r"layers.\1.mlp.gate_up", r"\2"),
    WeightRule(LAYER + r"mlp\.gate_up_proj", r"layers.\1.mlp.gate_up"),
    WeightRule(LAYER + r"mlp\.down_proj", r"layers.\1.mlp.down"),
    WeightRule(LAYER + r"post_attention_layernorm", r"layers.\1.attention_norm"),
    WeightRule(LAYER + r"post_feedforward_layernorm", r"layers.\1.mlp_norm"),
    WeightRule(r"model\.norm", "norm"),
    WeightRule(r".*rotary_emb\.inv_freq", ""),
)


class Olmo2Attention(SelfAttention):
    """Self-attention whose queries, and whose keys, are normalised across all heads before rotation."""

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext) -> None:
        bias = bool(config.extra["bias"])
        super().__init__(config, index, ctx, qkv_bias=bias, out_bias=bias)
        spec, d, ranks = config.layer(index), self.d, ctx.parallel.size
        self.q_norm = ShardedRMSNorm(spec.num_qo_heads * d, config.norm_eps, ctx.at("q_norm"), d)
        copies = max(1, ranks // spec.num_kv_heads)
        self.k_norm = ShardedRMSNorm(spec.num_kv_heads * d, config.norm_eps, ctx.at("k_norm"), d, copies)

    def attend(self, qkv: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """Map the projection `[T, (Hq + 2 Hk) D]` to `[T, Hq D]`."""
        hq, hk, d = self.hq, self.hk, self.d
        q, k, v = qkv.split((hq * d, hk * d, hk * d), dim=-1)
        qk = torch.cat((self.q_norm(q.contiguous()), self.k_norm(k.contiguous())), dim=-1)
        qk = ops.norm_rotate(qk.view(-1, hq + hk, d), None, 0.0, *rope)
        out: Tensor = attend(self.layer, qk[:, :hq], qk[:, hq:], v.contiguous().view(-1, hk, d), batch)
        return out.view(-1, hq * d)


class Olmo2Layer(nn.Module):
    """Attention and MLP, each normalised before it is added."""

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext) -> None:
        super().__init__()
        self.attention = Olmo2Attention(config, index, ctx.at(f"layers.{index}.attention"))
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, ctx)
        self.mlp = GatedMLP(config, ctx.at(f"layers.{index}.mlp"))
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, ctx)

    def forward(self, stream: Stream, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Stream:
        """Return the residual stream with this layer's part added."""
        stream = stream.plus(self.attention_norm(self.attention(stream, rope, batch)))
        return stream.plus(self.mlp_norm(self.mlp(stream)))


class Decoder(nn.Module):
    """Embedding, layers, final norm, output head."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.embed = Embedding(config.vocab_size, config.hidden_size, ctx)
        self.rotary = Rotaries(config, ctx)
        self.layers = nn.ModuleList(Olmo2Layer(config, index, ctx) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, ctx)
        tied = self.embed if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, ctx, tied)

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to final hidden states `[T, H]`."""
        stream, ropes = Stream(self.embed(ids)), self.rotary(batch.positions)
        for layer, rope in zip(self.layers, ropes, strict=True):
            stream = layer(stream, rope, batch)
        hidden: Tensor = self.norm(stream)
        return hidden


class Olmo2(ModelPlugin):
    """Serves `Olmo2ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Olmo2ForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Translate `config.json`."""
        return dense_config(hf, bias=bool(hf.get("attention_bias", False)))

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        """Build the module; weights are loaded afterwards."""
        return Decoder(config, ctx)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        """Say where each tensor of the checkpoint goes."""
        tied = config.tie_word_embeddings
        return (*RULES, WeightRule(r"lm_head\.weight", "") if tied else WeightRule("lm_head", "lm_head"))
