"""InternVL: a decoder behind InternViT, which reads tiles of an image by themselves; blocks of patches are merged.

Weights: as `InternVLForConditionalGeneration` of transformers 4 and 5 writes them (the hub's `…-hf`). Source:
arXiv:2504.10479.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.layers.norm import LayerNorm, RMSNorm
from dovetail.sdk.layers.tower import Divided, Learned, PatchEmbedding, TowerAttention, TowerLayer, in_pieces
from dovetail.sdk.layers.transformer import MLP
from dovetail_models.image_values import IMAGENET_MEAN, IMAGENET_STD, tile_sizes
from dovetail_models.seeing import Projector, SeeingModel, check_value, number, numbers

TOWER = r"(?:model\.)?vision_tower\."
LAYER = TOWER + r"encoder\.layer\.(\d+)\."
PROJECTOR = r"(?:model\.)?multi_modal_projector\."
TOWER_RULES = (
    WeightRule(TOWER + r"embeddings\.patch_embeddings\.projection", "tower.patches"),
    WeightRule(TOWER + r"embeddings\.cls_token", "tower.first"),
    WeightRule(TOWER + r"embeddings\.position_embeddings", "tower.places"),
    WeightRule(LAYER + "layernorm_before", r"tower.layers.\1.attention_norm"),
    WeightRule(LAYER + "layernorm_after", r"tower.layers.\1.mlp_norm"),
    WeightRule(LAYER + "lambda_1", r"tower.layers.\1.attention_scale"),
    WeightRule(LAYER + "lambda_2", r"tower.layers.\1.mlp_scale"),
    WeightRule(LAYER + r"attention\.([qkv])_proj", r"tower.layers.\1.attention.qkv", r"\2"),
    WeightRule(LAYER + r"attention\.([qk]_norm)", r"tower.layers.\1.attention.\2"),
    WeightRule(LAYER + r"attention\.projection_layer", r"tower.layers.\1.attention.out"),
    WeightRule(LAYER + r"mlp\.fc1", r"tower.layers.\1.mlp.up"),
    WeightRule(LAYER + r"mlp\.fc2", r"tower.layers.\1.mlp.down"),
    WeightRule(PROJECTOR + "layer_norm", "tower.norm"),
    WeightRule(PROJECTOR + "linear_1", "tower.projector.up"),
    WeightRule(PROJECTOR + "linear_2", "tower.projector.down"),
)
NUMBERS = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
"""What transformers takes where `vision_config` says nothing."""
NORMS = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
QK_EPS = 1e-6
MERGED_EPS = 1e-5


class ScaledLayer(TowerLayer):
    """What attention and MLP find is multiplied by a learned vector each, before it is added."""

    def __init__(
        self,
        norms: tuple[nn.Module, nn.Module],
        attention: TowerAttention,
        mlp: nn.Module,
        scales: tuple[Learned, Learned],
    ) -> None:
        super().__init__(norms, attention, mlp)
        self.attention_scale, self.mlp_scale = scales

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, windows: Divided | None) -> Tensor:
        """See `TowerLayer`."""
        x = x + self.attention_scale.weight * self.attention(self.attention_norm(x), rope, windows)
        return in_pieces(lambda rows: rows + self.mlp_scale.weight * self.mlp(self.mlp_norm(rows)), x)


class InternTower(nn.Module):
    """The vision tower, with what makes the decoder's embeddings of its hidden states."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        facts: Mapping[str, Any] = config.extra["tower"]
        width, patch = facts["hidden_size"], facts["patch_size"]
        self._side, self._merge = facts["side"], facts["spatial_merge_size"]
        self.patches = PatchEmbedding((3, patch, patch), width, ctx, mean=IMAGENET_MEAN, std=IMAGENET_STD, bias=True)
        self.first = Learned((1, 1, width), ctx)
        self.places = Learned((1, self._side**2 + 1, width), ctx)
        own = replace(config, hidden_size=width, hidden_act=facts["hidden_act"])
        self.layers = nn.ModuleList(
            self.layer(own, facts, ctx.at(f"layers.{index}")) for index in range(facts["depth"])
        )
        merged = width * self._merge**2
        self.norm = LayerNorm(merged, MERGED_EPS, ctx)
        self.projector = Projector(merged, config.hidden_size, facts["projector_act"], ctx.at("projector"))

    @staticmethod
    def layer(config: ModelConfig, facts: Mapping[str, Any], ctx: BuildContext) -> TowerLayer:
        """Make a layer."""
        width, make, eps = config.hidden_size, NORMS[facts["norm"]], facts["eps"]
        attention = TowerAttention(
            width,
            facts["num_heads"],
            ctx.at("attention"),
            bias=facts["qkv_bias"],
            out_bias=True,
            qk_norm=(lambda: RMSNorm(width, QK_EPS, ctx)) if facts["qk_norm"] else None,
        )
        mlp = MLP(config, ctx.at("mlp"), bias=True, inner=facts["intermediate_size"])
        norms, scales = (make(width, eps, ctx), make(width, eps, ctx)), (Learned((width,), ctx), Learned((width,), ctx))
        return ScaledLayer(norms, attention, mlp, scales)

    def forward(self, patches: Tensor, grid: Sequence[int]) -> Tensor:
        """Map the patches of tiles `[N, 3 * patch * patch]`, row by row, to embeddings `[1, N / merged, hidden]`."""
        side, merge, num = self._side, self._merge, grid[0]
        if list(grid[1:]) != [side, side] or len(patches) != num * side**2:
            raise ValueError(f"an image has {len(patches)} patches, and its grid is {list(grid)}; a tile has {side}**2")
        x = self.patches(patches).view(num, side**2, -1)
        x = torch.cat((self.first.weight.expand(num, -1, -1), x), 1) + self.places.weight
        x, tiles = x.flatten(0, 1), ((num, side**2 + 1),)
        for layer in self.layers:
            x = layer(x, None, tiles)
        x = x.view(num, side**2 + 1, -1)[:, 1:]
        blocks = x.reshape(num, side // merge, merge, side // merge, merge, -1).transpose(2, 3)
        found: Tensor = self.projector(self.norm(blocks.reshape(num * (side // merge) ** 2, -1)))
        return found[None]


class InternVL(SeeingModel):
    """Serves `InternVLForConditionalGeneration`."""

    architectures: ClassVar[Sequence[str]] = ("InternVLForConditionalGeneration",)
    batch_invariant = True
    tower = InternTower
    tower_rules = TOWER_RULES
    layer_widths = 13  # normed queries and keys beside the plain ones, and a token more for each tile

    @classmethod
    def seen_facts(cls, hf: Mapping[str, Any]) -> dict[str, Any] | None:
        """See `SeeingModel`."""
        vision = hf.get("vision_config") or {}
        if vision.get("model_type", "internvl_vision") != "internvl_vision":
            return None
        check_value(hf, "vision_feature_layer", -1, -1)
        check_value(hf, "vision_feature_select_strategy", "default", "default")
        side, patch, merge = tile_sizes(hf)
        return {
            **cls.tower_facts(ChainMap({"patch_size": patch}, vision)),
            "embed_id": number(hf, "image_token_id", 151667),
            "side": side // patch,
            "spatial_merge_size": merge,
            "projector_act": str(hf.get("projector_hidden_act") or "gelu"),
        }

    @classmethod
    def tower_facts(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """See `SeeingModel`."""
        for key in ("use_absolute_position_embeddings", "use_mean_pooling"):
            check_value(vision, key, True, True)
        check_value(vision, "use_mask_token", False, False)
        if (norm := vision.get("norm_type", "layer_norm")) not in NORMS:
            raise ModelError(f"config.json: vision_config: norm_type {norm!r}: possible: {', '.join(NORMS)}")
        return {
            **numbers(vision, {**NUMBERS, "patch_size": 14}),
            "hidden_act": str(vision.get("hidden_act") or "gelu"),
            "norm": norm,
            "eps": float(vision.get("layer_norm_eps", 1e-6)),
            "qkv_bias": bool(vision.get("attention_bias", False)),
            "qk_norm": bool(vision.get("use_qk_norm", False)),
        }
