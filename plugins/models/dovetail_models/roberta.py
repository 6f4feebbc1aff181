"""RoBERTa and XLM-R: BERT whose places begin behind that of the padding, and whose head that scores has its own matrix.

Weights: as `RobertaModel`, `XLMRobertaModel` and their classes with heads write them. Source: arXiv:1907.11692,
arXiv:1911.02116.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.model import WeightRule
from dovetail_models.bert import RULES, UNUSED, bert_config
from dovetail_models.encoder import EncoderPlugin

HEAD = (
    WeightRule(r"classifier\.dense", "classify.dense"),
    WeightRule(r"classifier\.out_proj", "classify.scores"),
)


class Roberta(EncoderPlugin):
    """Serves `RobertaModel`, `XLMRobertaModel` and what stands on them."""

    architectures: ClassVar[Sequence[str]] = (
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "XLMRobertaModel",
        "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification",
    )

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        padding = hf.get("pad_token_id")
        first = (1 if padding is None else int(padding)) + 1
        return bert_config(hf, first_place=first, num_types=int(hf.get("type_vocab_size", 2)))

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*(HEAD if config.num_labels else ()), *RULES, UNUSED)
