"""Pixtral and Mistral 3: a decoder behind a tower with 2-D rotary positions, whose patches Mistral 3 merges.

Weights: as `LlavaForConditionalGeneration` with a `PixtralVisionModel`, and `Mistral3ForConditionalGeneration`, of
transformers 4 and 5 write them. Of a LLaVA with another tower, the text part is served. Source: arXiv:2410.07073.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.tower import (
    PatchEmbedding,
    TowerAttention,
    TowerLayer,
    TowerMLP,
    axial_rope,
    merged_places,
)
from dovetail_models.image_values import CLIP_MEAN, CLIP_STD
from dovetail_models.seeing import Projector, SeeingModel, check_value, checked_grid, number, numbers

TOWER = r"(?:model\.)?vision_tower\."
LAYER = TOWER + r"transformer\.layers\.(\d+)\."
PROJECTOR = r"(?:model\.)?multi_modal_projector\."
TOWER_RULES = (
    WeightRule(TOWER + "patch_conv", "tower.patches"),
    WeightRule(TOWER + "ln_pre", "tower.norm"),
    WeightRule(LAYER + "attention_norm", r"tower.layers.\1.attention_norm"),
    WeightRule(LAYER + "ffn_norm", r"tower.layers.\1.mlp_norm"),
    WeightRule(LAYER + r"attention\.([qkv])_proj", r"tower.layers.\1.attention.qkv", r"\2"),
    WeightRule(LAYER + r"attention\.o_proj", r"tower.layers.\1.attention.out"),
    WeightRule(LAYER + r"feed_forward\.(gate|up)_proj", r"tower.layers.\1.mlp.gate_up", r"\2"),
    WeightRule(LAYER + r"feed_forward\.down_proj", r"tower.layers.\1.mlp.down"),
    WeightRule(PROJECTOR + "norm", "tower.merger.norm"),
    WeightRule(PROJECTOR + r"patch_merger\.merging_layer", "tower.merger.merge"),
    WeightRule(PROJECTOR + "linear_1", "tower.projector.up"),
    WeightRule(PROJECTOR + "linear_2", "tower.projector.down"),
)
EPS = 1e-5
NUMBERS = {**{"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16}}
"""What transformers takes where `vision_config` says nothing."""


class BlockMerger(nn.Module):
    """Makes one hidden state of the tower out of a block of patches."""

    def __init__(self, width: int, merge: int, eps: float, ctx: BuildContext) -> None:
        super().__init__()
        self._merge = merge
        self.norm = RMSNorm(width, eps, ctx)
        self.merge = ctx.linear("merge", width * merge**2, width, bias=False)

    def forward(self, x: Tensor, shape: tuple[int, int]) -> Tensor:
        """Map the patches of an image of that shape `[N, H]`, row by row, to `[N / merge**2, H]`."""
        high, wide = (side // self._merge for side in shape)
        blocks = self.norm(x).view(high, self._merge, wide, self._merge, -1).permute(0, 2, 4, 1, 3)
        merged: Tensor = self.merge(blocks.reshape(high * wide, -1))
        return merged


class PixtralTower(nn.Module):
    """The vision tower, with what makes the decoder's embeddings of its hidden states."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        facts: Mapping[str, Any] = config.extra["tower"]
        width, heads, patch = facts["hidden_size"], facts["num_heads"], facts["patch_size"]
        self._dim, self._theta = width // heads, facts["theta"]
        self.patches = PatchEmbedding((3, patch, patch), width, ctx, mean=CLIP_MEAN, std=CLIP_STD)
        self.norm = RMSNorm(width, EPS, ctx)
        own = replace(config, hidden_size=width, hidden_act=facts["hidden_act"])
        self.layers = nn.ModuleList(
            self.layer(own, facts, ctx.at(f"layers.{index}")) for index in range(facts["depth"])
        )
        merge = facts["merge"]
        self.merger = None if merge is None else BlockMerger(width, merge, config.norm_eps, ctx.at("merger"))
        act, has_bias = facts["projector"]
        self.projector = Projector(width, config.hidden_size, act, ctx.at("projector"), bias=has_bias)

    @staticmethod
    def layer(config: ModelConfig, facts: Mapping[str, Any], ctx: BuildContext) -> TowerLayer:
        """Make a layer."""
        width = config.hidden_size
        norms = RMSNorm(width, EPS, ctx), RMSNorm(width, EPS, ctx)
        attention = TowerAttention(width, facts["num_heads"], ctx.at("attention"), bias=False)
        return TowerLayer(norms, attention, TowerMLP(config, ctx.at("mlp"), inner=facts["intermediate_size"]))

    def forward(self, patches: Tensor, grid: Sequence[int]) -> Tensor:
        """Map an image's patches `[N, 3 * patch * patch]`, row by row, to embeddings `[1, N / merged, hidden]`."""
        shape = checked_grid(patches, grid)
        rope = axial_rope(*merged_places(*shape, 1, patches.device), self._dim, self._theta, between=True)
        x = self.norm(self.patches(patches))
        for layer in self.layers:
            x = layer(x, rope, None)
        found: Tensor = self.projector(x if self.merger is None else self.merger(x, shape))
        return found[None]


class Pixtral(SeeingModel):
    """Serves `LlavaForConditionalGeneration` and `Mistral3ForConditionalGeneration`."""

    architectures: ClassVar[Sequence[str]] = ("LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration")
    batch_invariant = True
    tower = PixtralTower
    tower_rules = TOWER_RULES

    @classmethod
    def seen_facts(cls, hf: Mapping[str, Any]) -> dict[str, Any] | None:
        """See `SeeingModel`."""
        vision, merges = hf.get("vision_config") or {}, hf.get("model_type") == "mistral3"
        if vision.get("model_type", "pixtral" if merges else None) != "pixtral":
            return None
        check_value(hf, "vision_feature_layer", -1 if merges else -2, -1)
        if not merges:
            check_value(hf, "vision_feature_select_strategy", "default", "full")
        facts = cls.tower_facts({"patch_size": 14, **vision} if merges else vision)
        merge = number(hf, "spatial_merge_size", 2) if merges else None
        default = 10 if merges else 32000
        return {
            **facts,
            "embed_id": number(hf, "image_token_id" if "image_token_id" in hf else "image_token_index", default),
            "merge": merge,
            "spatial_merge_size": merge or 1,
            "projector": (
                str(hf.get("projector_hidden_act") or "gelu"),
                bool(hf.get("multimodal_projector_bias", not merges)),
            ),
        }

    @classmethod
    def tower_facts(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """See `SeeingModel`."""
        facts = numbers(vision, NUMBERS)
        head = facts["hidden_size"] // facts["num_heads"]
        check_value(vision, "head_dim", head, head)
        return {**facts, "hidden_act": str(vision.get("hidden_act") or "gelu")}
