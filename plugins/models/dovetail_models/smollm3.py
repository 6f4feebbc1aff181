"""SmolLM3: Llama without rotation in every fourth layer.

Weights: as `SmolLM3ForCausalLM` of transformers writes them. Source: the model's card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.sdk.config import with_missing, without_rope
from dovetail_models.llama import Llama


class SmolLM3(Llama):
    """Serves `SmolLM3ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("SmolLM3ForCausalLM",)
    has_windows = None

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        num, every = int(hf.get("num_hidden_layers", 0)), int(hf.get("no_rope_layer_interval") or 4)
        rotated = hf.get("no_rope_layers") or [(index + 1) % every != 0 for index in range(num)]
        if num and len(rotated) != num:  # without a number the config is refused below
            raise ModelError(f"config.json: no_rope_layers has {len(rotated)} entries for {num} layers")
        # Without layer_types, windows are in layers without rotation.
        types = ["full_attention" if rotates else "sliding_attention" for rotates in rotated]
        given = with_missing(hf, layer_types=types, rope_theta=2e6, tie_word_embeddings=True, use_sliding_window=False)
        return without_rope(super().config_from_hf(given), [not rotates for rotates in rotated])
