"""The least time that a decode step can take: all weights and the streams' KV cache read once from the device's memory.

What cannot be known is None, with the reason in words: a figure without its floor is better than one beside a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.contracts.model import ModelConfig
from dovetail.errors import ModelError
from dovetail.runtime.hf_config import dense_config, read_config

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
GATED = frozenset(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"))
"""Dense decoders with three matrices in their feed-forward part, whose size follows from `config.json`."""
QKV_BIAS = frozenset(("Qwen2ForCausalLM",))
QK_NORM = frozenset(("Qwen3ForCausalLM",))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a decode step reads.

    Attributes:
        weight_bytes: Every weight but the embedding table, of which a step reads a few rows; the output layer counts.
        kv_token_bytes: Of one token in one layer.
        windows: How far back each layer looks; None: to the start.
    """

    name: str
    dtype: str
    weight_bytes: int
    kv_token_bytes: int
    windows: tuple[int | None, ...]
    vocab_size: int

    def kv_bytes(self, context: float) -> float:
        """Bytes of KV cache that a stream of `context` tokens reads in a step."""
        return sum(self.kv_token_bytes * min(context, window or context) for window in self.windows)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that a token takes, all layers together."""
        return self.kv_token_bytes * len(self.windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bytes a second of a large copy, reads and writes counted, and where the figure comes from."""

    bytes_per_s: float
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Both halves of the floor, or why one is missing."""

    facts: ModelFacts | None
    bandwidth: Bandwidth | None
    unknown: str | None = None

    def step_s(self, streams: float, context: float, shared: float = 0.0) -> float | None:
        """Least seconds of a decode step.

        Args:
            streams: Requests decoded together.
            context: Tokens that each attends to, on average, `shared` included.
            shared: Tokens of a prefix that all have in common, which need to be read only once.
        """
        if self.facts is None or self.bandwidth is None:
            return None
        own = self.facts.kv_bytes(context) - self.facts.kv_bytes(shared)
        read = self.facts.weight_bytes + streams * own + self.facts.kv_bytes(shared)
        return read / self.bandwidth.bytes_per_s


def facts_of(folder: Path, dtype: str | None = None) -> ModelFacts | str:
    """Compute the facts of a model folder, or say why they are not known.

    Args:
        folder: With `config.json`; weights are not needed.
        dtype: What the model is served in, if not in the checkpoint's.
    """
    try:
        hf = read_config(folder)
        config = dense_config(hf)
    except (ModelError, ValueError, TypeError, IndexError) as error:
        return str(error)
    if config.architecture not in GATED:
        return f"the size of {config.architecture} does not follow from config.json in a way this version knows"
    if hf.get("quantization_config"):
        return f"{folder / 'config.json'} has a quantization_config, whose sizes this version does not know"
    dtype = dtype or config.dtype
    size = DTYPE_BYTES[dtype]
    return ModelFacts(
        name=config.architecture,
        dtype=dtype,
        weight_bytes=size * num_read(config, hf),
        kv_token_bytes=2 * config.num_kv_heads * config.head_dim * size,
        windows=config.layer_windows or (None,) * config.num_layers,
        vocab_size=config.vocab_size,
    )


def num_read(config: ModelConfig, hf: Mapping[str, Any]) -> int:
    """Count the parameters that a decode step reads: all layers, the last norm and the output layer."""
    hidden, q = config.hidden_size, config.num_qo_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * config.intermediate_size + 2 * hidden
    if config.architecture in QKV_BIAS or hf.get("attention_bias"):
        layer += q + 2 * kv + (hidden if hf.get("attention_bias") else 0)
    if config.architecture in QK_NORM:
        layer += 2 * config.head_dim
    return config.num_layers * layer + hidden + config.vocab_size * hidden
