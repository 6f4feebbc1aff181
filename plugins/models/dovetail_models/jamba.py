"""Jamba: Mamba 1 and a few layers of attention that rotates nothing, experts in every other layer.

Weights: as `JambaForCausalLM` of transformers writes them. Source: arXiv:2403.19887.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

from torch import nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.checkpoint import dense_numel
from dovetail.sdk.config import dense_config, with_missing, without_rope
from dovetail.sdk.layers.routing import Routing
from dovetail_models.bamba import FEED_FORWARD
from dovetail_models.experts import EXPERTS, MOE, ExpertDecoder, needed, num_experts, with_experts
from dovetail_models.folding import FoldingDecoder, check_silu
from dovetail_models.llama import LAYER, Llama
from dovetail_models.mamba1 import ScanShape, SelectiveScan, scan_rules

UNREAD = ("use_mamba_kernels", "use_mambapy", "use_associative_scan", "layers_block_type", "layer_types",
          "num_logits_to_keep", "mamba_inner_layernorms", "sliding_window")  # fmt: skip
"""Keys that transformers does not read either."""
SCAN_KEYS = ("mamba_d_state", "mamba_dt_rank", "mamba_d_conv", "mamba_conv_bias", "mamba_proj_bias")
AT = LAYER + r"feed_forward\."
RULES = (
    WeightRule(AT + "router", MOE + "router"),
    WeightRule(AT + r"experts\.(\d+)\.(gate|up)_proj", EXPERTS + "gate_up", r"\3", r"\2"),
    WeightRule(AT + r"experts\.(\d+)\.down_proj", EXPERTS + "down", expert=r"\2"),
    WeightRule(AT + r"experts\.gate_up_proj", EXPERTS + "gate_up"),
    WeightRule(AT + r"experts\.down_proj", EXPERTS + "down"),
    *scan_rules(LAYER + r"mamba\.", r"layers.\1.attention."),
    *FEED_FORWARD,
)


class JambaDecoder(FoldingDecoder, ExpertDecoder):
    """A decoder of Mamba 1 and attention."""

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        if config.layer(index).state:
            return SelectiveScan(config, index, ctx.at("attention"), config.extra["scan"])
        return super().attention(config, index, ctx)


class Jamba(Llama):
    """Serves `JambaForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("JambaForCausalLM",)
    batch_invariant = True
    decoder = JambaDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        for key in UNREAD:
            hf.get(key)
        given: Any = ChainMap({"layer_types": None}, cast("MutableMapping[str, Any]", hf))
        config = dense_config(given, has_windows=False)
        check_silu(config)
        num, hidden = config.num_layers, config.hidden_size
        shape = ScanShape.of(hf, hidden, prefix="mamba_", names=SCAN_KEYS)
        shape = shape._replace(norm="weights", norm_eps=config.norm_eps)
        attends = _turns(hf, num, "attn_layer", 8, 4)
        specs = [spec if full else shape.spec(spec.index) for spec, full in zip(config.layers, attends, strict=True)]
        config = replace(without_rope(config, [True] * num), layers=tuple(specs))
        experts = num_experts(hf)
        sparse = [turn and experts > 1 for turn in _turns(hf, num, "expert_layer", 2, 1)]
        config = replace(config, extra={**config.extra, "scan": shape, "sparse": tuple(sparse)})
        top_k = needed(with_missing(hf, num_experts_per_tok=2), "num_experts_per_tok")
        if any(sparse):
            routing = Routing(num=experts, top_k=top_k, normalise=False)
            config = with_experts(config, routing, config.intermediate_size, sparse=sparse)
        return replace(config, num_params=dense_numel(config) + attends.count(False) * shape.numel(hidden))

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*RULES, *super().weight_map(config))


def _turns(hf: Mapping[str, Any], num: int, name: str, period: int, offset: int) -> list[bool]:
    """Return whether each layer is one of those that come once in a period.

    Raises:
        ModelError: No layer can be one of them.
    """
    every, first = (hf.get(f"{name}_{key}") for key in ("period", "offset"))
    every, first = (default if said is None else int(said) for said, default in ((every, period), (first, offset)))
    if not 0 <= first < every:
        raise ModelError(f"config.json: {name}_offset is {first}; possible: 0 to {name}_period - 1, {every - 1}")
    return [index % every == first for index in range(num)]
