"""Qwen2.5-VL: Qwen2 behind a vision tower whose patches attend within windows, and in some layers to all others.

Weights: as `Qwen2_5_VLForConditionalGeneration` of transformers 4 and 5 writes them. Source: arXiv:2502.13923.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.tower import (
    Divided,
    PatchEmbedding,
    TowerAttention,
    TowerLayer,
    TowerMLP,
    axial_rope,
    merged_places,
)
from dovetail_models.image_values import CLIP_MEAN, CLIP_STD
from dovetail_models.seeing import SeeingModel, checked_grid, numbers

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


class Qwen2_5Merger(nn.Module):
    """Makes one embedding of the decoder out of a block of patches."""

    def __init__(self, norm: nn.Module, width: int, merged: int, hidden: int, ctx: BuildContext) -> None:
        super().__init__()
        self.norm = norm
        self.up = ctx.linear("up", width * merged, width * merged, bias=True)
        self.down = ctx.linear("down", width * merged, hidden, bias=True)
        self._merged = merged

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, H]` to `[N / merged, hidden]`."""
        return self.down(F.gelu(self.up(self.norm(x).view(len(x) // self._merged, -1))))


class Qwen2_5Tower(nn.Module):
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
        self._window = facts.get("window_size", 0) // patch // self._merge * self._merge  # 0: no layer has windows
        self._theta = facts["theta"]
        self.merger = Qwen2_5Merger(
            self.make_norm(width, ctx), width, self._merge**2, config.hidden_size, ctx.at("merger")
        )

    @classmethod
    def layer(cls, config: ModelConfig, facts: Mapping[str, Any], ctx: BuildContext) -> TowerLayer:
        """Make a layer."""
        width = config.hidden_size
        norms = cls.make_norm(width, ctx), cls.make_norm(width, ctx)
        attention = TowerAttention(width, facts["num_heads"], ctx.at("attention"))
        return TowerLayer(norms, attention, cls.mlp(config, ctx.at("mlp"), facts["intermediate_size"]))

    @staticmethod
    def make_norm(width: int, ctx: BuildContext) -> nn.Module:
        """Make any of its norms."""
        return RMSNorm(width, EPS, ctx)

    @staticmethod
    def mlp(config: ModelConfig, ctx: BuildContext, inner: int) -> nn.Module:
        """Make a layer's MLP."""
        return TowerMLP(config, ctx, bias=True, inner=inner)

    def forward(self, patches: Tensor, grid: Sequence[int]) -> Tensor:
        """Map the patches `[N, 3 * patch * patch]` of an image to embeddings `[1, N / merged, hidden]`."""
        high, wide = checked_grid(patches, grid)
        rows, columns = merged_places(high, wide, self._merge, patches.device)
        windows = Windows.of(rows, columns, (high, wide), self._window) if self._window else None
        if windows is not None:
            rows, columns, patches = (each[windows.order] for each in (rows, columns, patches))
        rope = axial_rope(rows, columns, self._dim, self._theta)
        x = self.patches(patches)
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, None if windows is None or index in self._whole else windows.sizes)
        merged: Tensor = self.merger(x)
        if windows is not None:
            merged = torch.empty_like(merged).index_copy_(0, windows.order[:: self._merge**2] // self._merge**2, merged)
        return merged[None]


class Qwen2_5_VL(SeeingModel):
    """Serves `Qwen2_5_VLForConditionalGeneration`."""

    architectures: ClassVar[Sequence[str]] = ("Qwen2_5_VLForConditionalGeneration",)
    batch_invariant = True
    tower = Qwen2_5Tower
    tower_rules = TOWER_RULES
    sections = (16, 24, 24)

    @classmethod
    def tower_facts(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """See `SeeingModel`."""
        return {
            **numbers(vision, NUMBERS),
            "hidden_act": str(vision.get("hidden_act") or "silu"),
            "full_layers": tuple(vision.get("fullatt_block_indexes", FULL_LAYERS)),
        }


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows over an image's patches: an order in which those of a window stand together, and so do those of a size.

    Attributes:
        order: `[N]` int64, which patch stands at each place. Blocks whose patches stood together still do.
        sizes: How they are divided.
    """

    order: Tensor
    sizes: Divided

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor, shape: tuple[int, int], size: int) -> Windows:
        """Divide patches at `rows`, `columns` `[N]` of an image of that `shape` into squares of `size` by `size`.

        Those at its lower and right edge may be smaller. Nothing waits for the device: sizes follow from the shape.
        """
        (down, low), (across, wide) = (divmod(num, size) for num in shape)
        window = rows // size * (across + 1) + columns // size
        kind = 2 * (rows // size >= down) + 1 * (columns // size >= across)
        order = torch.argsort(kind * (down + 1) * (across + 1) + window, stable=True)
        each = ((down * across, size * size), (down, size * wide), (across, low * size), (1, low * wide))
        return cls(order, tuple((num, patches) for num, patches in each if num and patches))
