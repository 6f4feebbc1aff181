"""The layers carry families that differ much from Llama: two models written here, against transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext, Norm, Stream
from dovetail.contracts.model import CausalLM, ModelPlugin, WeightRule
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.decoder import DecoderLayer
from dovetail.sdk.layers.embedding import Embedding, LMHead
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.rotary import Rotaries
from dovetail.sdk.layers.transformer import GatedMLP, SelfAttention
from dovetail_models.llama import RULES, Llama
from dovetail_testing import check_class, conformance_class

LAYER = r"model\.layers\.(\d+)\."


class OffsetNorm(RMSNorm):
    """Multiplies by one plus the weight, in float32."""

    def forward(self, x: Tensor | Stream) -> Tensor:
        x = x.total() if isinstance(x, Stream) else x
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


class SandwichLayer(nn.Module):
    """Attention and MLP with a norm before and another behind, outside the fused additions."""

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext) -> None:
        super().__init__()
        norms = [OffsetNorm(config.hidden_size, config.norm_eps, ctx) for _ in range(4)]
        self.before_attention, self.behind_attention, self.before_mlp, self.behind_mlp = norms
        self.attention = SelfAttention(config, index, ctx.at("attention"))
        self.mlp = GatedMLP(config, ctx.at("mlp"))

    def forward(self, stream: Stream, rope: Any, batch: ForwardBatch) -> Stream:
        attended = self.attention(stream, rope, batch, norm=self.before_attention)
        stream = stream.plus(self.behind_attention(attended))
        return stream.plus(self.behind_mlp(self.mlp(stream, norm=self.before_mlp)))


class Sandwich(nn.Module):
    """Scaled embeddings, sandwich layers, capped logits."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.embed = Embedding(config.vocab_size, config.hidden_size, ctx)
        self.rotary = Rotaries(config, ctx)
        self.layers = nn.ModuleList(
            SandwichLayer(config, index, ctx.at(f"layers.{index}")) for index in range(config.num_layers)
        )
        self.norm = OffsetNorm(config.hidden_size, config.norm_eps, ctx)
        tied = self.embed if config.tie_word_embeddings else None
        self.head = LMHead(config.vocab_size, config.hidden_size, ctx, tied)
        self.cap, self.scale = config.extra["final_cap"], torch.tensor(config.hidden_size**0.5, dtype=ctx.dtype)

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        stream, ropes = Stream(self.embed(ids) * self.scale), self.rotary(batch.positions)
        for layer, rope in zip(self.layers, ropes, strict=True):
            stream = layer(stream, rope, batch)
        hidden: Tensor = self.norm(stream)
        return hidden

    def lm_head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.cap * torch.tanh(self.head(hidden) / self.cap)
        return logits


class GemmaLike(ModelPlugin):
    """Gemma 2: windows on every other layer, capped scores and logits, norms around everything."""

    architectures: ClassVar[Sequence[str]] = ("Gemma2ForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        scale = float(hf["query_pre_attn_scalar"]) ** -0.5
        hf.get("use_bidirectional_attention")
        return dense_config(
            hf, scale=scale, soft_cap=hf["attn_logit_softcapping"], final_cap=hf["final_logit_softcapping"]
        )

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        return Sandwich(config, ctx)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        names = {
            "input": "before_attention",
            "post_attention": "behind_attention",
            "pre_feedforward": "before_mlp",
            "post_feedforward": "behind_mlp",
        }
        norms = [WeightRule(rf"{LAYER}{theirs}_layernorm", rf"layers.\1.{ours}") for theirs, ours in names.items()]
        tied = config.tie_word_embeddings
        return [*norms, *RULES, WeightRule(r"lm_head\.weight", "") if tied else WeightRule("lm_head", "head")]


class Router(nn.Module):
    """Softmax over all experts, the best K of them, their shares made one again; then the experts."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        num, self.top_k = config.extra["num_experts"], config.extra["top_k"]
        self.gate: Any = ctx.linear("gate", config.hidden_size, num)
        hidden, inner = config.hidden_size, config.intermediate_size
        self.experts: Any = ctx.experts("experts", num, self.top_k, hidden, inner, act="silu_and_mul")

    def forward(self, x: Stream, *, norm: Norm, add: Stream) -> Stream:
        normed = norm(x.total())
        shares = self.gate(normed).float().softmax(-1)
        weights, ids = shares.topk(self.top_k, dim=-1)
        added: Stream = self.experts(normed, ids, (weights / weights.sum(-1, keepdim=True)).to(normed.dtype), add=add)
        return added


class MixtureDecoder(nn.Module):
    """Llama with experts in place of the MLP."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.embed = Embedding(config.vocab_size, config.hidden_size, ctx)
        self.rotary = Rotaries(config, ctx)
        self.layers = nn.ModuleList(self._layer(config, index, ctx) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, ctx)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, ctx)

    def _layer(self, config: ModelConfig, index: int, ctx: BuildContext) -> DecoderLayer:
        at = ctx.at(f"layers.{index}")
        return DecoderLayer(config, at, SelfAttention(config, index, at.at("attention")), Router(config, at.at("mlp")))

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        stream, ropes = Stream(self.embed(ids)), self.rotary(batch.positions)
        for layer, rope in zip(self.layers, ropes, strict=True):
            stream = layer(stream, rope, batch)
        hidden: Tensor = self.norm(stream)
        return hidden


class Mixture(Llama):
    """Mixtral: its own names for the experts, each by itself; other checkpoints stack them."""

    architectures: ClassVar[Sequence[str]] = ("MixtralForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return dense_config(hf, num_experts=int(hf["num_local_experts"]), top_k=int(hf["num_experts_per_tok"]))

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        return MixtureDecoder(config, ctx)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        at, experts = LAYER + r"block_sparse_moe\.", r"layers.\1.mlp.experts."
        return (
            WeightRule(at + "gate", r"layers.\1.mlp.gate"),
            WeightRule(at + r"experts\.(\d+)\.w1", experts + "gate_up", "gate", r"\2"),
            WeightRule(at + r"experts\.(\d+)\.w3", experts + "gate_up", "up", r"\2"),
            WeightRule(at + r"experts\.(\d+)\.w2", experts + "down", expert=r"\2"),
            *super().weight_map(config),
        )


MODELS: dict[str, tuple[type[ModelPlugin], list[dict[str, Any]]]] = {
    "Gemma2ForCausalLM": (
        GemmaLike,
        [
            {
                "num_hidden_layers": 2,
                "sliding_window": 8,
                "attn_logit_softcapping": 1.5,
                "final_logit_softcapping": 3.0,
                "query_pre_attn_scalar": 24,
                "tie_word_embeddings": True,
                "_attn_implementation": "eager",
            }
        ],
    ),
    "MixtralForCausalLM": (Mixture, [{"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}]),
}


@pytest.mark.parametrize("architecture", MODELS)
def test_a_family_of_another_kind_passes_the_kit(architecture: str) -> None:
    """Logits and greedy tokens equal transformers', and every weight is used."""
    plugin, configs = MODELS[architecture]
    report = check_class(conformance_class("model", plugin_class=plugin, architecture=architecture, configs=configs))
    assert report.passed, report.text()
