"""Two widths: Llama whose layers differ. Some see everything with wide heads, others a window with narrow ones.

So the keys and values of a token are of two sizes, and those of the windowed layers are not needed for long: the model
says so in `ModelConfig.layers`, and the engine keeps a cache group for each kind. Gemma 4 and gpt-oss are built like
this. `config.json` has the usual keys, `layer_types`, `sliding_window`, and `global_head_dim` beside `head_dim`. The
last `num_kv_shared_layers` have no keys and values of their own: each reads those of the last of its kind that has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from dovetail.contracts import (
    BuildContext,
    CausalLM,
    ForwardBatch,
    Full,
    LayerSpec,
    ModelConfig,
    ModelPlugin,
    Stream,
    WeightRule,
)
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.decoder import DecoderLayer
from dovetail.sdk.layers.embedding import Embedding, LMHead
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.rotary import Rotaries
from dovetail.sdk.layers.transformer import GatedMLP, SelfAttention

LAYER = r"model\.layers\.(\d+)\."
RULES = (
    WeightRule(r"model\.embed_tokens", "embed"),
    WeightRule(LAYER + r"self_attn\.([qkv])_proj", r"layers.\1.attention.qkv", r"\2"),
    WeightRule(LAYER + r"self_attn\.o_proj", r"layers.\1.attention.out"),
    WeightRule(LAYER + r"mlp\.(gate|up)_proj", r"layers.\1.mlp.gate_up", r"\2"),
    WeightRule(LAYER + r"mlp\.down_proj", r"layers.\1.mlp.down"),
    WeightRule(LAYER + r"input_layernorm", r"layers.\1.attention_norm"),
    WeightRule(LAYER + r"post_attention_layernorm", r"layers.\1.mlp_norm"),
    WeightRule(r"model\.norm", "norm"),
    WeightRule("lm_head", "lm_head"),
)


class Decoder(nn.Module):
    """Embedding, layers, final norm, output head; each layer looks up its own width and reach."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.embed = Embedding(config.vocab_size, config.hidden_size, ctx)
        self.rotary = Rotaries(config, ctx)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config,
                ctx,
                SelfAttention(config, index, ctx.at(f"layers.{index}.attention")),
                GatedMLP(config, ctx.at(f"layers.{index}.mlp")),
            )
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, ctx)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, ctx, None)

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to final hidden states `[T, H]`."""
        stream, ropes = Stream(self.embed(ids)), self.rotary(batch.positions)
        for layer, rope in zip(self.layers, ropes, strict=True):
            stream = layer(stream, rope, batch)
        hidden: Tensor = self.norm(stream)
        return hidden


class TwoWidths(ModelPlugin):
    """Serves `TwoWidthsForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("TwoWidthsForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Translate `config.json`: the layers without a window are wide."""
        config = dense_config(hf)
        width = int(hf.get("global_head_dim") or config.layers[0].qk_dim)

        def widened(spec: LayerSpec) -> LayerSpec:
            return replace(spec, qk_dim=width, v_dim=width, scale=width**-0.5)

        layers = tuple(widened(spec) if isinstance(spec.reach, Full) else spec for spec in config.layers)
        own = layers[: len(layers) - int(hf.get("num_kv_shared_layers") or 0)]
        last = {spec.reach: spec.index for spec in own}
        shared = [replace(spec, cache_layer=last[spec.reach]) for spec in layers[len(own) :]]
        return replace(config, layers=(*own, *shared))

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        """Build the module; weights are loaded afterwards."""
        return Decoder(config, ctx)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        """Say where each tensor of the checkpoint goes."""
        return RULES
