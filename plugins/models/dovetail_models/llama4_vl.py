"""Llama 4 with its vision tower, which reads tiles of an image by themselves, and merges blocks of their patches.

Weights: as `Llama4ForConditionalGeneration` of transformers writes them. Source: the models' cards, and transformers'
description.
"""

from __future__ import annotations

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
from dovetail.sdk.layers.norm import LayerNorm
from dovetail.sdk.layers.tower import Learned, TowerAttention, TowerLayer, axial_rope, merged_places
from dovetail.sdk.layers.transformer import MLP
from dovetail_models.image_values import tile_sizes
from dovetail_models.seeing import SeeingModel, check_value, number, numbers

TOWER = r"(?:model\.)?vision_model\."
LAYER = TOWER + r"model\.layers\.(\d+)\."
TOWER_RULES = (
    WeightRule(TOWER + r"patch_embedding\.linear", "tower.patches"),
    WeightRule(TOWER + "class_embedding", "tower.last"),
    WeightRule(TOWER + "positional_embedding_vlm", "tower.places"),
    WeightRule(TOWER + "layernorm_pre", "tower.norm_before"),
    WeightRule(TOWER + "layernorm_post", "tower.norm_behind"),
    WeightRule(LAYER + "input_layernorm", r"tower.layers.\1.attention_norm"),
    WeightRule(LAYER + "post_attention_layernorm", r"tower.layers.\1.mlp_norm"),
    WeightRule(LAYER + r"self_attn\.([qkv])_proj", r"tower.layers.\1.attention.qkv", r"\2"),
    WeightRule(LAYER + r"self_attn\.o_proj", r"tower.layers.\1.attention.out"),
    WeightRule(LAYER + r"mlp\.fc1", r"tower.layers.\1.mlp.up"),
    WeightRule(LAYER + r"mlp\.fc2", r"tower.layers.\1.mlp.down"),
    WeightRule(TOWER + r"vision_adapter\.mlp\.fc1", "tower.merge"),
    WeightRule(TOWER + r"vision_adapter\.mlp\.fc2", "tower.merged"),
    WeightRule(r"(?:model\.)?multi_modal_projector\.linear_1", "tower.projector"),
)
EPS = 1e-5
"""Of all norms, whatever `norm_eps` says: transformers reads it nowhere."""
NUMBERS = {"depth": 34, "hidden_size": 768, "intermediate_size": 5632, "num_heads": 16}
"""What transformers takes where `vision_config` says nothing."""


