"""What architectures with experts share: their keys of `config.json`, their names in checkpoints, the decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from dovetail.contracts.config import ModelConfig, RoutedExperts
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.checkpoint import dense_numel
from dovetail.sdk.config import either
from dovetail.sdk.layers.moe import MixtureOfExperts
from dovetail.sdk.layers.routing import Routing
from dovetail_models.llama import LAYER, DenseDecoder, Llama

MLP = LAYER + r"(?:mlp|block_sparse_moe)"
AT = MLP + r"\."
MOE, EXPERTS = r"layers.\1.mlp.", r"layers.\1.mlp.experts."
EXPERT_RULES = (
    WeightRule(AT + "(?:gate|router)", MOE + "router"),
    WeightRule(MLP, MOE + "router"),  # where the correction stands beside the router, not in it
    WeightRule(AT + r"experts\.(\d+)\.(gate|up)_proj", EXPERTS + "gate_up", r"\3", r"\2"),
    WeightRule(AT + r"experts\.(\d+)\.down_proj", EXPERTS + "down", expert=r"\2"),
    WeightRule(AT + r"experts\.(\d+)\.w1", EXPERTS + "gate_up", "gate", r"\2"),
    WeightRule(AT + r"experts\.(\d+)\.w3", EXPERTS + "gate_up", "up", r"\2"),
    WeightRule(AT + r"experts\.(\d+)\.w2", EXPERTS + "down", expert=r"\2"),
    WeightRule(AT + r"experts\.gate_up_proj", EXPERTS + "gate_up"),
    WeightRule(AT + r"experts\.down_proj", EXPERTS + "down"),
    WeightRule(AT + r"shared_experts?\.(gate|up)_proj", MOE + "shared.gate_up", r"\2"),
    WeightRule(AT + r"shared_experts?\.down_proj", MOE + "shared.down"),
    WeightRule(AT + "shared_expert_gate", MOE + "shared_gate"),
)
"""Experts one by one or all in a tensor, under the names of Qwen or of Mixtral."""


def num_experts(hf: Mapping[str, Any]) -> int:
    """Return how many experts there are, under any of the names for it.

    Raises:
        ModelError: None is there, or they differ.
    """
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    given = {name: int(hf[name]) for name in names if hf.get(name) is not None}
    if len(set(given.values())) != 1:
        said = ", ".join(f"{name} = {value}" for name, value in given.items()) or "none of " + ", ".join(names)
        raise ModelError(f"config.json: the number of experts is not clear: {said}")
    return next(iter(given.values()))


def needed(hf: Mapping[str, Any], key: str, second: str | None = None) -> int:
    """Return a whole number that must be there, also under the second name that transformers reads.

    Raises:
        ModelError: It is not, or both names say different things.
    """
    value = hf.get(key) if second is None else either(hf, key, second, None)
    if value is None:
        raise ModelError(f"config.json: the key {key!r} is missing")
    return int(value)


def expert_groups(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return `Routing.groups` and `top_groups`; as in transformers, only a null is none: 0 is a number of groups."""
    num, chosen = hf.get("n_group", 1), hf.get("topk_group", 1)
    groups = 1 if num is None else int(num)
    return {"groups": groups, "top_groups": int(groups == 1 if chosen is None else chosen)}


def check_routing(routing: Routing) -> None:
    """Refuse a choice that cannot be made.

    Raises:
        ModelError: More experts are chosen than there are, or groups do not divide them, or hold too few.
    """
    num, top_k, groups, chosen = routing.num, routing.top_k, routing.groups, routing.top_groups
    if not 0 < top_k <= num:
        raise ModelError(f"config.json: num_experts_per_tok is {top_k}, and there are {num} experts")
    least = 2 if groups > 1 and routing.group_score == "best_two" else 1
    if not 0 < chosen <= groups or num % groups or num < groups * least or top_k > num // groups * chosen:
        raise ModelError(
            f"config.json: {num} experts in {groups} groups (n_group), of which {chosen} are chosen (topk_group) for "
            f"{top_k} experts of a token (num_experts_per_tok); possible: equally large groups of {least} experts or "
            f"more, and from 1 to {max(groups, 1)} chosen ones with at least {top_k} experts"
        )


def with_experts(
    config: ModelConfig,
    routing: Routing,
    inner: int,
    *,
    shared_inner: int = 0,
    has_shared_gate: bool = False,
    sparse: Sequence[bool] | None = None,
) -> ModelConfig:
    """Add experts to a dense config.

    Args:
        config: Its `intermediate_size` is that of layers without experts; what it counts itself is without MLPs.
        routing: How experts are chosen.
        inner: Width between of an expert.
        shared_inner: That of the shared experts together; 0: there are none.
        has_shared_gate: Whether each token weighs the shared expert.
        sparse: Which layers have experts; None: all.

    Raises:
        ModelError: See `check_routing`.
    """
    check_routing(routing)
    sparse = (True,) * config.num_layers if sparse is None else tuple(sparse)
    hidden, dense = config.hidden_size, sum(not has for has in sparse)
    per_layer = (routing.num * inner + shared_inner) * 3 * hidden + routing.num * hidden + has_shared_gate * hidden
    rest = dense_numel(replace(config, intermediate_size=0)) + dense * 3 * hidden * config.intermediate_size
    extra = {"routing": routing, "inner": inner, "shared_inner": shared_inner, "sparse": sparse}
    extra["has_shared_gate"] = has_shared_gate
    routed = RoutedExperts(routing.num, routing.top_k, (len(sparse) - dense) * routing.num * inner * 3 * hidden)
    total = rest + (len(sparse) - dense) * per_layer
    return replace(config, num_params=total, experts=routed, extra={**config.extra, **extra})


def sparse_layers(hf: Mapping[str, Any]) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`-th, but those of `mlp_only_layers` (Qwen)."""
    step, dense = int(hf.get("decoder_sparse_step") or 1), set(hf.get("mlp_only_layers") or ())
    return [index not in dense and (index + 1) % step == 0 for index in range(int(hf["num_hidden_layers"]))]


class ExpertDecoder(DenseDecoder):
    """A decoder some of whose layers have experts in place of an MLP."""

    def mlp(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        extra = config.extra
        if not extra["sparse"][index]:
            return super().mlp(config, index, ctx)
        return MixtureOfExperts(
            config,
            ctx.at("mlp"),
            extra["routing"],
            extra["inner"],
            shared_inner=extra["shared_inner"],
            has_shared_gate=extra["has_shared_gate"],
        )


class ExpertModel(Llama):
    """What plugins of such architectures subclass."""

    decoder = ExpertDecoder

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        # Behind the last layer may stand those that predict further tokens: they are not used.
        extra = WeightRule(rf"model\.layers\.{config.num_layers}\..*", "")
        return (extra, *EXPERT_RULES, *super().weight_map(config))
