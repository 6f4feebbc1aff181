"""Gemma 3, text: Gemma 2 with a norm of queries and keys in place of caps, five windows to one layer that sees all.

Windowed layers rotate by a base of their own. Weights: as `Gemma3ForCausalLM` of transformers writes them.
Source: arXiv:2503.19786.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.sdk.config import alternating, either, with_missing
from dovetail.sdk.rope_config import with_window_ropes
from dovetail_models.absent import with_absent
from dovetail_models.gemma2 import Gemma2, gemma_config


class Gemma3(Gemma2):
    """Serves `Gemma3ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Gemma3ForCausalLM",)
    batch_invariant = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        pattern = int(either(hf, "sliding_window_pattern", "_sliding_window_pattern", 6))
        types = alternating(int(hf.get("num_hidden_layers", 0)), pattern)
        given = with_missing(with_absent(hf, cls.architectures[0]), layer_types=types)
        local = float(hf.get("rope_local_base_freq") or 10000.0)
        if hf.get("rope_parameters") is None:
            given = with_missing(given, rope_theta=1e6)
        return with_window_ropes(gemma_config(given, qk_norm=True), theta=local)