class Llama4Tower(nn.Module):
    """The vision tower, with what makes the decoder's embeddings of its hidden states."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        facts: Mapping[str, Any] = config.extra["tower"]
        width, merge, side = facts["hidden_size"], facts["spatial_merge_size"], facts["side"]
        self._side, self._merge, self._dtype = side, merge, ctx.dtype
        self._dim, self._theta = width // facts["num_heads"], facts["theta"]
        self.patches = ctx.linear("patches", 3 * facts["patch_size"] ** 2, width)
        self.last = Learned((width,), ctx)
        self.places = Learned((side**2 + 1, width), ctx)
        self.norm_before, self.norm_behind = LayerNorm(width, EPS, ctx), LayerNorm(width, EPS, ctx)
        own = replace(config, hidden_size=width, hidden_act="gelu")
        self.layers = nn.ModuleList(
            self.layer(own, facts, ctx.at(f"layers.{index}")) for index in range(facts["depth"])
        )
        adapter = facts["adapter"]
        self.merge = ctx.linear("merge", width * merge**2, adapter)
        self.merged = ctx.linear("merged", adapter, adapter)
        self.projector = ctx.linear("projector", adapter, config.hidden_size)

    @staticmethod
    def layer(config: ModelConfig, facts: Mapping[str, Any], ctx: BuildContext) -> TowerLayer:
        """Make a layer. Its heads are rotated in pairs of neighbours."""
        width = config.hidden_size
        dim = width // facts["num_heads"]
        order = (*range(0, dim, 2), *range(1, dim, 2))
        attention = TowerAttention(width, facts["num_heads"], ctx.at("attention"), order=order)
        mlp = MLP(config, ctx.at("mlp"), bias=True, inner=facts["intermediate_size"])
        return TowerLayer((LayerNorm(width, EPS, ctx), LayerNorm(width, EPS, ctx)), attention, mlp)

    def forward(self, patches: Tensor, grid: Sequence[int]) -> Tensor:
        """Map the patches of tiles `[N, 3 * patch * patch]`, row by row, to embeddings `[1, N / merged, hidden]`."""
        side, merge, num = self._side, self._merge, grid[0]
        if list(grid[1:]) != [side, side] or len(patches) != num * side**2:
            raise ValueError(f"an image has {len(patches)} patches, and its grid is {list(grid)}; a tile has {side}**2")
        # Rounded after each operation, as in training: of 256 values, every other one differs otherwise.
        pixels = (patches.to(torch.bfloat16) * (1 / 255) - 0.5) / 0.5
        x = self.patches(pixels.to(self._dtype)).view(num, side**2, -1)
        x = torch.cat((x, self.last.weight.expand(num, 1, -1)), 1) + self.places.weight
        x = self.norm_before(x.flatten(0, 1))
        rope, tiles = self._rope(num, patches.device), ((num, side**2 + 1),)
        for layer in self.layers:
            x = layer(x, rope, tiles)
        x = self.norm_behind(x).view(num, side**2 + 1, -1)[:, :-1]
        blocks = x.reshape(num, side // merge, merge, side // merge, merge, -1).transpose(2, 3)
        merged = F.gelu(self.merge(blocks.reshape(num * (side // merge) ** 2, -1)))
        found: Tensor = self.projector(F.gelu(self.merged(merged)))
        return found[None]

    def _rope(self, num: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosine and sine `[N, 1, D]`. Patches turn by their column first, from 1 on; the last one does not."""
        rows, columns = (F.pad(each + 1, (0, 1)) for each in merged_places(self._side, self._side, 1, device))
        cos, sin = axial_rope(columns, rows, self._dim, self._theta)
        return cos.repeat(num, 1, 1), sin.repeat(num, 1, 1)


class Llama4_VL(SeeingModel):
    """Serves `Llama4ForConditionalGeneration`."""

    architectures: ClassVar[Sequence[str]] = ("Llama4ForConditionalGeneration",)
    batch_invariant = True
    tower = Llama4Tower
    tower_rules = TOWER_RULES

    @classmethod
    def seen_facts(cls, hf: Mapping[str, Any]) -> dict[str, Any] | None:
        """See `SeeingModel`."""
        side, patch, merge = tile_sizes(hf, "pixel_shuffle_ratio")
        facts = cls.tower_facts(ChainMap({"patch_size": patch}, hf.get("vision_config") or {}))
        if (merged := facts["hidden_size"] * merge**2) != facts["intermediate_size"]:
            raise ModelError(
                f"config.json: vision_config: intermediate_size {facts['intermediate_size']}: possible: {merged}, the "
                "width of a merged block"
            )
        return {
            **facts,
            "embed_id": number(hf, "image_token_id" if "image_token_id" in hf else "image_token_index", 200092),
            "side": side // patch,
            "spatial_merge_size": merge,
        }

    @classmethod
    def tower_facts(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """See `SeeingModel`."""
        check_value(vision, "hidden_act", "gelu", "gelu")
        check_value(vision, "vision_feature_layer", -1, -1)
        check_value(vision, "vision_feature_select_strategy", "default", "default")
        check_value(vision, "multi_modal_projector_bias", False, False)
        adapter = number(vision, "projector_output_dim", 4096)
        check_value(vision, "projector_input_dim", 4096, adapter)
        check_value(vision, "vision_output_dim", 7680, adapter)
        return {**numbers(vision, {**NUMBERS, "patch_size": 14}), "adapter": adapter}
