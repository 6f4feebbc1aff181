"""Decoders without their output head: for embeddings, or with a matrix in its place that scores labels.

The body is that of the family's own plugin. Weights: as the `…Model` and `…ForSequenceClassification` classes of
transformers write them. EmbeddingGemma is such a decoder that sees both ways.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from dovetail.contracts.cache import Window
from dovetail.contracts.config import LayerSpec, ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import CausalLM, ModelPlugin, WeightRule
from dovetail_models.encoder import SCORES, num_labels
from dovetail_models.gemma2 import Gemma2
from dovetail_models.gemma3 import Gemma3
from dovetail_models.llama import Llama
from dovetail_models.mistral import Mistral
from dovetail_models.phi3 import Phi3
from dovetail_models.qwen2 import Qwen2
from dovetail_models.qwen3 import Qwen3

FAMILIES: dict[str, type[Llama]] = {
    **{"Llama": Llama, "Mistral": Mistral, "Qwen2": Qwen2, "Qwen3": Qwen3, "Phi3": Phi3},
    **{"Gemma2": Gemma2, "Gemma3Text": Gemma3},
}
"""Plugins by what their classes' names begin with."""


class NoHead(nn.Module):
    """Stands in the place of an output head."""

    def forward(self, hidden: Tensor) -> Tensor:
        """There is none.

        Raises:
            ModelError: Always.
        """
        raise ModelError("the model has no output head")


class ScoreRows(nn.Module):
    """Scores of labels, of the last token's state."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.scores = ctx.linear("scores", config.hidden_size, config.num_labels)

    def forward(self, pooled: Tensor) -> Tensor:
        """Map `[R, H]` to `[R, N]`."""
        return self.scores(pooled)


class Headless(ModelPlugin):
    """Serves `Qwen3Model`, `Qwen3ForSequenceClassification` and their like."""

    architectures: ClassVar[Sequence[str]] = tuple(
        f"{family}{task}" for family in FAMILIES for task in ("Model", SCORES)
    )

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        name = str(hf["architectures"][0])
        family = FAMILIES[name.removesuffix("Model").removesuffix(SCORES)]
        hf.get("tie_word_embeddings")  # of a head that there is not
        given: Any = ChainMap({"architectures": [family.architectures[0]], "tie_word_embeddings": True}, hf)  # type: ignore[arg-type]
        config = family.config_from_hf(given)
        if hf.get("use_bidirectional_attention"):
            config = replace(config, layers=tuple(map(_bidirectional, config.layers)))
        return replace(
            config,
            architecture=name,
            generates=False,
            num_labels=num_labels(hf) if name.endswith(SCORES) else 0,
            extra={**config.extra, "family": family},
        )

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        family: type[Llama] = config.extra["family"]
        model: Any = family.build(config, ctx)
        model.lm_head = NoHead()
        if config.num_labels:
            model.classify = ScoreRows(config, ctx.at("classify"))
        made: CausalLM = model
        return made

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        family: type[Llama] = config.extra["family"]
        rules = [replace(rule, module_pattern=_shortened(rule.module_pattern)) for rule in family.weight_map(config)]
        return (*((WeightRule("score", "classify.scores"),) if config.num_labels else ()), *rules)


def _bidirectional(spec: LayerSpec) -> LayerSpec:
    """Return a layer that sees half of its window to either side, as transformers reads Gemma's configs."""
    window = spec.sliding_window
    return replace(spec, causal=False, reach=spec.reach if window is None else Window(window // 2 + 1))


def _shortened(pattern: str) -> str:
    """Return a pattern that also knows the names of a body by itself."""
    return pattern.replace(r"model\.", r"(?:model\.)?", 1) if pattern.startswith(r"model\.") else pattern
