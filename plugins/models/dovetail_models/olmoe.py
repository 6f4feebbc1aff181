"""OLMoE: Llama with experts, an RMS norm over all queries and one over all keys.

Source: arXiv:2409.02060.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import ModelConfig, WeightRule
from dovetail.errors import ModelError
from dovetail.layers import ops
from dovetail.layers.attention import attend
from dovetail.layers.base import Slot
from dovetail.layers.moe import Routing
from dovetail.layers.norm import RMSNorm
from dovetail.layers.rope import head_order
from dovetail.layers.transformer import SelfAttention
from dovetail.runtime.hf_config import dense_config
from dovetail_models.experts import ExpertDecoder, ExpertModel, needed, num_experts, with_experts
from dovetail_models.llama import LAYER

WHOLE_NORM = WeightRule(LAYER + r"self_attn\.([qk])_norm", r"layers.\1.attention.\2_norm")


class HeadsNorm(RMSNorm):
    """RMS norm over all heads at once; `order` is that of a head's rows, see `Part`."""

    def __init__(self, num: int, dim: int, eps: float, ctx: BuildContext, order: tuple[int, ...] | None) -> None:
        super().__init__(num * dim, eps, ctx)
        self._order, self._dim = None if order is None else list(order), dim

    def place(self, slot: Slot, tensor: Tensor) -> Tensor | None:
        return super().place(
            slot, tensor if self._order is None else tensor.view(-1, self._dim)[:, self._order].flatten()
        )


class WholeNormAttention(SelfAttention):
    """Self-attention whose queries, and whose keys, are normalised across all heads before rotation."""

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext, *, qkv_bias: bool, out_bias: bool) -> None:
        super().__init__(config, index, ctx, qkv_bias=qkv_bias, out_bias=out_bias)
        if ctx.parallel.size > 1:
            raise ModelError(f"{config.architecture}: its norms go over the heads of all ranks; use one")
        order = head_order(config.rope_of(index), self.d)
        self.q_norm = HeadsNorm(self.hq, self.d, config.norm_eps, ctx, order)
        self.k_norm = HeadsNorm(self.hk, self.d, config.norm_eps, ctx, order)

    def attend(self, qkv: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        hq, hk, d = self.hq, self.hk, self.d
        q, k, v = torch.split(qkv, [hq * d, hk * d, hk * d], dim=-1)
        qk = torch.cat((self.q_norm(q.contiguous()), self.k_norm(k.contiguous())), dim=-1)
        qk = ops.norm_rotate(qk.view(-1, hq + hk, d), None, 0.0, *rope)
        out: Tensor = attend(self.layer, qk[:, :hq], qk[:, hq:], v.contiguous().view(-1, hk, d), batch)
        return out.view(-1, hq * d)


class OlmoeDecoder(ExpertDecoder):
    """Norms over all heads."""

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        bias = bool(config.extra["bias"])
        return WholeNormAttention(config, index, ctx.at("attention"), qkv_bias=bias, out_bias=bias)


class Olmoe(ExpertModel):
    """Serves `OlmoeForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("OlmoeForCausalLM",)
    decoder = OlmoeDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = dense_config(hf, bias=bool(hf.get("attention_bias", False)))
        normalise = bool(hf.get("norm_topk_prob", False))
        routing = Routing(num=num_experts(hf), top_k=needed(hf, "num_experts_per_tok"), normalise=normalise)
        return with_experts(config, routing, config.intermediate_size)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (WHOLE_NORM, *super().weight_map(config))
