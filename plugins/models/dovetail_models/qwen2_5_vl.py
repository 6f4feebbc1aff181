"""Qwen2.5-VL: Qwen2 behind a vision tower whose patches attend within windows, and in some layers to all others.

Weights: as `Qwen2_5_VLForConditionalGeneration` of transformers 4 and 5 writes them. Source: arXiv:2502.13923.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig, VisionPart
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext, Stream
from dovetail.contracts.model import CausalLM, WeightRule
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.tower import (
    PatchEmbedding,
    TowerAttention,
    TowerLayer,
    Windows,
    axial_rope,
    merged_places,
    tower_context,
)
from dovetail.sdk.layers.transformer import GatedMLP
from dovetail_models.llama import DenseDecoder
from dovetail_models.qwen2_vl_images import CLIP_MEAN, CLIP_STD
from dovetail_models.text_part import NOT_TEXT, TextPart, family_of

BLOCK = r"(?:model\.)?visual\.blocks\.(\d+)\."
TOWER_RULES = (
    WeightRule(r"(?:model\.)?visual\.patch_embed\.proj", "tower.patches"),
    WeightRule(BLOCK + "norm1", r"tower.layers.\1.attention_norm"),
    WeightRule(BLOCK + "norm2", r"tower.layers.\1.mlp_norm"),
    WeightRule(BLOCK + r"attn\.qkv", r"tower.layers.\1.attention.qkv"),
    WeightRule(BLOCK + r"attn\.proj", r"tower.layers.\1.attention.out"),
    WeightRule(BLOCK + r"mlp\.(gate|up)_proj", r"tower.layers.\1.mlp.gate_up", r"\2"),
    WeightRule(BLOCK + r"mlp\.down_proj", r"tower.layers.\1.mlp.down"),
    WeightRule(r"(?:model\.)?visual\.merger\.ln_q", "tower.merger.norm"),
    WeightRule(r"(?:model\.)?visual\.merger\.mlp\.0", "tower.merger.up"),
    WeightRule(r"(?:model\.)?visual\.merger\.mlp\.2", "tower.merger.down"),
)
EPS = 1e-6
NUMBERS = {
    **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14},
    **{"temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 112},
}
"""What transformers takes where `vision_config` says nothing."""
FULL_LAYERS = (7, 15, 23, 31)
SECTIONS = (16, 24, 24)


class Merger(nn.Module):
    """Makes one embedding of the decoder out of a block of patches."""

    def __init__(self, width: int, merged: int, hidden: int, ctx: BuildContext) -> None:
        super().__init__()
        self.norm = RMSNorm(width, EPS, ctx)
        self.up = ctx.linear("up", width * merged, width * merged, bias=True)
        self.down = ctx.linear("down", width * merged, hidden, bias=True)
        self._merged = merged

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, H]` to `[N / merged, hidden]`."""
        return self.down(F.gelu(self.up(self.norm(x).view(len(x) // self._merged, -1))))


class Tower(nn.Module):
    """The vision tower."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        facts: Mapping[str, Any] = config.extra["tower"]
        width, heads, patch = facts["hidden_size"], facts["num_heads"], facts["patch_size"]
        shape = (3, facts["temporal_patch_size"], patch, patch)
        self.patches = PatchEmbedding(shape, width, ctx, mean=CLIP_MEAN, std=CLIP_STD)
        own = replace(config, hidden_size=width, hidden_act=facts["hidden_act"])
        self.layers = nn.ModuleList(
            self.layer(own, facts, ctx.at(f"layers.{index}")) for index in range(facts["depth"])
        )
        self._merge, self._dim, self._whole = facts["spatial_merge_size"], width // heads, facts["full_layers"]
        self._window = facts["window_size"] // patch // self._merge * self._merge
        self._theta = facts["theta"]
        self.merger = Merger(width, self._merge**2, config.hidden_size, ctx.at("merger"))

    @staticmethod
    def layer(config: ModelConfig, facts: Mapping[str, Any], ctx: BuildContext) -> TowerLayer:
        """Make a layer."""
        width = config.hidden_size
        norms = RMSNorm(width, EPS, ctx), RMSNorm(width, EPS, ctx)
        attention = TowerAttention(width, facts["num_heads"], ctx.at("attention"))
        return TowerLayer(
            norms, attention, GatedMLP(config, ctx.at("mlp"), bias=True, inner=facts["intermediate_size"])
        )

    def forward(self, patches: Tensor, grid: Sequence[int]) -> Tensor:
        """Map the patches `[N, 3 * patch * patch]` of an image to embeddings `[N / merged, hidden]`."""
        frames, high, wide = grid
        if frames != 1 or len(patches) != high * wide:
            raise ValueError(f"an image has {len(patches)} patches, and its grid is {list(grid)}")
        rows, columns = merged_places(high, wide, self._merge, patches.device)
        rope, windows = axial_rope(rows, columns, self._dim, self._theta), Windows.of(rows, columns, self._window)
        x = self.patches(patches)
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, None if index in self._whole else windows)
        merged: Tensor = self.merger(x)
        return merged


class SeeingDecoder(DenseDecoder):
    """A decoder whose embeddings at images come from its tower."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.tower = Tower(config, tower_context(ctx, "tower"))

    def encode(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """See `VisionTower`."""
        found: Tensor = self.tower(arrays["patches"], arrays["grid"].tolist())
        return found[None]

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to final hidden states `[T, H]`."""
        embedded, images = self.embed(ids), batch.images
        if images is not None:
            embedded = embedded.index_copy(0, images.at, images.rows[0])
        positions = batch.positions if batch.rope_positions is None else batch.rope_positions
        stream = Stream(embedded)
        for layer, rope in zip(self.layers, self.rotary(positions), strict=True):
            stream = layer(stream, rope, batch)
        hidden: Tensor = self.norm(stream)
        return hidden


class Qwen2_5_VL(TextPart):
    """Serves `Qwen2_5_VLForConditionalGeneration`."""

    architectures: ClassVar[Sequence[str]] = ("Qwen2_5_VLForConditionalGeneration",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config, (_, text) = super().config_from_hf(hf), family_of(hf)
        vision = hf.get("vision_config") or {}
        facts: dict[str, Any] = {key: _number(vision, key, value) for key, value in NUMBERS.items()}
        if facts["hidden_size"] % (4 * facts["num_heads"]):
            raise ModelError(
                f"config.json: vision_config: hidden_size {facts['hidden_size']} of {facts['num_heads']} heads: a head "
                "must have a multiple of four numbers"
            )
        for key in ("in_channels", "in_chans"):
            if vision.get(key, 3) != 3:
                raise ModelError(f"config.json: vision_config: {key} {vision[key]!r}: possible: 3")
        rope = vision.get("rope_parameters") or {}
        if (kind := rope.get("rope_type") or "axial") != "axial":
            raise ModelError(f"config.json: vision_config: rope_type {kind!r} is not supported; possible: 'axial'")
        facts["theta"] = float(rope.get("rope_theta") or 10000.0)
        facts["hidden_act"] = str(vision.get("hidden_act") or "silu")
        facts["full_layers"] = tuple(vision.get("fullatt_block_indexes", FULL_LAYERS))
        given = text.get("rope_scaling") or text.get("rope_parameters") or {}
        sections = tuple(given.get("mrope_section") or SECTIONS)
        merged = facts["spatial_merge_size"] ** 2
        seen = VisionPart(
            embed_id=_number(hf, "image_token_id", 151655), patches_per_token=merged, width=facts["hidden_size"],
            tensors=NOT_TEXT,
        )  # fmt: skip
        return replace(
            config, vision=seen, rope=replace(config.rope, sections=sections), not_loaded="",
            extra={**config.extra, "tower": facts},
        )  # fmt: skip

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        return super().build(config, ctx) if config.vision is None else SeeingDecoder(config, ctx)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        rules = super().weight_map(config)
        return rules if config.vision is None else (*TOWER_RULES, *rules)


def _number(given: Mapping[str, Any], key: str, default: int) -> int:
    value = given.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} {value!r} of a model that sees: expected a whole number from 1 on")
    return value
