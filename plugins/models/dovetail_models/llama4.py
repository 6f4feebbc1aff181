"""Llama 4, text: attention within chunks, every fourth layer sees all and does not rotate, experts weigh their input.

Weights: as `Llama4ForCausalLM` of transformers writes them, or expert by expert, as quantised ones are. Source: the
model's card and transformers' description.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.cache import Chunk
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import dense_config, without_rope
from dovetail.sdk.layers.moe import MixtureOfExperts
from dovetail.sdk.layers.routing import Routing
from dovetail.sdk.layers.transformer import GatedMLP, LateAttention
from dovetail.sdk.rope_config import interleaved
from dovetail_models.absent import with_absent
from dovetail_models.experts import ExpertDecoder, ExpertModel, needed, num_experts, with_experts
from dovetail_models.llama import LAYER

AT = LAYER + r"feed_forward\."
EXPERTS = r"layers.\1.mlp.experts."
RULES = (
    WeightRule(AT + "router", r"layers.\1.mlp.router"),
    WeightRule(AT + r"experts\.gate_up_proj", EXPERTS + "gate_up", steps=("transpose",)),
    WeightRule(AT + r"experts\.down_proj", EXPERTS + "down", steps=("transpose",)),
    WeightRule(AT + r"experts\.(\d+)\.(gate|up)_proj", EXPERTS + "gate_up", r"\3", r"\2"),
    WeightRule(AT + r"experts\.(\d+)\.down_proj", EXPERTS + "down", expert=r"\2"),
    WeightRule(AT + r"shared_expert\.(gate|up)_proj", r"layers.\1.mlp.shared.gate_up", r"\2"),
    WeightRule(AT + r"shared_expert\.down_proj", r"layers.\1.mlp.shared.down"),
    WeightRule(AT + "(gate|up)_proj", r"layers.\1.mlp.gate_up", r"\2"),
    WeightRule(AT + "down_proj", r"layers.\1.mlp.down"),
)


class Llama4Attention(LateAttention):
    """Queries and keys are normalised behind the rotation; where nothing is rotated, queries grow with the position."""

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext) -> None:
        bias = config.extra["bias"]
        super().__init__(config, index, ctx, qkv_bias=bias, out_bias=bias)
        self._is_rotated = config.rope_of(index).kind != "none"
        self._eps = config.norm_eps if config.extra["has_norm"] and self._is_rotated else None
        self._growth, self._floor = config.extra["query_growth"], config.extra["query_floor"]

    def late(self, turned: Tensor, batch: ForwardBatch) -> Tensor:
        if self._eps is not None:
            wide = turned.float()
            return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)).to(turned.dtype)
        if self._growth and not self._is_rotated:
            grown = torch.log1p(torch.floor((batch.positions + 1.0) / self._floor)) * self._growth + 1.0
            turned[:, : self.hq] = turned[:, : self.hq] * grown[:, None, None]
        return turned


class Llama4Decoder(ExpertDecoder):
    """Experts whose input is weighed, beside one that every token goes through."""

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        return Llama4Attention(config, index, ctx.at("attention"))

    def mlp(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        extra, at = config.extra, ctx.at("mlp")
        if not extra["sparse"][index]:
            return GatedMLP(config, at)
        inner = extra["inner"]
        return MixtureOfExperts(config, at, extra["routing"], inner, shared_inner=inner, weigh="input")


class Llama4(ExpertModel):
    """Serves `Llama4ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Llama4ForCausalLM",)
    batch_invariant = True
    decoder = Llama4Decoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        hf = with_absent(hf, cls.architectures[0])
        num, every = needed(hf, "num_hidden_layers"), int(hf.get("no_rope_layer_interval") or 4)
        rotated = hf.get("no_rope_layers") or [(index + 1) % every != 0 for index in range(num)]
        types = hf.get("layer_types") or ["chunked_attention" if rotates else "full_attention" for rotates in rotated]
        if len(rotated) != num or len(types) != num:
            raise ModelError(f"config.json: no_rope_layers and layer_types have other numbers of entries than {num}")
        inner, step = needed(hf, "intermediate_size"), int(hf.get("interleave_moe_layer_step") or 1)
        sparse = hf.get("moe_layers")
        sparse = set(range(step - 1, num, step) if sparse is None else sparse)
        growth = float(hf.get("attn_scale", 0.1))
        # Without layer_types, which are of another kind here, and with the width of layers without experts.
        dense = {"layer_types": None, "intermediate_size": needed(hf, "intermediate_size_mlp")}
        config = dense_config(
            ChainMap(dense, hf),  # type: ignore[arg-type]
            has_windows=False,
            bias=bool(hf.get("attention_bias", False)),
            has_norm=bool(hf.get("use_qk_norm", True)),
            query_growth=growth if hf.get("attn_temperature_tuning", True) else 0.0,
            query_floor=float(hf.get("floor_scale", 8192)),
        )
        size = hf.get("attention_chunk_size")
        specs = [
            replace(spec, reach=Chunk(int(size))) if kind == "chunked_attention" and size else spec
            for spec, kind in zip(config.layers, types, strict=True)
        ]
        config = without_rope(interleaved(replace(config, layers=tuple(specs))), [not rotates for rotates in rotated])
        routing = Routing(
            num=num_experts(hf), top_k=needed(hf, "num_experts_per_tok"), score="sigmoid", normalise=False
        )
        return with_experts(
            config, routing, inner, shared_inner=inner, sparse=[index in sparse for index in range(num)]
        )

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*RULES, *super().weight_map(config))
