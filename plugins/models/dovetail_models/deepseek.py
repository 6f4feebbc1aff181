"""DeepSeek V2 and V3 (R1, V3.1, Kimi-K2) and GLM-4.7-Flash: latent attention, experts behind dense first layers.

V3.2 has an indexer beside, which picks the tokens that each one sees: all, of a text that is no longer than it picks.
So far it is V3, and longer requests are refused.

Weights: as `DeepseekV2ForCausalLM`, `DeepseekV3ForCausalLM`, `DeepseekV32ForCausalLM` and `Glm4MoeLiteForCausalLM` of
transformers write them. Source: arXiv:2405.04434, arXiv:2412.19437, arXiv:2512.02556.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

from torch import nn

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import dense_config, with_missing
from dovetail.sdk.layers.routing import Routing
from dovetail.sdk.rope_config import interleaved
from dovetail_models.absent import with_absent
from dovetail_models.experts import ExpertDecoder, ExpertModel, expert_groups, needed, num_experts, with_experts
from dovetail_models.glm4_moe import sigmoid_routing
from dovetail_models.latent import LatentAttention
from dovetail_models.llama import LAYER

ATTENTION = LAYER + r"self_attn\."
INDEXER = ATTENTION + r"indexer\..*"
RULES = (
    WeightRule(ATTENTION + "q_a_proj", r"layers.\1.attention.q_a"),
    WeightRule(ATTENTION + "q_a_layernorm", r"layers.\1.attention.q_a_norm"),
    WeightRule(ATTENTION + "q(?:_b)?_proj", r"layers.\1.attention.q"),
    WeightRule(ATTENTION + "kv_a_proj_with_mqa", r"layers.\1.attention.kv_a"),
    WeightRule(ATTENTION + "kv_a_layernorm", r"layers.\1.attention.kv_a_norm"),
    WeightRule(ATTENTION + "kv_b_proj", r"layers.\1.attention.kv_b"),
)


def latent_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate everything but the experts: one latent row a token, its key a little wider than its value."""
    nope, turned, v_dim = (needed(hf, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    check_choice(hf, "qk_head_dim", nope + turned)
    rank, q_rank = needed(hf, "kv_lora_rank"), hf.get("q_lora_rank")
    latent = {"nope": nope, "v_dim": v_dim, "q_rank": q_rank, "bias": bool(hf.get("attention_bias", False))}
    config = dense_config(hf, has_windows=False, latent=latent)
    scale = (nope + turned) ** -0.5 * yarn_scale(config) ** 2
    row: dict[str, Any] = {"mixer": "latent", "num_kv_heads": 1, "qk_dim": rank + turned, "v_dim": rank}
    heads, hidden = config.layers[0].num_qo_heads, config.hidden_size
    queries = hidden * q_rank + q_rank * heads * (nope + turned) if q_rank else hidden * heads * (nope + turned)
    per_layer = queries + hidden * (rank + turned) + rank * heads * (nope + v_dim) + heads * v_dim * hidden + 2 * hidden
    tables = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return replace(
        config,
        layers=tuple(replace(spec, scale=scale, **row) for spec in config.layers),
        num_params=config.num_layers * per_layer + tables + hidden,
    )


def yarn_scale(config: ModelConfig) -> float:
    """Return the factor of queries and keys that `mscale_all_dim` asks for."""
    factor, share = config.rope.params.get("factor", 1.0), config.rope.params.get("mscale_all_dim")
    return 1.0 if not share or factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def check_choice(hf: Mapping[str, Any], key: str, known: object) -> None:
    """Raise a `ModelError` if a key is there and has another value."""
    if (given := hf.get(key, known)) != known:
        raise ModelError(f"config.json: {key} {given!r} is not supported; possible: {known!r}")


def add_experts(config: ModelConfig, hf: Mapping[str, Any], routing: Routing) -> ModelConfig:
    """Add experts to all layers but the first.

    Raises:
        ModelError: They are not in every layer behind those, or `mlp_layer_types` is not a type for each layer.
    """
    first, inner = int(hf.get("first_k_dense_replace") or 0), needed(hf, "moe_intermediate_size")
    if int(hf.get("moe_layer_freq") or 1) != 1:
        raise ModelError(f"config.json: moe_layer_freq {hf['moe_layer_freq']} is not supported; possible: 1")
    types = hf.get("mlp_layer_types")
    if types is not None and (len(types) != config.num_layers or not set(types) <= {"dense", "sparse"}):
        raise ModelError(f"config.json: mlp_layer_types is {types}; possible: {config.num_layers} of dense and sparse")
    sparse = [index >= first for index in range(config.num_layers)] if types is None else [t == "sparse" for t in types]
    shared = inner * int(hf.get("n_shared_experts") or 0)
    return with_experts(config, routing, inner, shared_inner=shared, sparse=sparse)


class LatentDecoder(ExpertDecoder):
    """Latent attention, and experts."""

    def attention(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        return LatentAttention(config, index, ctx.at("attention"), **config.extra["latent"])


class DeepseekV3(ExpertModel):
    """Serves `DeepseekV3ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("DeepseekV3ForCausalLM",)
    decoder = LatentDecoder
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        hf = with_absent(hf, cls.architectures[0])
        config = latent_config(hf)
        config = interleaved(config) if hf.get("rope_interleave", True) else config
        check_choice(hf, "scoring_func", "sigmoid")
        check_choice(hf, "topk_method", "noaux_tc")
        return add_experts(config, hf, sigmoid_routing(hf))

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*RULES, *super().weight_map(config))


class Glm4MoeLite(DeepseekV3):
    """Serves `Glm4MoeLiteForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Glm4MoeLiteForCausalLM",)
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return super().config_from_hf(with_missing(hf, qk_rope_head_dim=hf.get("head_dim")))


class DeepseekV32(DeepseekV3):
    """Serves `DeepseekV32ForCausalLM` for texts of up to `index_topk` tokens, without its indexer."""

    architectures: ClassVar[Sequence[str]] = ("DeepseekV32ForCausalLM",)
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        longest = needed(hf, "index_topk")
        for key in ("index_head_dim", "index_n_heads", "indexer_types"):
            hf.get(key)  # the indexer's own
        types = hf.get("layer_types")
        if types is not None:
            full = ["full_attention" if kind == "indexed_attention" else kind for kind in types]
            hf = ChainMap({"layer_types": full}, cast("MutableMapping[str, Any]", hf))
        config = super().config_from_hf(hf)
        return replace(config, max_position_embeddings=min(longest, config.max_position_embeddings), not_loaded=INDEXER)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (WeightRule(INDEXER, ""), *super().weight_map(config))


class DeepseekV2(DeepseekV3):
    """Serves `DeepseekV2ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("DeepseekV2ForCausalLM",)
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        method, is_normal = str(hf.get("topk_method", "greedy")), bool(hf.get("norm_topk_prob", False))
        if method not in ("greedy", "group_limited_greedy") or is_normal:
            given = f"topk_method {method!r} with norm_topk_prob {is_normal}"
            raise ModelError(f"config.json: {given} is not supported; possible: greedy, group_limited_greedy; False")
        check_choice(hf, "scoring_func", "softmax")
        groups = expert_groups(hf)
        routing = Routing(
            num=num_experts(hf),
            top_k=needed(hf, "num_experts_per_tok"),
            normalise=False,
            scale=float(hf.get("routed_scaling_factor", 1.0)),
            group_score="best",
            is_wide=True,
            **({} if method == "greedy" else groups),
        )
        return add_experts(interleaved(latent_config(hf)), hf, routing)
