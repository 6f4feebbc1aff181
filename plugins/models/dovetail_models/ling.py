"""Ling 3 and Ring 3: five layers of Kimi Delta Attention to one of latent attention with a gate, and experts.

Decays have a bound, and they and the gates of outputs are products of the whole stream. Weights: as
`BailingHybridForCausalLM` of transformers writes them, which is as the hub has them. Source: arXiv:2510.26692.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import with_missing
from dovetail.sdk.rope_config import interleaved
from dovetail_models.absent import with_absent
from dovetail_models.deepseek import add_experts, check_choice, latent_config
from dovetail_models.experts import ExpertModel, needed
from dovetail_models.glm4_moe import sigmoid_routing
from dovetail_models.kimi_linear import FULL, LINEAR, KimiDecoder, KimiShape, by_first_name, checked, with_delta

UNREAD = "num_nextn_predict_layers", "num_mtp_layers", "mtp_loss_scaling_factor", "tie_word_embeddings"
"""Keys that change nothing: layers that predict further tokens are not used, and transformers never ties the head."""


class Ling(ExpertModel):
    """Serves `BailingHybridForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("BailingHybridForCausalLM",)
    decoder = KimiDecoder
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        hf = with_absent(hf, cls.architectures[0])
        for key in UNREAD:
            hf.get(key)
        check_choice(hf, "hidden_act", "silu")
        changed = by_first_name(hf) | {
            "layer_types": None,
            "q_lora_rank": None,
            "tie_word_embeddings": None,
            "head_dim": needed(hf, "qk_rope_head_dim"),
        }
        given: Any = ChainMap(changed, cast("MutableMapping[str, Any]", hf))
        given = with_missing(given, first_k_dense_replace=2, n_shared_experts=1, n_group=8)
        config = interleaved(latent_config(given))
        more = config.num_layers * config.hidden_size * config.layers[0].num_qo_heads  # each layer's gate
        config = replace(config, num_params=(config.num_params or 0) + more)
        config.extra["latent"]["gate"] = True
        return add_experts(with_delta(config, cls._types(hf), cls._shape(hf)), given, sigmoid_routing(given))

    @staticmethod
    def _shape(hf: Mapping[str, Any]) -> KimiShape:
        """Return sizes; files that transformers writes have the width of what is rotated in `head_dim`.

        Raises:
            ModelError: Decays are bounded by no number below 0.
        """
        names = (
            ("linear_num_heads", "num_attention_heads"),
            ("linear_head_dim", "head_dim"),
            ("linear_conv_kernel_dim", "short_conv_kernel_size"),
        )
        pairs = [(hf.get(name), needed(with_missing(hf, short_conv_kernel_size=4), usual)) for name, usual in names]
        heads, dim, taps = (usual if own is None else int(own) for own, usual in pairs)
        bound = float(hf.get("kda_lower_bound", -5.0))
        if bound >= 0:
            raise ModelError(f"config.json: kda_lower_bound is {bound}; possible: numbers below 0")
        return KimiShape(heads, dim, taps, bound if hf.get("kda_safe_gate", True) else 0.0, is_narrow=False)

    @staticmethod
    def _types(hf: Mapping[str, Any]) -> list[str]:
        num, every = needed(hf, "num_hidden_layers"), int(hf.get("layer_group_size") or 6)
        usual = (LINEAR if (index + 1) % every else FULL for index in range(num))
        return checked(hf.get("layer_types") or usual, num)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        delta = "|".join(str(spec.index) for spec in config.layers if spec.state) or "none"
        at, to = rf"model\.layers\.({delta})\.attention\.", r"layers.\1.attention."
        every = r"model\.layers\.(\d+)\.attention\."
        own = (
            WeightRule(at + "([qkv])_proj", to + "qkv", r"\2"),
            WeightRule(at + "([qkv])_conv1d", to + "conv", r"\2"),
            WeightRule(at + "f_proj", to + "decay"),
            WeightRule(at + "b_proj", to + "rate"),
            WeightRule(at + "A_log", to + "a_log"),
            WeightRule(at + "dt_bias", to + "dt_bias"),
            WeightRule(at + "o_norm", to + "norm"),
            WeightRule(every + "g_proj", to + "gate"),
            WeightRule(every + "dense", to + "out"),
            WeightRule(every + "q_proj", to + "q"),
            WeightRule(every + "kv_a_proj_with_mqa", to + "kv_a"),
            WeightRule(every + "kv_a_layernorm", to + "kv_a_norm"),
            WeightRule(every + "kv_b_proj", to + "kv_b"),
            WeightRule(r"model\.word_embeddings", "embed"),
        )
        extra, *rest = super().weight_map(config)
        return (extra, *own, *rest)
