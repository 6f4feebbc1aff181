"""What Llama, Qwen2 and Qwen3 make of `config.json`, and which tensors they want, before torch is imported.

The manifest names these classes (`config`): the server, `dovetail info` and `dovetail plan` ask them instead of the
models, and a checkpoint that does not fit is refused before a process starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig
from dovetail.sdk.config import dense_config

Shape = tuple[int, ...]


class LlamaFacts:
    """Of `LlamaForCausalLM`."""

    unneeded: ClassVar[str] = r".*rotary_emb\.inv_freq"
    """Names of tensors that may be there, and nobody reads."""

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Translate a parsed `config.json`; as a model's."""
        return llama_config(hf)

    @staticmethod
    def tensors(config: ModelConfig, names: Collection[str]) -> Mapping[str, Shape]:
        """Return the shapes of all tensors that the model wants of a checkpoint that is not quantised.

        Args:
            config: The model's facts.
            names: Of the checkpoint's tensors: some have several matrices as one.
        """
        hidden, vocab = config.hidden_size, config.vocab_size
        found: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
        if not config.tie_word_embeddings:
            found["lm_head.weight"] = (vocab, hidden)
        for index in range(config.num_layers):
            for name, shape in _layer(config, index, names):
                found[f"model.layers.{index}.{name}"] = shape
        return found


class Qwen2Facts(LlamaFacts):
    """Of `Qwen2ForCausalLM`."""

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """As of `LlamaFacts`; biases on the query, key and value projections."""
        return dense_config(hf, has_windows=_has_windows(hf), qkv_bias=True)


class Qwen3Facts(LlamaFacts):
    """Of `Qwen3ForCausalLM`."""

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """As of `LlamaFacts`; a norm on every query and key head."""
        bias = bool(hf.get("attention_bias", False))
        return dense_config(hf, has_windows=_has_windows(hf), qk_norm=True, qkv_bias=bias, out_bias=bias)


def llama_config(
    hf: Mapping[str, Any], *, rotates_parts: bool = False, has_windows: bool | None = False
) -> ModelConfig:
    """Translate the config of Llama, or of a relative that reads `partial_rotary_factor` or `sliding_window`."""
    bias = bool(hf.get("attention_bias", False))
    mlp_bias = bool(hf.get("mlp_bias", False))
    windows, parts = has_windows, rotates_parts
    return dense_config(hf, has_windows=windows, rotates_parts=parts, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def _has_windows(hf: Mapping[str, Any]) -> bool:
    return bool(hf.get("use_sliding_window"))  # absent means no, whatever its size


def _layer(config: ModelConfig, index: int, names: Collection[str]) -> Iterator[tuple[str, Shape]]:
    spec, extra, hidden, inner = config.layers[index], config.extra, config.hidden_size, config.intermediate_size
    keys, values = spec.num_kv_heads * spec.qk_dim, spec.num_kv_heads * spec.v_dim
    qkv = {"q_proj": spec.num_qo_heads * spec.qk_dim, "k_proj": keys, "v_proj": values}
    gates = {"gate_proj": inner, "up_proj": inner}
    for place, parts, joined, bias in (
        ("self_attn.", qkv, "qkv_proj", extra.get("qkv_bias")),
        ("mlp.", gates, "gate_up_proj", extra.get("mlp_bias")),
    ):
        for suffix, columns in (("weight", (hidden,)), *([("bias", ())] if bias else [])):
            is_joined = f"model.layers.{index}.{place}{joined}.{suffix}" in names
            for name, rows in ({joined: sum(parts.values())} if is_joined else parts).items():
                yield f"{place}{name}.{suffix}", (rows, *columns)
    yield from _matrix("self_attn.o_proj", hidden, spec.num_qo_heads * spec.v_dim, extra.get("out_bias"))
    yield from _matrix("mlp.down_proj", hidden, inner, extra.get("mlp_bias"))
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", (hidden,)
    for name in ("q_norm", "k_norm") if extra.get("qk_norm") else ():
        yield f"self_attn.{name}.weight", (spec.qk_dim,)


def _matrix(name: str, rows: int, columns: int, bias: bool | None) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)
