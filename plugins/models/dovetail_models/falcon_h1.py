"""Falcon-H1: Mamba 2 beside attention in every layer, and factors of nearly everything.

Weights: as `FalconH1ForCausalLM` of transformers writes them. Source: arXiv:2507.22448.

A layer has two specs: 2 i is its Mamba 2's, 2 i + 1 its attention's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext, Norm, Part, Stream
from dovetail.contracts.model import WeightRule
from dovetail.sdk.checkpoint import dense_numel
from dovetail.sdk.config import dense_config, with_missing
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.pieces import Pieces
from dovetail.sdk.layers.transformer import GATES, GatedMLP, SelfAttention
from dovetail_models.bamba import FEED_FORWARD
from dovetail_models.experts import needed
from dovetail_models.folding import check_silu
from dovetail_models.granite import GraniteDecoder
from dovetail_models.llama import LAYER, Llama
from dovetail_models.mamba2 import Mamba2, MambaShape, mamba_rules

ONE = (
    *("key_multiplier", "attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier"),
    *("ssm_out_multiplier", "embedding_multiplier", "lm_head_multiplier"),
)
"""Keys of factors, each of them 1 where it is not there."""


def _numbers(hf: Mapping[str, Any], key: str, num: int) -> tuple[float, ...]:
    """Return so many factors, or none where the config says none.

    Raises:
        ModelError: There are more or fewer.
    """
    found = tuple(map(float, hf.get(key) or ()))
    if len(found) not in (0, num):
        raise ModelError(f"config.json: {key} is {list(found)}; possible: {num} numbers")
    return found


class ScaledMLP(GatedMLP):
    """A gated MLP whose gate has a factor."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, gate: float, *, bias: bool) -> None:
        super().__init__(config, ctx, bias=bias)
        inner, self._factor = config.intermediate_size, gate
        self._inner, act = inner // ctx.parallel.size, GATES[config.hidden_act]
        self.gate_up = ctx.linear("gate_up", config.hidden_size, (Part("gate", inner), Part("up", inner)), bias=bias,
                                  shard="out")  # fmt: skip
        self._act = ctx.operation("act_and_mul", F=self._inner, act=act)

    def forward(
        self, x: Tensor | Stream, *, norm: Norm | None = None, add: Stream | None = None, scale: float = 1.0
    ) -> Tensor | Stream:
        made = self.gate_up(x, norm=norm)
        made[:, : self._inner].mul_(self._factor)
        return self.down(self._act(made), add=add, scale=scale)


class FalconLayer(nn.Module):
    """What Mamba 2 and attention make of one norm is added, then what an MLP makes of another."""

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext) -> None:
        super().__init__()
        extra, self.factors = config.extra, config.extra["factors"]
        bias, gate = extra["mlp_bias"], extra["mlp_factors"][0]
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, ctx)
        self.mixer = Mamba2(config, 2 * index, ctx.at("mixer"), extra["mamba"])
        self.attention = SelfAttention(
            config, 2 * index + 1, ctx.at("attention"), qkv_bias=extra["bias"], out_bias=extra["bias"]
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, ctx)
        at = ctx.at("mlp")
        self.mlp = GatedMLP(config, at, bias=bias) if gate == 1.0 else ScaledMLP(config, at, gate, bias=bias)
        self._down = extra["mlp_factors"][1]

    def forward(
        self, stream: Stream, rope: tuple[Tensor, Tensor], pieces: Pieces | None, batch: ForwardBatch
    ) -> Stream:
        """Return the residual stream with this layer's part added."""
        factors, normed = self.factors, self.attention_norm(stream)
        mixed, attended = (
            normed if factors[name] == 1.0 else normed * factors[name]
            for name in ("ssm_in_multiplier", "attention_in_multiplier")
        )
        stream = self.mixer(mixed, pieces, batch, add=stream, scale=factors["ssm_out_multiplier"])
        stream = self.attention(attended, rope, batch, add=stream, scale=factors["attention_out_multiplier"])
        added: Stream = self.mlp(stream, norm=self.mlp_norm, add=stream, scale=self._down)
        return added


class FalconDecoder(GraniteDecoder):
    """Such layers, with factors of embedding and logits as Granite has them."""

    layers: nn.ModuleList

    @staticmethod
    def num_modules(config: ModelConfig) -> int:
        return config.num_layers // 2

    def layer(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        return FalconLayer(config, index, ctx)

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to final hidden states `[T, H]`."""
        stream, ropes = Stream(self.embed(ids)), self.rotary(batch.positions)[1::2]
        first: Any = self.layers[0]
        pieces = first.mixer.pieces(batch)
        for layer, rope in zip(self.layers, ropes, strict=True):
            stream = layer(stream, rope, pieces, batch)
        hidden: Tensor = self.norm(stream)
        return hidden


class FalconH1(Llama):
    """Serves `FalconH1ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("FalconH1ForCausalLM",)
    batch_invariant = True
    decoder = FalconDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        factors = {name: 1.0 if hf.get(name) is None else float(hf[name]) for name in ONE}
        heads, hidden = needed(hf, "num_attention_heads"), needed(hf, "hidden_size")
        dim = int(hf.get("head_dim") or hidden // heads)
        config = dense_config(
            with_missing(hf, rms_norm_eps=1e-5),
            has_windows=False,
            scale=dim**-0.5 * factors["key_multiplier"],
            factors=factors,
            bias=bool(hf.get("attention_bias", False)),
            mlp_bias=bool(hf.get("mlp_bias", False)),
            mlp_factors=_numbers(hf, "mlp_multipliers", 2) or (1.0, 1.0),
            embed_scale=factors["embedding_multiplier"],
            logit_scale=factors["lm_head_multiplier"],
        )
        check_silu(config)
        expanded = int(hf.get("mamba_expand") or 2) * hidden
        shape = cls._shape(hf, int(hf.get("mamba_d_ssm") or expanded))
        specs = [spec for one in config.layers
                 for spec in (shape.spec(2 * one.index), replace(one, index=2 * one.index + 1))]  # fmt: skip
        total = dense_numel(config) + config.num_layers * shape.numel(hidden)
        return replace(config, layers=tuple(specs), num_layers=2 * config.num_layers, num_params=total,
                       extra={**config.extra, "mamba": shape})  # fmt: skip

    @staticmethod
    def _shape(hf: Mapping[str, Any], inner: int) -> MambaShape:
        before, has_norm = hf.get("mamba_norm_before_gate", True), bool(hf.get("mamba_rms_norm"))
        factors = _numbers(hf, "ssm_multipliers", 5)
        return MambaShape.of(hf, inner=inner)._replace(
            out_bias=bool(hf.get("projectors_bias")),
            norm="none" if not has_norm else "norm first" if before else "gate first",
            factors=() if set(factors) <= {1.0} else factors,
        )

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*mamba_rules(LAYER + r"mamba\.", r"layers.\1.mixer."), *FEED_FORWARD, *super().weight_map(config))
