"""The text part of a model that also takes images: its language model, by the plugin of that family.

What belongs to other inputs is not loaded; requests with images are refused. Weights: as the
`…ForConditionalGeneration` classes of transformers write them, with the names of transformers 4 or 5.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import CausalLM, ModelPlugin, WeightRule
from dovetail.sdk.config import with_missing
from dovetail_models.absent import UNSAID
from dovetail_models.gemma3 import Gemma3
from dovetail_models.gemma4 import Gemma4
from dovetail_models.glm4 import Glm4, Glm4vText
from dovetail_models.glm4_moe import Glm4vMoeText
from dovetail_models.lfm2 import Lfm2
from dovetail_models.llama import Llama
from dovetail_models.llama4 import Llama4
from dovetail_models.ministral3 import Ministral3
from dovetail_models.mistral import Mistral
from dovetail_models.qwen2 import Qwen2
from dovetail_models.qwen3 import Qwen3
from dovetail_models.qwen3_5 import Qwen3_5, Qwen3_5Moe
from dovetail_models.qwen3_moe import Qwen3Moe

FAMILIES: dict[str, type[Llama]] = {
    **{"llama": Llama, "mistral": Mistral, "ministral3": Ministral3, "qwen2": Qwen2, "qwen3": Qwen3},
    **{"qwen3_moe": Qwen3Moe, "glm4v_text": Glm4vText, "glm4v_moe_text": Glm4vMoeText},
    **{"gemma3_text": Gemma3, "gemma4_text": Gemma4, "glm4": Glm4, "llama4_text": Llama4},
    **{"lfm2": Lfm2, "qwen3_5_text": Qwen3_5, "qwen3_5_moe_text": Qwen3_5Moe},
    **{"qwen2_vl_text": Qwen2, "qwen2_5_vl_text": Qwen2, "qwen3_vl_text": Qwen3, "qwen3_vl_moe_text": Qwen3Moe},
}
"""Plugins by the `model_type` of the text part."""
FLAT: dict[str, type[Llama]] = {"qwen2_vl": Qwen2, "qwen2_5_vl": Qwen2, "glm4v": Glm4vText}
"""By that of a config whose text keys stand beside the others."""

HEADS: dict[str, bool] = {
    **dict.fromkeys((f"{name}ForConditionalGeneration" for name in ("Gemma3", "Gemma4", "InternVL", "Mistral3")), True),
    "Lfm2VlForConditionalGeneration": True,
    **dict.fromkeys((f"{name}ForConditionalGeneration" for name in ("Qwen3VL", "Qwen3VLMoe")), False),
    **dict.fromkeys((f"{name}ForConditionalGeneration" for name in ("Qwen3_5", "Qwen3_5Moe")), False),
}
"""Whether the output head is tied where the outer configuration does not say; what the inner one says does not hold."""
INNER_HEADS = ("Llama4ForConditionalGeneration",)
"""Those whose inner configuration alone says it. Of all others, a head is tied where either says so."""

PREFIX = r"(?:model\.language_model\.|language_model\.model\.|model\.)"
OTHERS = (
    "visual|vision_tower|vision_model|vision_embed_tokens|embed_vision|multi_modal_projector|image_newline|audio_tower"
    "|embed_audio"
)
NOT_TEXT = rf"(?:model\.)?(?:{OTHERS})(?:\..*)?"


def family_of(hf: Mapping[str, Any]) -> tuple[type[Llama], Mapping[str, Any]]:
    """Return the plugin of the text part, and the text part's config.

    Raises:
        ModelError: No plugin serves it.
    """
    text = hf.get("text_config")
    kind = str((hf if text is None else text).get("model_type"))
    known = FLAT if text is None else FAMILIES
    if kind not in known:
        raise ModelError(
            f"config.json: the text part is of the type {kind!r}, and of this kind are served {', '.join(known)}; "
            "try --model-impl transformers"
        )
    return known[kind], hf if text is None else text


def is_tied(hf: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Say whether the output head is the embedding, as transformers does by the architecture."""
    architecture, key = str(hf["architectures"][0]), "tie_word_embeddings"
    outer, inner = hf.get(key), text.get(key)
    if architecture.startswith("Lfm2") and hf.get("tie_embedding") is not None:
        outer = hf["tie_embedding"]
    if architecture in HEADS:
        return bool(HEADS[architecture] if outer is None else outer)
    return bool(inner) or (bool(outer) and architecture not in INNER_HEADS)


class TextPart(ModelPlugin):
    """Serves the text of models that take images, too."""

    architectures: ClassVar[Sequence[str]] = ("Lfm2VlForConditionalGeneration",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        family, text = family_of(hf)
        for key in hf:  # what stands beside the text part is about other inputs
            hf.get(key)
        # The files are written as the outer config says.
        outer = {key: hf[key] for key in ("dtype", "torch_dtype") if hf.get(key) is not None}
        for key in outer:
            text.get(key)  # what it says there does not hold
        outer |= dict.fromkeys(("tie_word_embeddings", "tie_embedding"), is_tied(hf, text))  # the second one is LFM2's
        said = with_missing(text, **UNSAID.get(str(text.get("model_type")), {}))
        given: Any = ChainMap({"architectures": [family.architectures[0]], **outer}, said)  # type: ignore[arg-type]
        config = family.config_from_hf(given)
        extra = {**config.extra, "family": family}
        unused = "|".join([NOT_TEXT, *([_named(config.not_loaded)] if config.not_loaded else [])])
        return replace(config, architecture=str(hf["architectures"][0]), extra=extra, not_loaded=unused)

    @classmethod
    def why_not_invariant(cls, config: ModelConfig) -> str | None:
        """See `ModelPlugin`: the plugin of the text part has to say it, too."""
        family: type[Llama] = config.extra["family"]
        return super().why_not_invariant(config) or family.why_not_invariant(config)

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        family: type[Llama] = config.extra["family"]
        return family.build(config, ctx)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        family: type[Llama] = config.extra["family"]
        return (WeightRule(NOT_TEXT, ""), *(_renamed(rule) for rule in family.weight_map(config)))


def _renamed(rule: WeightRule) -> WeightRule:
    """Return a rule that also knows the names under which a text part stands."""
    return replace(rule, module_pattern=_named(rule.module_pattern))


def _named(pattern: str) -> str:
    """Return a pattern of names with those under which a text part stands."""
    if pattern.startswith(r"model\."):
        return PREFIX + pattern.removeprefix(r"model\.")
    return rf"(?:language_model\.)?{pattern}"
