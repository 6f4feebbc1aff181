"""StableLM 2: Llama with layer norms and a quarter of each head rotated; some read one norm for attention and MLP.

Weights: as `StableLmForCausalLM` of transformers writes them. Source: arXiv:2402.17834.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.sdk.config import dense_config, with_missing
from dovetail.sdk.layers.decoder import DecoderLayer, ParallelLayer
from dovetail.sdk.layers.norm import LayerNorm
from dovetail_models.llama import DenseDecoder, Llama


class StableLmDecoder(DenseDecoder):
    """Layer norms, one a layer or two."""

    @staticmethod
    def make_norm(size: int, eps: float, ctx: BuildContext) -> nn.Module:
        return LayerNorm(size, eps, ctx)

    def layer(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        block = ParallelLayer if config.extra["is_parallel"] else DecoderLayer
        return block(config, ctx, self.attention(config, index, ctx), self.mlp(config, index, ctx), norm=self.make_norm)


class StableLm(Llama):
    """Serves `StableLmForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("StableLmForCausalLM",)
    decoder = StableLmDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        if hf.get("qk_layernorm"):
            raise ModelError("config.json: qk_layernorm is not supported; use --model-impl transformers")
        return dense_config(
            with_missing(hf, partial_rotary_factor=0.25),
            has_windows=False,
            norm_eps="layer_norm_eps",
            rotates_parts=True,
            qkv_bias=bool(hf.get("use_qkv_bias", False)),
            is_parallel=bool(hf.get("use_parallel_residual", False)),
        )
