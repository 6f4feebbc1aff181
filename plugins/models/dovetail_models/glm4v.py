"""GLM-4.1V and GLM-4.5V: GLM-4, or GLM-4.5 with experts, behind a tower with learned positions, stretched bicubically.

Weights: as `Glm4vForConditionalGeneration` and `Glm4vMoeForConditionalGeneration` of transformers write them. Source:
arXiv:2507.01006.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.layers.norm import LayerNorm, RMSNorm
from dovetail.sdk.layers.tower import (
    Convolution,
    Learned,
    PatchEmbedding,
    TowerAttention,
    TowerLayer,
    TowerMLP,
    axial_rope,
    in_pieces,
    merged_places,
)
from dovetail_models.image_values import CLIP_MEAN, CLIP_STD
from dovetail_models.seeing import SeeingModel, checked_grid, number, numbers

VISUAL = r"(?:model\.)?visual\."
BLOCK = VISUAL + r"blocks\.(\d+)\."
TOWER_RULES = (
    WeightRule(VISUAL + r"patch_embed\.proj", "tower.patches"),
    WeightRule(VISUAL + "post_conv_layernorm", "tower.first_norm"),
    WeightRule(VISUAL + r"embeddings\.position_embedding", "tower.places"),
    WeightRule(BLOCK + "norm1", r"tower.layers.\1.attention_norm"),
    WeightRule(BLOCK + "norm2", r"tower.layers.\1.mlp_norm"),
    WeightRule(BLOCK + r"attn\.qkv", r"tower.layers.\1.attention.qkv"),
    WeightRule(BLOCK + r"attn\.proj", r"tower.layers.\1.attention.out"),
    WeightRule(BLOCK + r"mlp\.(gate|up)_proj", r"tower.layers.\1.mlp.gate_up", r"\2"),
    WeightRule(BLOCK + r"mlp\.down_proj", r"tower.layers.\1.mlp.down"),
    WeightRule(VISUAL + "post_layernorm", "tower.last_norm"),
    WeightRule(VISUAL + "downsample", "tower.merge"),
    WeightRule(VISUAL + r"merger\.proj", "tower.merger.proj"),
    WeightRule(VISUAL + r"merger\.post_projection_norm", "tower.merger.norm"),
    WeightRule(VISUAL + r"merger\.(gate|up)_proj", "tower.merger.mlp.gate_up", r"\1"),
    WeightRule(VISUAL + r"merger\.down_proj", "tower.merger.mlp.down"),
)
MERGED_EPS = 1e-5
NUMBERS = {
    **{"depth": 24, "hidden_size": 1536, "intermediate_size": 13696, "num_heads": 12, "patch_size": 14},
    **{"temporal_patch_size": 2, "spatial_merge_size": 2, "image_size": 336, "out_hidden_size": 4096},
}
"""What transformers takes where `vision_config` says nothing."""


class GlmMerger(nn.Module):
    """Makes embeddings of the decoder out of merged blocks."""

    def __init__(self, config: ModelConfig, inner: int, ctx: BuildContext) -> None:
        super().__init__()
        width = config.hidden_size
        self.proj = ctx.linear("proj", width, width, bias=False)
        self.norm = LayerNorm(width, MERGED_EPS, ctx)
        self.mlp = TowerMLP(config, ctx.at("mlp"), inner=inner)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, hidden]` to `[N, hidden]`."""
        found: Tensor = self.mlp(F.gelu(self.norm(self.proj(x))))
        return found


class GlmTower(nn.Module):
    """The vision tower."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        facts: Mapping[str, Any] = config.extra["tower"]
        width, heads, patch = facts["hidden_size"], facts["num_heads"], facts["patch_size"]
        merge, eps = facts["spatial_merge_size"], facts["eps"]
        self._merge, self._dim, self._theta = merge, width // heads, facts["theta"]
        self._side = facts["image_size"] // patch
        shape = (3, facts["temporal_patch_size"], patch, patch)
        self.patches = PatchEmbedding(shape, width, ctx, mean=CLIP_MEAN, std=CLIP_STD, bias=True)
        self.first_norm, self.last_norm = RMSNorm(width, eps, ctx), RMSNorm(width, eps, ctx)
        self.places = Learned((self._side**2, width), ctx)
        own = replace(config, hidden_size=width, hidden_act=facts["hidden_act"])
        self.layers = nn.ModuleList(
            self.layer(own, facts, ctx.at(f"layers.{index}")) for index in range(facts["depth"])
        )
        self.merge = Convolution((width, merge, merge), facts["out_hidden_size"], ctx, bias=True)
        merged = replace(own, hidden_size=facts["out_hidden_size"])
        self.merger = GlmMerger(merged, facts["intermediate_size"], ctx.at("merger"))

    @staticmethod
    def layer(config: ModelConfig, facts: Mapping[str, Any], ctx: BuildContext) -> TowerLayer:
        """Make a layer; its MLP is as wide as the tower's output."""
        width, eps = config.hidden_size, facts["eps"]
        norms = RMSNorm(width, eps, ctx), RMSNorm(width, eps, ctx)
        bias = facts["qkv_bias"]
        attention = TowerAttention(width, facts["num_heads"], ctx.at("attention"), bias=bias, out_bias=False)
        return TowerLayer(norms, attention, TowerMLP(config, ctx.at("mlp"), inner=facts["out_hidden_size"]))

    def forward(self, patches: Tensor, grid: Sequence[int]) -> Tensor:
        """Map the patches `[N, 3 * patch * patch]` of an image to embeddings `[1, N / merged, hidden]`."""
        shape = checked_grid(patches, grid)
        rows, columns = merged_places(*shape, self._merge, patches.device)
        rope = axial_rope(rows, columns, self._dim, self._theta)
        x = self.first_norm(self.patches(patches))
        x = x + self._stretched(rows, columns, shape)
        for layer in self.layers:
            x = layer(x, rope, None)
        blocks = self.last_norm(x).view(-1, self._merge**2, x.shape[1]).transpose(1, 2)
        found = in_pieces(self.merger, self.merge(blocks.flatten(1)), self._merge**2)
        return found[None]

    def _stretched(self, rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the learned positions of patches at `rows`, `columns` `[N]` of an image of that shape, `[N, H]`."""
        high, wide = shape
        at = torch.stack(((columns + 0.5) / wide, (rows + 0.5) / high), -1) * 2 - 1
        square = self.places.weight.float().view(1, self._side, self._side, -1).permute(0, 3, 1, 2)
        found = F.grid_sample(square, at[None, None], "bicubic", "border", align_corners=False)
        return found[0, :, 0].T.to(self.places.weight.dtype)


class Glm4v(SeeingModel):
    """Serves `Glm4vForConditionalGeneration` and its relative with experts."""

    architectures: ClassVar[Sequence[str]] = ("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration")
    batch_invariant = True
    tower = GlmTower
    tower_rules = TOWER_RULES
    sections = (8, 12, 12)
    inner_key = "out_hidden_size"

    @classmethod
    def seen_facts(cls, hf: Mapping[str, Any]) -> dict[str, Any] | None:
        """See `SeeingModel`."""
        # Both have another default, so that a configuration without it is refused.
        return {**cls.tower_facts(hf.get("vision_config") or {}), "embed_id": number(hf, "image_token_id", 0)}

    @classmethod
    def tower_facts(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """See `SeeingModel`."""
        return {
            **numbers(vision, NUMBERS),
            "hidden_act": str(vision.get("hidden_act") or "silu"),
            "eps": float(vision.get("rms_norm_eps", 1e-5)),
            "qkv_bias": bool(vision.get("attention_bias", False)),
        }
