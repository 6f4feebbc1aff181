"""Gemma 3 with its SigLIP tower, whose patches are pooled to one number of tokens; an image sees both ways.

All layers of the decoder let a token of an image see the whole image. Weights: as `Gemma3ForConditionalGeneration` of
transformers 4 and 5 writes them. Source: arXiv:2503.19786; SigLIP: arXiv:2303.15343.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dovetail.contracts.config import ModelConfig, VisionPart
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.layers.base import Layer
from dovetail.sdk.layers.norm import LayerNorm, ZeroCenteredRMSNorm
from dovetail.sdk.layers.tower import PatchEmbedding, TowerAttention, TowerLayer
from dovetail.sdk.layers.transformer import MLP
from dovetail_models.gemma3_images import why_not_pooled
from dovetail_models.image_values import HALVES
from dovetail_models.seeing import SeeingModel, checked_grid, number
from dovetail_models.text_part import NOT_TEXT

TOWER = r"(?:model\.)?vision_tower\.(?:vision_model\.)?"
BLOCK = TOWER + r"encoder\.layers\.(\d+)\."
UNUSED = TOWER + r"head\..*"
"""SigLIP's own pooling, which files may have."""
PROJECTOR = r"(?:model\.)?multi_modal_projector\."
TOWER_RULES = (
    WeightRule(TOWER + r"embeddings\.patch_embedding", "tower.patches"),
    WeightRule(TOWER + r"embeddings\.position_embedding", "tower.places"),
    WeightRule(BLOCK + "layer_norm1", r"tower.layers.\1.attention_norm"),
    WeightRule(BLOCK + "layer_norm2", r"tower.layers.\1.mlp_norm"),
    WeightRule(BLOCK + r"self_attn\.([qkv])_proj", r"tower.layers.\1.attention.qkv", r"\2"),
    WeightRule(BLOCK + r"self_attn\.out_proj", r"tower.layers.\1.attention.out"),
    WeightRule(BLOCK + r"mlp\.fc1", r"tower.layers.\1.mlp.up"),
    WeightRule(BLOCK + r"mlp\.fc2", r"tower.layers.\1.mlp.down"),
    WeightRule(TOWER + "post_layernorm", "tower.norm"),
    WeightRule(UNUSED, ""),
    WeightRule(PROJECTOR + "mm_soft_emb_norm", "tower.projector_norm"),
    WeightRule(PROJECTOR + "mm_input_projection", "tower.projector"),
)
NUMBERS = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"image_size": 224, "patch_size": 16},
}
"""What transformers takes where `vision_config` says nothing."""


