"""EXAONE 4: norms behind attention and MLP and of each query and key; full layers among windowed ones do not rotate.

Weights: as `Exaone4ForCausalLM` of transformers writes them. Source: arXiv:2507.11407.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.model import WeightRule
from dovetail.sdk.config import alternating, dense_config, with_missing, without_rope
from dovetail.sdk.layers.decoder import PostNormLayer
from dovetail_models.absent import with_absent
from dovetail_models.llama import DenseDecoder, Llama
from dovetail_models.olmo3 import POST_NORMS


class PostNormDecoder(DenseDecoder):
    """Norms behind attention and MLP."""

    block = PostNormLayer


class Exaone4(Llama):
    """Serves `Exaone4ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Exaone4ForCausalLM",)
    decoder = PostNormDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        hf = with_absent(hf, cls.architectures[0])
        num, pattern = int(hf.get("num_hidden_layers", 0)), hf.get("sliding_window_pattern") or 4
        # A pattern is a number, or a letter a layer of a repeated group: L windowed, G full.
        every = len(pattern) if isinstance(pattern, str) else int(pattern)
        has_windows = hf.get("sliding_window") is not None
        types = alternating(num, every) if has_windows else ["full_attention"] * num
        config = dense_config(with_missing(hf, layer_types=types), qk_norm=True)
        if not has_windows:
            return config
        return without_rope(config, [spec.sliding_window is None for spec in config.layers])

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*POST_NORMS, *super().weight_map(config))
