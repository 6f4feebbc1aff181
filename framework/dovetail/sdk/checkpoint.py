"""Tensors of a checkpoint: what a file says of one before it is read, and looks at one that was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.contracts.config import ModelConfig

if TYPE_CHECKING:
    import torch

NAMES = {
    **{"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int8": "I8", "uint8": "U8"},
    **{"int32": "I32", "float8_e4m3fn": "F8_E4M3"},
}
"""How safetensors calls dtypes that a conversion may make."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype that a conversion may make, `?` for another one."""
    return NAMES.get(str(dtype).removeprefix("torch."), "?")


def dense_numel(config: ModelConfig) -> int:
    """Count the parameters as the plugin says, else as a dense decoder's with a gated MLP, without biases."""
    if config.num_params is not None:
        return config.num_params
    hidden = config.hidden_size
    keys = sum((spec.num_qo_heads + spec.num_kv_heads) * spec.qk_dim for spec in config.layers)
    values = sum((spec.num_qo_heads + spec.num_kv_heads) * spec.v_dim for spec in config.layers)
    layer = 3 * hidden * config.intermediate_size + 2 * hidden
    tables = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return hidden * (keys + values) + config.num_layers * layer + tables + hidden


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a floating-point tensor has neither NaN nor infinities; narrower formats than 16 bits are not looked at.

    The smallest and the largest number are the cheapest look: NaN is passed on, and nothing is written.
    """
    if not tensor.is_floating_point() or tensor.element_size() < 2 or not tensor.numel():
        return True
    return all(bool(end.isfinite()) for end in tensor.aminmax())
