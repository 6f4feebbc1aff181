"""Qwen3-VL: Qwen3 or Qwen3-MoE behind a tower with learned positions, whose middle layers add to the first layers.

Qwen3.5 has the same tower without additions. Weights: as transformers writes them. Source: arXiv:2511.21631; additions
(deepstack): arXiv:2406.04334.
"""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.layers.base import Layer
from dovetail.sdk.layers.norm import LayerNorm
from dovetail.sdk.layers.tower import (
    PatchEmbedding,
    TowerAttention,
    TowerLayer,
    axial_rope,
    merged_places,
)
from dovetail.sdk.layers.transformer import MLP
from dovetail_models.image_values import HALVES
from dovetail_models.seeing import SeeingModel, checked_grid, numbers

VISUAL = r"(?:model\.)?visual\."
BLOCK = VISUAL + r"blocks\.(\d+)\."
MERGER = VISUAL + r"deepstack_merger_list\.(\d+)\."
TOWER_RULES = (
    WeightRule(VISUAL + r"patch_embed\.proj", "tower.patches"),
    WeightRule(VISUAL + "pos_embed", "tower.places"),
    WeightRule(BLOCK + "norm1", r"tower.layers.\1.attention_norm"),
    WeightRule(BLOCK + "norm2", r"tower.layers.\1.mlp_norm"),
    WeightRule(BLOCK + r"attn\.qkv", r"tower.layers.\1.attention.qkv"),
    WeightRule(BLOCK + r"attn\.proj", r"tower.layers.\1.attention.out"),
    WeightRule(BLOCK + r"mlp\.linear_fc1", r"tower.layers.\1.mlp.up"),
    WeightRule(BLOCK + r"mlp\.linear_fc2", r"tower.layers.\1.mlp.down"),
    WeightRule(VISUAL + r"merger\.norm", "tower.merger.norm"),
    WeightRule(VISUAL + r"merger\.linear_fc1", "tower.merger.up"),
    WeightRule(VISUAL + r"merger\.linear_fc2", "tower.merger.down"),
    WeightRule(MERGER + "norm", r"tower.adders.\1.norm"),
    WeightRule(MERGER + "linear_fc1", r"tower.adders.\1.up"),
    WeightRule(MERGER + "linear_fc2", r"tower.adders.\1.down"),
)
EPS = 1e-6
NUMBERS = {
    **{"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16},
    **{"temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304},
}
"""What transformers takes where `vision_config` says nothing."""
ADDED = (8, 16, 24)


class Qwen3Merger(nn.Module):
    """Makes one embedding of the decoder out of a block of patches; the norm is a patch's or the whole block's."""

    def __init__(self, width: int, merged: int, hidden: int, ctx: BuildContext, *, of_blocks: bool = False) -> None:
        super().__init__()
        self._shape = (-1, width * merged if of_blocks else width)
        self.norm = LayerNorm(self._shape[1], EPS, ctx)
        self.up = ctx.linear("up", width * merged, width * merged, bias=True)
        self.down = ctx.linear("down", width * merged, hidden, bias=True)
        self._width = width * merged

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, H]` to `[N / merged, hidden]`."""
        return self.down(F.gelu(self.up(self.norm(x.view(self._shape)).view(-1, self._width))))


class Qwen3Tower(nn.Module):
    """The vision tower."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        facts: Mapping[str, Any] = config.extra["tower"]
        width, heads, patch = facts["hidden_size"], facts["num_heads"], facts["patch_size"]
        self._merge, self._dim, self._theta = facts["spatial_merge_size"], width // heads, facts["theta"]
        shape = (3, facts["temporal_patch_size"], patch, patch)
        self.patches = PatchEmbedding(shape, width, ctx, mean=HALVES, std=HALVES, bias=True)
        self.places = GridEmbedding(facts["num_position_embeddings"], width, ctx)
        own = replace(config, hidden_size=width, hidden_act=facts["hidden_act"])
        self.layers = nn.ModuleList(
            self.layer(own, facts, ctx.at(f"layers.{index}")) for index in range(facts["depth"])
        )
        merged, hidden = self._merge**2, config.hidden_size
        self.merger = Qwen3Merger(width, merged, hidden, ctx.at("merger"))
        self._added: tuple[int, ...] = facts["added"]
        self.adders = nn.ModuleList(
            Qwen3Merger(width, merged, hidden, ctx.at(f"adders.{index}"), of_blocks=True)
            for index in range(len(self._added))
        )

    @staticmethod
    def layer(config: ModelConfig, facts: Mapping[str, Any], ctx: BuildContext) -> TowerLayer:
        """Make a layer."""
        width = config.hidden_size
        norms = LayerNorm(width, EPS, ctx), LayerNorm(width, EPS, ctx)
        attention = TowerAttention(width, facts["num_heads"], ctx.at("attention"))
        return TowerLayer(norms, attention, MLP(config, ctx.at("mlp"), bias=True, inner=facts["intermediate_size"]))

    def forward(self, patches: Tensor, grid: Sequence[int]) -> Tensor:
        """Map an image's patches `[N, 3 * patch * patch]` to embeddings and additions `[L, N / merged, hidden]`."""
        high, wide = checked_grid(patches, grid)
        rows, columns = merged_places(high, wide, self._merge, patches.device)
        rope = axial_rope(rows, columns, self._dim, self._theta)
        x = self.patches(patches)
        x = x + self.places(rows, columns, (high, wide))
        added: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, None)
            if index in self._added:
                added.append(self.adders[self._added.index(index)](x))
        return torch.stack([self.merger(x), *added])


class Qwen3_VL(SeeingModel):
    """Serves `Qwen3VLForConditionalGeneration` and its relative with experts."""

    architectures: ClassVar[Sequence[str]] = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
    batch_invariant = True
    tower = Qwen3Tower
    tower_rules = TOWER_RULES
    sections = (24, 20, 20)
    mixes_sections = True

    @classmethod
    def tower_facts(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """See `SeeingModel`."""
        facts = numbers(vision, NUMBERS)
        added = tuple(vision.get("deepstack_visual_indexes", ADDED))
        if len(set(added)) < len(added) or any(index not in range(facts["depth"]) for index in added):
            raise ModelError(
                f"config.json: vision_config: deepstack_visual_indexes {list(added)}: give different layers of the "
                f"tower's {facts['depth']}"
            )
        if int(facts["num_position_embeddings"] ** 0.5) ** 2 != facts["num_position_embeddings"]:
            raise ModelError(
                f"config.json: vision_config: num_position_embeddings {facts['num_position_embeddings']}: give a square"
            )
        return {**facts, "hidden_act": str(vision.get("hidden_act") or "gelu_pytorch_tanh"), "added": added}


class Qwen3_5_VL(Qwen3_VL):
    """Serves `Qwen3_5ForConditionalGeneration` and its relative with experts."""

    architectures: ClassVar[Sequence[str]] = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
    batch_invariant = True
    sections = (11, 11, 10)

    @classmethod
    def tower_facts(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """See `SeeingModel`."""
        without: Any = ChainMap({"deepstack_visual_indexes": ()}, vision)  # type: ignore[arg-type]
        return super().tower_facts(without)


class GridEmbedding(Layer):
    """Learned positions on a square, stretched over the patches of an image of any shape.

    Args:
        num: Positions: the square of its side.
        width: H.
        ctx: Device and dtype.
    """

    def __init__(self, num: int, width: int, ctx: BuildContext) -> None:
        super().__init__()
        self._side = int(num**0.5)
        self.weight = self.empty(num, width, device=ctx.device, dtype=ctx.dtype)

    def forward(self, rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return what is added to the patches at `rows`, `columns` `[N]` of an image of that `shape`, `[N, H]`.

        The corners of image and square are one; between positions it is interpolated linearly.
        """
        (up, down, low), (left, right, near) = (
            self._between(place, num) for place, num in zip((rows, columns), shape, strict=True)
        )
        corners = itertools.product(((up, 1 - low), (down, low)), ((left, 1 - near), (right, near)))
        found = torch.zeros(len(rows), self.weight.shape[1], device=rows.device)
        for (row, of_row), (column, of_column) in corners:
            found += self.weight[row * self._side + column] * (of_row * of_column)[:, None]
        return found.to(self.weight.dtype)

    def _between(self, place: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the two positions around each place of `num`, and how near the second is."""
        exact = place.float() * (self._side - 1) / max(num - 1, 1)
        first = exact.long()
        return first, (first + 1).clamp(max=self._side - 1), exact - first
