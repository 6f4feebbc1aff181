"""Recurrent: a hybrid decoder. Most layers fold all that was said into a state, others look back at it.

A recurrent layer has a short convolution and behind it a gated memory, `m ← a m + (1 - a) x` for each channel. What it
keeps of a request does not grow: the last inputs of the convolution, and the memory in float32. `LayerSpec.state` names
both; the engine gives every request a row of them, and keeps copies, so that a cached prefix can be gone on from.
Qwen3-Next, LFM2 and Mamba hybrids are built like this. `config.json` has the usual keys, `full_attn_idxs`,
`conv_L_cache` (taps of the convolution) and `chunk_size` (tokens that are folded in at once).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts import (
    BuildContext,
    CacheTensor,
    CausalLM,
    ForwardBatch,
    LayerSpec,
    ModelConfig,
    ModelPlugin,
    Norm,
    Part,
    Recurrent,
    Stream,
    WeightRule,
)
from dovetail.contracts.errors import ModelError
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.decoder import DecoderLayer
from dovetail.sdk.layers.embedding import Embedding, LMHead
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.recurrent import State, recur
from dovetail.sdk.layers.rotary import Rotary
from dovetail.sdk.layers.transformer import GatedMLP, SelfAttention

LAYER = r"model\.layers\.(\d+)\."
RULES = (
    WeightRule(r"model\.embed_tokens", "embed"),
    WeightRule(LAYER + r"self_attn\.([qkv])_proj", r"layers.\1.attention.qkv", r"\2"),
    WeightRule(LAYER + r"(?:self_attn\.o|mixer\.out)_proj", r"layers.\1.attention.out"),
    WeightRule(LAYER + r"mixer\.(in_proj|taps)", r"layers.\1.attention.\2"),
    WeightRule(LAYER + r"mlp\.(gate|up)_proj", r"layers.\1.mlp.gate_up", r"\2"),
    WeightRule(LAYER + r"mlp\.down_proj", r"layers.\1.mlp.down"),
    WeightRule(LAYER + r"input_layernorm", r"layers.\1.attention_norm"),
    WeightRule(LAYER + r"post_attention_layernorm", r"layers.\1.mlp_norm"),
    WeightRule(r"(?:model\.)?(norm|lm_head)", r"\1"),
)


class Taps(Matrix):
    """Weights of the convolution, `[K, H]`, of whose channels ranks have some each."""

    weight: Tensor

    def __init__(self, num: int, width: int, ctx: BuildContext) -> None:
        super().__init__(ctx, ctx.path, width, (Part("", num),), "in")
        self.store("weight", ctx.dtype)


class Memory(nn.Module):
    """Convolution and memory of one layer; ranks divide the channels."""

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext) -> None:
        super().__init__()
        self.index, self.chunk, self.num_taps = index, config.extra["chunk"], config.extra["taps"]
        h = config.hidden_size
        self.in_proj = ctx.linear("in_proj", h, [Part(name, h) for name in ("value", "decay", "gate")], shard="out")
        self.taps = Taps(self.num_taps, h, ctx.at("taps"))
        self.out = ctx.linear("out", h, h, shard="in")

    def forward(self, x: Stream, rope: Any, batch: ForwardBatch, *, norm: Norm, add: Stream) -> Tensor | Stream:
        """Add `[T, H]` to the stream."""
        return self.out(recur(self.index, self.in_proj(x, norm=norm), batch, self.fold), add=add)

    def fold(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """Map `[n, t, 3 H]` and the states before it to `[n, t, H]` and those behind it."""
        value, decay, gate = inputs.chunk(3, dim=-1)
        seen, num = torch.cat((state["taps"], value), dim=1), value.shape[1]
        mixed = sum(seen[:, i : i + num] * tap for i, tap in enumerate(self.taps.weight))
        keep, memory, found = F.logsigmoid(decay.float()), state["memory"], []
        fresh = -torch.expm1(keep) * mixed
        for logs, new in zip(keep.split(self.chunk, dim=1), fresh.split(self.chunk, dim=1), strict=True):
            total = logs.cumsum(1)  # what is left of the memory, and of each new token, at each later one
            later = torch.ones(logs.shape[1], logs.shape[1], device=logs.device).tril().bool()[None, :, :, None]
            left = (total[:, :, None] - total[:, None]).masked_fill(~later, float("-inf")).exp()
            found.append(total.exp() * memory[:, None] + (left * new[:, None]).sum(2))
            memory = found[-1][:, -1]
        out = torch.cat(found, dim=1).to(value.dtype) * F.silu(gate)
        return out, {"taps": seen[:, num:], "memory": memory}


class Decoder(nn.Module):
    """Embedding, layers of both kinds, final norm, output head."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.embed = Embedding(config.vocab_size, config.hidden_size, ctx)
        width = max(spec.qk_dim for spec in config.layers)
        self.rotary = Rotary(config.rope, width, config.max_position_embeddings, ctx, config.context_len)
        self.layers = nn.ModuleList()
        for spec in config.layers:
            mixer, at = Memory if spec.state else SelfAttention, ctx.at(f"layers.{spec.index}")
            own = mixer(config, spec.index, at.at("attention"))
            self.layers.append(DecoderLayer(config, ctx, own, GatedMLP(config, at.at("mlp"))))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, ctx)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, ctx, None)

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to final hidden states `[T, H]`."""
        stream, rope = Stream(self.embed(ids)), self.rotary(batch.positions)
        for layer in self.layers:
            stream = layer(stream, rope, batch)
        return self.norm(stream)  # type: ignore[no-any-return]


class RecurrentModel(ModelPlugin):
    """Serves `RecurrentForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("RecurrentForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Translate `config.json`: layers that are not in `full_attn_idxs` are recurrent."""
        try:
            taps, chunk, full = int(hf["conv_L_cache"]), int(hf["chunk_size"]), set(hf["full_attn_idxs"])
        except KeyError as missing:
            raise ModelError(f"config.json: the key {missing} is missing") from None
        config = dense_config(hf, taps=taps, chunk=chunk)
        h = config.hidden_size
        state = CacheTensor("taps", (taps - 1, h), shard=-1), CacheTensor("memory", (h,), "float32", shard=-1)
        folding = LayerSpec(index=0, reach=Recurrent(chunk), state=state)
        layers = tuple(s if s.index in full else replace(folding, index=s.index) for s in config.layers)
        return replace(config, layers=layers)

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        """Build the module; weights are loaded afterwards."""
        return Decoder(config, ctx)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        """Say where each tensor of the checkpoint goes."""
        return RULES
