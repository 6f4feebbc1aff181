"""Rotary embeddings of transformers that depend on the length of what is computed: one choice holds for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dovetail_models.transformers.plugin import refusal


def freeze_ropes(model: Any, hf: Mapping[str, Any], context_len: int) -> None:
    """Choose by the longest request that is served.

    Transformers chooses by each call's longest row, and computes a request anew when it grows past the limit. Here rows
    of many requests are one call, and keys stay in the cache.

    Raises:
        ModelError: A kind that grows with every token.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, Mapping) else [(None, kinds)]:
            if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
                continue
            if layer_type is not None:
                raise refusal(hf, f"its rope kind is {kind!r} for layers of one type")
            _freeze(module, kind, hf, context_len)


def _freeze(module: Any, kind: str, hf: Mapping[str, Any], context_len: int) -> None:
    config = module.config
    if kind == "longrope":
        freqs, factor = ROPE_INIT_FUNCTIONS[kind](config, module.inv_freq.device, seq_len=context_len)
        module.register_buffer("inv_freq", freqs, persistent=False)
        module.attention_scaling = factor
    elif context_len > config.max_position_embeddings:
        raise refusal(hf, f"its rope kind {kind!r} changes with the length of a request")
    module.rope_type = "default"  # or it would choose anew in every call
