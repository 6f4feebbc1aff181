"""Gemma 4, text: Gemma 3 with heads of two widths, keys that later layers read again, and inputs of each layer's own.

Full layers have wider heads, of which a part is rotated, and may take their keys' projection for values, too; values
are normalised, scores not scaled. The last layers read the cache of the last one of their type that has its own. Small
models add to each layer what a second table says of the token; 26B-A4B has experts beside the MLP.

P width of a layer's own inputs. Weights: as `Gemma4ForCausalLM` of transformers writes them. Source: the models' cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.device import is_on_host
from dovetail.contracts.layers import BuildContext, Stream
from dovetail.contracts.model import WeightRule
from dovetail.sdk.layers.attention import attend
from dovetail.sdk.layers.base import Layer
from dovetail.sdk.layers.decoder import SandwichLayer
from dovetail.sdk.layers.embedding import Embedding
from dovetail.sdk.layers.moe import Router
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.ops.invariant import at_once, by_rows
from dovetail.sdk.layers.routing import Routing
from dovetail.sdk.layers.transformer import ACTIVATIONS, GATES, GatedMLP, SelfAttention
from dovetail_models.gemma2 import SANDWICH, GemmaDecoder
from dovetail_models.gemma4_config import gemma4_config
from dovetail_models.llama import LAYER, Llama

OWN = r"layers.\1."
GEMMA4_RULES = (
    WeightRule(r"model\.embed_tokens_per_layer", "per_layer.embed"),
    WeightRule(r"model\.per_layer_model_projection", "per_layer.projection"),
    WeightRule(r"model\.per_layer_projection_norm", "per_layer.norm"),
    WeightRule(LAYER + "per_layer_input_gate", OWN + "gate"),
    WeightRule(LAYER + "per_layer_projection", OWN + "projection"),
    WeightRule(LAYER + "post_per_layer_input_norm", OWN + "projection_norm"),
    WeightRule(LAYER + "layer_scalar", OWN + "scalar"),
    WeightRule(LAYER + r"router(?:\.proj)?", OWN + "router"),
    WeightRule(LAYER + r"experts\.gate_up_proj", OWN + "experts.gate_up"),
    WeightRule(LAYER + r"experts\.down_proj", OWN + "experts.down"),
    WeightRule(LAYER + r"experts\.(\d+)\.(gate|up)_proj", OWN + "experts.gate_up", r"\3", r"\2"),
    WeightRule(LAYER + r"experts\.(\d+)\.down_proj", OWN + "experts.down", expert=r"\2"),
    WeightRule(LAYER + "post_feedforward_layernorm_1", OWN + "dense_norm"),
    WeightRule(LAYER + "pre_feedforward_layernorm_2", OWN + "experts_norm"),
    WeightRule(LAYER + "post_feedforward_layernorm_2", OWN + "experts_out_norm"),
)


class ValueNormAttention(SelfAttention):
    """Self-attention that also normalises values, without a weight."""

    def attend(self, qkv: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """See `SelfAttention.attend`."""
        if not self.has_cache or self.qk_norm is None:
            return super().attend(qkv, rope, batch)
        hq, hk, d = self.hq, self.hk, self.d
        heads = qkv.view(-1, hq + (1 if self.key_is_value else 2) * hk, d)
        qk = self.qk_norm(heads[:, : hq + hk], rope)
        v = unit_rms(heads[:, -hk:], self.qk_norm.eps)
        return attend(self.layer, qk[:, :hq], qk[:, hq:], v, batch).view(-1, hq * d)


class ScaledRouter(Router):
    """Router that normalises what it reads itself, and weighs each expert's share by a number of its own."""

    def __init__(self, routing: Routing, hidden: int, eps: float, ctx: BuildContext) -> None:
        super().__init__(routing, hidden, ctx)
        self.scale = self.empty(hidden, device=ctx.device, dtype=ctx.dtype)
        self.per_expert_scale = self.empty(routing.num, device=ctx.device, dtype=ctx.dtype)
        self._eps, self._root = eps, hidden**-0.5

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """See `Router`; `x` is not normalised."""
        ids, shares = super().forward(unit_rms(x, self._eps) * self.scale * self._root, scale)
        return ids, shares * self.per_expert_scale[ids]


class Scalar(Layer):
    """One factor `[1]`, which checkpoints keep under the module's own name."""

    suffixes: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": ("",)}

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = self.empty(1, device=ctx.device, dtype=ctx.dtype)


