"""Qwen2-VL: Qwen2 behind the tower of Qwen2.5-VL in its older form: layer norms, no gate, and no windows.

Weights: as `Qwen2VLForConditionalGeneration` of transformers 4 and 5 writes them. Source: arXiv:2409.12191.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.layers.norm import LayerNorm
from dovetail.sdk.layers.transformer import MLP
from dovetail_models.qwen2_5_vl import BLOCK, EPS, TOWER_RULES, Qwen2_5Tower
from dovetail_models.seeing import SeeingModel, number, numbers

NUMBERS = {
    **{"depth": 32, "hidden_size": 1280, "num_heads": 16, "patch_size": 14},
    **{"temporal_patch_size": 2, "spatial_merge_size": 2},
}
"""What transformers takes where `vision_config` says nothing; its `hidden_size` is that of the decoder."""


class Qwen2Tower(Qwen2_5Tower):
    """The vision tower."""

    @staticmethod
    def make_norm(width: int, ctx: BuildContext) -> nn.Module:
        """See `Qwen2_5Tower`."""
        return LayerNorm(width, EPS, ctx)

    @staticmethod
    def mlp(config: ModelConfig, ctx: BuildContext, inner: int) -> nn.Module:
        """See `Qwen2_5Tower`."""
        return MLP(config, ctx, bias=True, inner=inner)


class Qwen2_VL(SeeingModel):
    """Serves `Qwen2VLForConditionalGeneration`."""

    architectures: ClassVar[Sequence[str]] = ("Qwen2VLForConditionalGeneration",)
    batch_invariant = True
    tower = Qwen2Tower
    tower_rules = (
        WeightRule(BLOCK + r"mlp\.fc1", r"tower.layers.\1.mlp.up"),
        WeightRule(BLOCK + r"mlp\.fc2", r"tower.layers.\1.mlp.down"),
        *TOWER_RULES,
    )
    sections = (16, 24, 24)

    @classmethod
    def tower_facts(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """See `SeeingModel`."""
        width = number(vision, "embed_dim", NUMBERS["hidden_size"])
        facts = numbers(ChainMap({"hidden_size": width}, vision), NUMBERS)  # type: ignore[arg-type]
        return {
            **facts,
            "intermediate_size": width * number(vision, "mlp_ratio", 4),
            "hidden_act": str(vision.get("hidden_act") or "quick_gelu"),
            "full_layers": tuple(range(facts["depth"])),
        }
