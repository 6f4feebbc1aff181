"""Latent: a decoder with multi-head latent attention, whose cache has one short row for each token.

Keys and values of all heads are products of one latent row: `k = c W_k`, `v = c W_v`. So a query is taken to the space
of the rows instead (`q W_kᵀ`, "absorbed"), every head attends to the rows themselves, and what it finds is taken to its
values by `W_v`: keys and values are never made. Beside the latent row stands one key for the position, rotated and
shared by all heads. `LayerSpec.mixer` says so; cache, memory plan and attention backends follow from it.

Source: DeepSeek-V2, arXiv:2405.04434.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dovetail.contracts import (
    AttentionLayer,
    BuildContext,
    CausalLM,
    ForwardBatch,
    ModelConfig,
    ModelPlugin,
    Norm,
    Part,
    Stream,
    WeightRule,
)
from dovetail.contracts.errors import ModelError
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.attention import attend
from dovetail.sdk.layers.decoder import DecoderLayer
from dovetail.sdk.layers.embedding import Embedding, LMHead
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.rotary import Rotary
from dovetail.sdk.layers.transformer import GatedMLP

KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LAYER = r"model\.layers\.(\d+)\."
RULES = (
    WeightRule(r"model\.embed_tokens", "embed"),
    WeightRule(LAYER + r"self_attn\.(q_proj|kv_a_\w+|kv_b_proj|o_proj)", r"layers.\1.attention.\2"),
    WeightRule(LAYER + r"mlp\.(gate|up)_proj", r"layers.\1.mlp.gate_up", r"\2"),
    WeightRule(LAYER + r"mlp\.down_proj", r"layers.\1.mlp.down"),
    WeightRule(LAYER + r"input_layernorm", r"layers.\1.attention_norm"),
    WeightRule(LAYER + r"post_attention_layernorm", r"layers.\1.mlp_norm"),
    WeightRule(r"model\.norm", "norm"),
    WeightRule("lm_head", "lm_head"),
)


class Heads(Matrix):
    """What makes keys and values of latent rows, `[Hq (nope + v), rank]`: used from both sides, never as it stands."""

    def __init__(self, ctx: BuildContext, rank: int, heads: int, width: int) -> None:
        super().__init__(ctx, ctx.path, rank, (Part("", heads * width, width),), "out")
        self.store("weight", ctx.dtype)
        self.width = width

    def split(self, nope: int) -> tuple[Tensor, ...]:
        """Return `W_k` `[Hq, nope, rank]` and `W_v` `[Hq, v, rank]` of this rank's heads."""
        weight: Tensor = self.weight
        return weight.unflatten(0, (-1, self.width)).split([nope, self.width - nope], dim=1)


class LatentAttention(nn.Module):
    """Attends with absorbed queries over the latent rows; Hq heads, of which ranks have some each."""

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext) -> None:
        super().__init__()
        spec, extra, hidden = config.layer(index), config.extra, config.hidden_size
        self.nope, self.rope, self.rank = extra["qk_nope_head_dim"], extra["qk_rope_head_dim"], spec.v_dim
        width = self.nope + self.rope
        self.q_proj = ctx.linear("q_proj", hidden, (Part("", spec.num_qo_heads * width, width),), shard="out")
        self.kv_a_proj_with_mqa = ctx.linear("kv_a_proj_with_mqa", hidden, spec.qk_dim)
        self.kv_a_layernorm = RMSNorm(self.rank, config.norm_eps, ctx)
        self.kv_b_proj = Heads(ctx.at("kv_b_proj"), self.rank, spec.num_qo_heads, self.nope + extra["v_head_dim"])
        self.o_proj = ctx.linear("o_proj", spec.num_qo_heads * extra["v_head_dim"], hidden, shard="in")
        self.layer = AttentionLayer.of(spec, ctx.parallel.size)
        self.norm_rotate = ctx.operation("norm_rotate", D=self.rope)

    def forward(
        self, x: Stream, rope: tuple[Tensor, Tensor], batch: ForwardBatch, *, norm: Norm, add: Stream
    ) -> Tensor | Stream:
        """Add `[T, H]` to the stream."""
        normed = norm(x.total())
        q = self.q_proj(normed).unflatten(-1, (-1, self.nope + self.rope))
        row, k_rope = self.kv_a_proj_with_mqa(normed).split([self.rank, self.rope], dim=-1)
        turned = self.norm_rotate(torch.cat((q[..., self.nope :], k_rope[:, None]), dim=1), None, 0.0, *rope)
        to_keys, to_values = self.kv_b_proj.split(self.nope)
        absorbed = torch.einsum("thk,hkr->thr", q[..., : self.nope], to_keys)
        key = torch.cat((self.kv_a_layernorm(row.contiguous())[:, None], turned[:, -1:]), dim=-1)
        found = attend(self.layer, torch.cat((absorbed, turned[:, :-1]), dim=-1), key, None, batch)
        values = torch.einsum("thr,hvr->thv", found, to_values)
        return self.o_proj(values.flatten(1), add=add)


class Decoder(nn.Module):
    """Embedding, layers, final norm, output head."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.embed = Embedding(config.vocab_size, config.hidden_size, ctx)
        width = config.extra["qk_rope_head_dim"]
        self.rotary = Rotary(config.rope, width, config.max_position_embeddings, ctx, config.context_len)
        at = [ctx.at(f"layers.{index}") for index in range(config.num_layers)]
        self.layers = nn.ModuleList(
            DecoderLayer(config, ctx, LatentAttention(config, i, c.at("attention")), GatedMLP(config, c.at("mlp")))
            for i, c in enumerate(at)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, ctx)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, ctx, None)

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to final hidden states `[T, H]`."""
        stream, rope = Stream(self.embed(ids)), self.rotary(batch.positions)
        for layer in self.layers:
            stream = layer(stream, rope, batch)
        return self.norm(stream)  # type: ignore[no-any-return]


class Latent(ModelPlugin):
    """Serves `LatentForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("LatentForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Translate `config.json`: one latent row a token, its key a little wider than its value."""
        try:
            rank, nope, rope, v = (int(hf[name]) for name in KEYS)
        except KeyError as missing:
            raise ModelError(f"config.json: the key {missing} is missing") from None
        config = dense_config(hf, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v)
        row: dict[str, Any] = {"mixer": "latent", "num_kv_heads": 1, "qk_dim": rank + rope, "v_dim": rank}
        scale = (nope + rope) ** -0.5
        return replace(config, layers=tuple(replace(spec, **row, scale=scale) for spec in config.layers))

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        """Build the module; weights are loaded afterwards."""
        return Decoder(config, ctx)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        """Say where each tensor of the checkpoint goes."""
        return RULES