class PatchPlaces(Layer):
    """Learned positions `[N, H]` of the patches of an image."""

    def __init__(self, num: int, width: int, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = self.empty(num, width, device=ctx.device, dtype=ctx.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Add them to `[N, H]`."""
        return x + self.weight


class Gemma3Projector(Layer):
    """A product whose weight stands as `[in, out]` in checkpoints, under a name of its own."""

    suffixes: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": ("_weight",)}

    def __init__(self, width: int, hidden: int, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = self.empty(width, hidden, device=ctx.device, dtype=ctx.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, width]` to `[N, hidden]`."""
        return x @ self.weight


class SiglipTower(nn.Module):
    """The vision tower, with pooling and projection to the decoder's width."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        facts: Mapping[str, Any] = config.extra["tower"]
        width, patch, self._eps = facts["hidden_size"], facts["patch_size"], facts["eps"]
        self._across, self._root = facts["image_size"] // patch, isqrt(facts["tokens"])
        self.patches = PatchEmbedding((3, patch, patch), width, ctx, mean=HALVES, std=HALVES, bias=True)
        self.places = PatchPlaces(self._across**2, width, ctx)
        own = replace(config, hidden_size=width, hidden_act=facts["hidden_act"])
        self.layers = nn.ModuleList(
            self.layer(own, facts, ctx.at(f"layers.{index}")) for index in range(facts["num_hidden_layers"])
        )
        self.norm = LayerNorm(width, self._eps, ctx)
        self.projector_norm = ZeroCenteredRMSNorm(width, self._eps, ctx)
        self.projector = Gemma3Projector(width, config.hidden_size, ctx)

    def layer(self, config: ModelConfig, facts: Mapping[str, Any], ctx: BuildContext) -> TowerLayer:
        """Make a layer."""
        width = config.hidden_size
        norms = LayerNorm(width, self._eps, ctx), LayerNorm(width, self._eps, ctx)
        attention = TowerAttention(width, facts["num_attention_heads"], ctx.at("attention"))
        return TowerLayer(norms, attention, MLP(config, ctx.at("mlp"), bias=True, inner=facts["intermediate_size"]))

    def forward(self, patches: Tensor, grid: Sequence[int]) -> Tensor:
        """Map an image's patches `[N, 3 * patch * patch]`, row by row, to embeddings `[1, tokens, hidden]`."""
        if checked_grid(patches, grid) != (self._across, self._across):
            raise ValueError(f"an image has a grid of {list(grid)}; the tower's is {self._across} x {self._across}")
        x = self.places(self.patches(patches))
        for layer in self.layers:
            x = layer(x, None, None)
        block = self._across // self._root
        pooled = self.norm(x).view(self._root, block, self._root, block, -1).mean((1, 3), dtype=torch.float32)
        found: Tensor = self.projector(self.projector_norm(pooled.to(x.dtype).flatten(0, 1)))
        return found[None]


class Gemma3_VL(SeeingModel):
    """Serves `Gemma3ForConditionalGeneration`."""

    architectures: ClassVar[Sequence[str]] = ("Gemma3ForConditionalGeneration",)
    batch_invariant = True
    tower = SiglipTower
    tower_rules = TOWER_RULES

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = super(SeeingModel, cls).config_from_hf(hf)  # without three positions for each token
        facts = cls.tower_facts(hf.get("vision_config") or {})
        tokens = number(hf, "mm_tokens_per_image", 256)
        if (why := why_not_pooled(facts["image_size"], facts["patch_size"], tokens)) is not None:
            raise ModelError(why)
        if any(spec.sliding_window is not None and spec.sliding_window < tokens for spec in config.layers):
            raise ModelError(
                f"config.json: sliding_window is less than mm_tokens_per_image, {tokens}: what an image sees of itself "
                "would not be kept; give a window of an image's tokens or more"
            )
        merged = (facts["image_size"] // facts["patch_size"]) ** 2 // tokens
        seen = VisionPart(
            embed_id=number(hf, "image_token_index", 262144),
            patches_per_token=merged,
            width=facts["hidden_size"],
            tensors=NOT_TEXT,
            span_tokens=tokens,
            **cls.tower_numbers(facts, config.hidden_size, merged),
        )
        layers = tuple(replace(spec, spans=True) for spec in config.layers)
        extra = {**config.extra, "tower": {**facts, "tokens": tokens}}
        return replace(config, vision=seen, layers=layers, not_loaded=UNUSED, extra=extra)

    @classmethod
    def tower_facts(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """See `SeeingModel`."""
        facts: dict[str, Any] = {key: number(vision, key, default) for key, default in NUMBERS.items()}
        if facts["hidden_size"] % facts["num_attention_heads"]:
            raise ModelError(
                f"config.json: vision_config: hidden_size {facts['hidden_size']} is no multiple of "
                f"num_attention_heads, {facts['num_attention_heads']}"
            )
        if vision.get("num_channels", 3) != 3:
            raise ModelError(f"config.json: vision_config: num_channels {vision['num_channels']!r}: possible: 3")
        eps, act = float(vision.get("layer_norm_eps") or 1e-6), str(vision.get("hidden_act") or "gelu_pytorch_tanh")
        return {**facts, "eps": eps, "hidden_act": act}
