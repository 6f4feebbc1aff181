"""BERT: an encoder with learned places and types of text, norms behind each sum, biases, and an MLP without a gate.

Weights: as `BertModel`, `BertForMaskedLM` and `BertForSequenceClassification` of transformers write them, with and
without the prefix `bert.`. Source: arXiv:1810.04805.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig, RopeConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import WeightRule
from dovetail.sdk.checkpoint import dense_numel
from dovetail.sdk.config import dense_config, with_missing
from dovetail_models.encoder import EncoderPlugin, encoder_config

BODY = r"(?:bert\.|roberta\.|mpnet\.)?"
LAYER = BODY + r"encoder\.layer\.(\d+)\."
RULES = (
    WeightRule(BODY + r"embeddings\.word_embeddings", "embed.tokens"),
    WeightRule(BODY + r"embeddings\.position_embeddings", "embed.places"),
    WeightRule(BODY + r"embeddings\.token_type_embeddings", "embed.types"),
    WeightRule(BODY + r"embeddings\.LayerNorm", "embed.norm"),
    WeightRule(LAYER + r"attention\.output\.dense", r"layers.\1.attention.out"),
    WeightRule(LAYER + r"attention\.output\.LayerNorm", r"layers.\1.attention_norm"),
    WeightRule(LAYER + r"intermediate\.dense", r"layers.\1.mlp.up"),
    WeightRule(LAYER + r"output\.dense", r"layers.\1.mlp.down"),
    WeightRule(LAYER + r"output\.LayerNorm", r"layers.\1.mlp_norm"),
    WeightRule(BODY + r"embeddings\.(?:position_ids|token_type_ids)", ""),
    *(
        WeightRule(LAYER + rf"attention\.self\.{name}", r"layers.\1.attention.qkv", name[0])
        for name in ("query", "key", "value")
    ),
)
UNUSED = WeightRule(BODY + r"(?:pooler|cls|lm_head)\..*", "")
"""Heads of other tasks, and BERT's pooler, which only a classifier reads."""


def bert_config(hf: Mapping[str, Any], *, first_place: int = 0, **extra: Any) -> ModelConfig:
    """Translate the config of BERT or one of its relatives, whose first token stands at place `first_place`."""
    if (kind := hf.get("position_embedding_type", "absolute")) != "absolute":
        raise ModelError(f"config.json: position_embedding_type {kind!r} is not supported; possible: absolute")
    given = with_missing(hf, hidden_act="gelu", layer_norm_eps=1e-12)
    config = dense_config(given, norm_eps="layer_norm_eps", has_windows=False)
    places = config.max_position_embeddings - first_place
    plain = replace(config, rope=RopeConfig(kind="none"), max_position_embeddings=places)
    hidden, num = config.hidden_size, config.num_layers
    tables = (config.max_position_embeddings + extra["num_types"]) * hidden
    made = encoder_config(plain, hf, offset=first_place, **extra)
    return replace(made, num_params=dense_numel(made) + tables - num * hidden * config.intermediate_size)


class Bert(EncoderPlugin):
    """Serves `BertModel` and what stands on it."""

    architectures: ClassVar[Sequence[str]] = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return bert_config(hf, num_types=int(hf.get("type_vocab_size", 2)))

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        head = (WeightRule(BODY + r"pooler\.dense", "classify.dense"), WeightRule("classifier", "classify.scores"))
        return (*(head if config.num_labels else ()), *RULES, UNUSED)
