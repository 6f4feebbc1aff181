"""The least time of a decode step: weights and the streams' KV cache are read once, states read and written once.

What cannot be known is None, with the reason in words: a figure without its floor is better than one beside a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dovetail.contracts.cache import CacheGroup, Chunk, Recurrent, Window
from dovetail.contracts.checkpoint import TensorHeader
from dovetail.contracts.config import ModelConfig, RoutedExperts
from dovetail.contracts.errors import ConfigError
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.memory.estimates import group_token_bytes
from dovetail.sdk.checkpoint import dense_numel
from dovetail.sdk.config import ITEM_BYTES
from dovetail_server.start.folder_facts import config_of

GATED = frozenset(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"))
"""Dense decoders with gated feed-forward layers, whose size follows from `config.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a decode step reads.

    Attributes:
        weight_bytes: Every weight but the embedding table, of which a step reads a few rows, and but experts; the
            output layer counts.
        caches: By group of layers, the bytes that a token takes in them, and how far back they look (None: to the
            start).
        experts: Those of which a token takes some; None: the model has none.
        expert_bytes: Of all experts.
        state_bytes: Of a stream's recurrent states.
    """

    name: str
    dtype: str
    weight_bytes: int
    caches: tuple[tuple[int, int | None], ...]
    vocab_size: int
    experts: RoutedExperts | None = None
    expert_bytes: int = 0
    state_bytes: int = 0

    def read_bytes(self, streams: float) -> float:
        """Bytes of weights that a step of so many streams reads: experts, if each stream chooses evenly and alone."""
        if self.experts is None:
            return self.weight_bytes
        missed: float = (1 - self.experts.top_k / self.experts.num) ** streams
        return self.weight_bytes + (1 - missed) * self.expert_bytes

    def kv_bytes(self, context: float) -> float:
        """Bytes of KV cache that a stream of `context` tokens reads in a step."""
        return sum(size * min(context, window or context) for size, window in self.caches)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that a token takes, all layers together."""
        return sum(size for size, _ in self.caches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bytes a second of a large copy, reads and writes counted, and where the figure comes from.

    Attributes:
        device: Name of the GPU that was measured, if one was.
    """

    bytes_per_s: float
    origin: str
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Both halves of the floor, or why one is missing."""

    facts: ModelFacts | None
    bandwidth: Bandwidth | None
    unknown: str | None = None

    def describe(self) -> str:
        """Say in a line what the floor is and rests on, or why there is none."""
        facts, rate = self.facts, self.bandwidth
        if facts is None or rate is None:
            return f"floor: unknown: {self.unknown}"
        read = facts.read_bytes(1)
        step = (read + 2 * facts.state_bytes) / rate.bytes_per_s
        states = f", {facts.state_bytes / 1e6:.1f} MB of states per stream both ways" if facts.state_bytes else ""
        return (
            f"floor: {read / 1e9:.3f} GB of weights ({facts.dtype}) and "
            f"{facts.kv_bytes_per_token / 1e3:,.1f} kB of KV cache per token of context{states}, at "
            f"{rate.bytes_per_s / 1e9:,.0f} GB/s ({rate.origin}): {1000 * step:.3f} ms, {1 / step:,.0f} tok/s for one "
            "stream without context"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return builtin types for JSON."""
        facts, rate = self.facts, self.bandwidth
        return {
            "unknown": self.unknown,
            "weight_bytes": facts.read_bytes(1) if facts else None,
            "kv_bytes_per_token": facts.kv_bytes_per_token if facts else None,
            "state_bytes": facts.state_bytes if facts else None,
            "bandwidth_bytes_per_s": rate.bytes_per_s if rate else None,
            "bandwidth_origin": rate.origin if rate else None,
        }

    def step_s(self, streams: float, context: float, shared: float = 0.0) -> float | None:
        """Least seconds of a decode step.

        Args:
            streams: Requests decoded together.
            context: Tokens that each attends to, on average, `shared` included.
            shared: Tokens of a prefix that all have in common, which need to be read only once.
        """
        if self.facts is None or self.bandwidth is None:
            return None
        own = self.facts.kv_bytes(context) - self.facts.kv_bytes(shared) + 2 * self.facts.state_bytes
        read = self.facts.read_bytes(streams) + streams * own + self.facts.kv_bytes(shared)
        return read / self.bandwidth.bytes_per_s


def facts_of(
    folder: Path, dtype: str | None = None, quantised: str | None = None, state_dtype: str = "float32"
) -> ModelFacts | str:
    """Compute the facts of a model folder, or say why they are not known.

    Args:
        folder: With `config.json`; weights are not needed.
        dtype: What the model is served in, if not in the checkpoint's.
        quantised: The quantisation that it is served with, if any: one of a plain checkpoint makes other weights of it.
        state_dtype: What it keeps recurrent states in.
    """
    try:
        model = ModelFolder(folder)
        model = model if model.num_bytes else model.without_weights()
        hf, config = model.config, config_of(model)
        numel = num_read(model.headers, config)
    except (ConfigError, ValueError, TypeError, IndexError) as error:
        return str(error)
    dtype = dtype or config.dtype
    size = ITEM_BYTES[dtype]
    stored = None
    if "quantization_config" in hf:
        stored = bytes_stored(model.headers, config, size)
        if stored is None:
            return "config.json has 'quantization_config': only a checkpoint's files tell how much a step reads of it"
        dtype = f"{dtype}, quantised ones as stored"
    elif quantised is not None:
        return f"the weights were quantised while they were loaded ({quantised}): no file tells how much a step reads"
    for key in hf:
        if "expert" in key and config.experts is None:
            return f"config.json has {key!r}: how much a step reads of such weights is not known to this version"
    paged = [group for group in config.cache_groups if not isinstance(group.reach, Recurrent)]
    recurrent = [group for group in config.cache_groups if isinstance(group.reach, Recurrent)]
    if recurrent and state_dtype != "float32":
        return f"states are kept in {state_dtype}: how much a step reads of them is not known to this version"
    if numel is None:
        return f"without weights in its folder, the size of {config.architecture} is not known to this version"
    expert_bytes = size * config.experts.num_params if config.experts else 0
    dense_bytes = size * numel - expert_bytes
    if stored is not None:
        dense_bytes, expert_bytes = stored
    return ModelFacts(
        name=config.architecture,
        dtype=dtype,
        weight_bytes=dense_bytes,
        caches=tuple((group_token_bytes(group, size), reach_of(group)) for group in paged),
        vocab_size=config.vocab_size,
        experts=config.experts,
        expert_bytes=expert_bytes,
        state_bytes=sum(group_token_bytes(group, size) for group in recurrent),
    )


def quantised_by(plugins: Iterable[Sequence[str]]) -> str | None:
    """Return the quantisation among an engine's plugins, which begin with a kind and a name."""
    return next((name for kind, name, *_ in plugins if kind == "quantization"), None)


def reach_of(group: CacheGroup) -> int | None:
    """Return how many tokens a group's layers look at, at most; None: all."""
    return group.reach.size if isinstance(group.reach, Window | Chunk) else None


def bytes_stored(headers: Sequence[TensorHeader] | None, config: ModelConfig, size: int) -> tuple[int, int] | None:
    """Count the bytes of a quantised checkpoint's files but the embedding table, which has numbers of `size` bytes.

    Returns:
        Of all but experts, and of experts: what a step reads if the numbers stay packed, and least if they do not. None
        where there are no files.
    """
    if not headers:
        return None
    tied = config.tie_word_embeddings
    table = 0 if tied else config.vocab_size * config.hidden_size * size
    read = [header for header in headers if not (tied and header.name.startswith("lm_head."))]
    experts = sum(header.num_bytes for header in read if ".experts." in header.name)
    return sum(header.num_bytes for header in read) - table - experts, experts


def num_read(headers: Sequence[TensorHeader] | None, config: ModelConfig) -> int | None:
    """Count the parameters that a decode step reads: all but the embedding table, unless it is the output layer too.

    Returns:
        The number, from the checkpoint if there is one, else from the sizes; None where these do not tell.
    """
    tied = config.tie_word_embeddings
    table = 0 if tied else config.vocab_size * config.hidden_size
    if headers:
        return sum(prod(h.shape) for h in headers if not (tied and h.name.startswith("lm_head."))) - table
    is_known = config.num_params is not None or config.architecture in GATED
    return dense_numel(config) - table if is_known else None