class PerLayerInputs(nn.Module):
    """What each layer adds of a token: a row of a second table, and a projection of the first one's."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.width, num = config.extra["per_layer_width"], config.num_layers
        scale = torch.tensor(self.width**0.5).to(ctx.dtype).item()
        self.embed = Embedding(config.extra["per_layer_vocab"], num * self.width, ctx, scale=scale)
        self.projection = ctx.linear("projection", config.hidden_size, num * self.width)
        self.norm = RMSNorm(self.width, config.norm_eps, ctx)
        self._root = config.hidden_size**-0.5

    def forward(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """Return `[T, layers, P]` for ids `[T]` and their embeddings `[T, H]`."""
        projected = self.norm(self.projection(embedded, scale=self._root).view(-1, self.width))
        both = projected + self.embed(ids).view(-1, self.width)
        inputs: Tensor = both * 2.0**-0.5
        return inputs.view(len(ids), -1, self.width)


class Gemma4Layer(SandwichLayer):
    """Sandwich layer with experts beside its MLP, if there are any, and an input of its own, if it has one."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(config, ctx, attention, mlp)
        hidden, eps, extra = config.hidden_size, config.norm_eps, config.extra
        self.scalar, self.width, self.has_experts = Scalar(ctx), extra["per_layer_width"], extra["routing"] is not None
        if self.has_experts:
            routing, act = extra["routing"], GATES[config.hidden_act]
            self.router = ScaledRouter(routing, hidden, eps, ctx)
            self.experts = ctx.experts("experts", routing.num, routing.top_k, hidden, extra["expert_inner"], act=act)
            self.dense_norm, self.experts_norm, self.experts_out_norm = (RMSNorm(hidden, eps, ctx) for _ in range(3))
        if self.width:
            self._act, self._is_by_row = ACTIVATIONS[config.hidden_act], ctx.batch_invariant and is_on_host(ctx.device)
            self.gate = ctx.linear("gate", hidden, self.width)
            self.projection = ctx.linear("projection", self.width, hidden)
            self.projection_norm = RMSNorm(hidden, eps, ctx)

    def forward(  # type: ignore[override]  # one input more
        self, stream: Stream, rope: tuple[Tensor, Tensor], batch: ForwardBatch, own: Tensor | None
    ) -> Stream:
        """Return the residual stream with this layer's part added; `own` is its input `[T, P]`."""
        stream = stream.plus(self.attention_out_norm(self.attention(stream, rope, batch, norm=self.attention_norm)))
        value = stream.total()
        made = self.mlp(stream, norm=self.mlp_norm)
        if self.has_experts:
            chosen = self.experts(self.experts_norm(value), *self.router(value))
            made = self.dense_norm(made) + self.experts_out_norm(chosen)
        value = value + self.mlp_out_norm(made)
        if own is not None:
            apply = by_rows if self._is_by_row else at_once
            value = value + self.projection_norm(self.projection(apply(self.gate(value), self._act) * own))
        return Stream(value * self.scalar.weight)


class Gemma4Decoder(GemmaDecoder):
    """Norms times their weight, not `1 + w`."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        has_inputs = bool(config.extra["per_layer_width"])
        self.per_layer = PerLayerInputs(config, ctx.at("per_layer")) if has_inputs else None

    @staticmethod
    def make_norm(size: int, eps: float, ctx: BuildContext) -> nn.Module:
        return RMSNorm(size, eps, ctx)

    def layer(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        return Gemma4Layer(config, ctx, self.attention(config, index, ctx), self.mlp(config, index, ctx))

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        bias, at = config.extra["bias"], ctx.at("attention")
        key_is_value = config.extra["key_is_value"][index]
        return ValueNormAttention(
            config, index, at, qkv_bias=bias, out_bias=bias, qk_norm=True, key_is_value=key_is_value
        )

    def mlp(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        return GatedMLP(config, ctx.at("mlp"), inner=config.extra["inner"][index])

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        embedded = self.embed(ids)
        return self.run(embedded, self.inputs(ids, embedded), batch)

    def inputs(self, ids: Tensor, embedded: Tensor) -> Sequence[Tensor | None]:
        """Return what each layer adds of the tokens `[T, P]`, by ids `[T]` and embeddings `[T, H]`."""
        return [None] * len(self.layers) if self.per_layer is None else self.per_layer(ids, embedded).unbind(1)

    def run(self, embedded: Tensor, own: Sequence[Tensor | None], batch: ForwardBatch) -> Tensor:
        """Map embeddings `[T, H]` to final hidden states `[T, H]`."""
        stream = Stream(embedded)
        for layer, rope, mine in zip(self.layers, self.rotary(batch.positions), own, strict=True):
            stream = layer(stream, rope, batch, mine)
        hidden: Tensor = self.norm(stream)
        return hidden


class Gemma4(Llama):
    """Serves `Gemma4ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Gemma4ForCausalLM",)
    batch_invariant = True
    decoder = Gemma4Decoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return gemma4_config(hf)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        unused = (WeightRule(config.extra["unused"], ""),) if config.extra["unused"] else ()
        return (*unused, *GEMMA4_RULES, *SANDWICH, *super().weight_map(config))


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis without a weight, computed in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)
