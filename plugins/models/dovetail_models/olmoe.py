"""OLMoE: Llama with experts, an RMS norm over all queries and one over all keys.

Source: arXiv:2409.02060.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext, Part
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.attention import attend
from dovetail.sdk.layers.matrix import Matrix
from dovetail.sdk.layers.ops.reference import NormKernel
from dovetail.sdk.layers.rope import head_order
from dovetail.sdk.layers.routing import Routing
from dovetail.sdk.layers.transformer import SelfAttention
from dovetail_models.absent import with_absent
from dovetail_models.experts import ExpertDecoder, ExpertModel, needed, num_experts, with_experts
from dovetail_models.llama import LAYER

WHOLE_NORM = WeightRule(LAYER + r"self_attn\.([qk])_norm", r"layers.\1.attention.\2_norm")


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
        config = dense_config(
            with_absent(hf, cls.architectures[0]), has_windows=False, bias=bool(hf.get("attention_bias", False))
        )
        normalise = bool(hf.get("norm_topk_prob", False))
        routing = Routing(num=num_experts(hf), top_k=needed(hf, "num_experts_per_tok"), normalise=normalise)
        return with_experts(config, routing, config.intermediate_size)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (WHOLE_NORM, *super().weight_map(config))


class ShardedRMSNorm(Matrix):
    """RMS norm over all heads' numbers `[T, size]`, of which every rank has some.

    Args:
        size: Of the whole model.
        eps: Added to the mean square.
        ctx: Device, dtype, rank and path.
        unit: Numbers that stay together: a head's.
        repeat: Ranks that have the same head, where there are fewer heads than ranks.
        order: Of a head's numbers: see `Part`.
    """

    weight: Tensor

    def __init__(
        self,
        size: int,
        eps: float,
        ctx: BuildContext,
        unit: int,
        repeat: int = 1,
        order: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(ctx, ctx.path, 1, (Part("", size, unit, repeat, order),), "out")
        self.store("weight", ctx.dtype, granule=None)
        self.eps, self._num = eps, size * repeat
        self._norm: NormKernel = ctx.operation("rms_norm", H=self.local_out)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise this rank's share by the mean square of all."""
        if self.parallel.size == 1:
            return self._norm(x, self.weight, self.eps)
        wide = x.float()
        squares = self.parallel.sum(wide.square().sum(-1, keepdim=True))
        return (wide * torch.rsqrt(squares / self._num + self.eps)).to(x.dtype) * self.weight


class WholeNormAttention(SelfAttention):
    """Self-attention whose queries, and whose keys, are normalised across all heads before rotation (OLMo 2)."""

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext, **bias: bool) -> None:
        super().__init__(config, index, ctx, **bias)
        spec, ranks, order = config.layer(index), ctx.parallel.size, head_order(config.rope_of(index), self.d)
        copies, size, eps = max(1, ranks // spec.num_kv_heads), spec.num_kv_heads * self.d, config.norm_eps
        self.q_norm = ShardedRMSNorm(spec.num_qo_heads * self.d, eps, ctx.at("q_norm"), self.d, order=order)
        self.k_norm = ShardedRMSNorm(size, eps, ctx.at("k_norm"), self.d, copies, order)

    def attend(self, qkv: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """See `SelfAttention.attend`."""
        hq, hk, d = self.hq, self.hk, self.d
        q, k, v = torch.split(qkv, [hq * d, hk * d, hk * d], dim=-1)
        qk = torch.cat((self.q_norm(q.contiguous()), self.k_norm(k.contiguous())), dim=-1)
        qk = self._norm_rotate(qk.view(-1, hq + hk, d), None, 0.0, *rope)
        return attend(self.layer, qk[:, :hq], qk[:, hq:], v.contiguous().view(-1, hk, d), batch).view(-1, hq * d)
