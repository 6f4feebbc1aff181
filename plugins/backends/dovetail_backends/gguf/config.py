"""Says what a GGUF file says of its model in the words of `config.json`, so that a model's plugin reads both alike.

| general.architecture | served as |
|---|---|
| llama | `LlamaForCausalLM` (Mistral's files say llama, too), `MixtralForCausalLM` with experts |
| mistral | `MistralForCausalLM` |
| qwen2, qwen3, qwen3moe | `Qwen2ForCausalLM`, `Qwen3ForCausalLM`, `Qwen3MoeForCausalLM` |
| gemma2, gemma3 | `Gemma2ForCausalLM`, `Gemma3ForCausalLM` |

Sources: llama.cpp's `convert_hf_to_gguf.py` and `llama-model.cpp`, read November 2026.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.contracts.errors import ModelError
from dovetail_backends.gguf.blocks import PLAIN
from dovetail_backends.gguf.reader import Gguf, LazyArray

METHOD = "gguf"
"""The `quant_method` of all such files."""
KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
"""What all architectures have, behind the architecture's name."""
NEEDED = (
    "context_length", "block_count", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon",
)  # fmt: skip
FRACTIONS = ("rope.", "attention.layer_norm", "attention.scale", "attn_logit", "final_logit")
"""How keys begin whose values need not be whole numbers."""
IMPLIED = ("attention.value_length", "rope.scaling.finetuned")
"""Keys that say what shapes say, or nothing of how to compute."""
ROPE = {"factor": "factor", "original_context_length": "original_max_position_embeddings"} | {
    f"yarn_{name}": name for name in ("beta_fast", "beta_slow")
}
"""Numbers of `rope.scaling`, and their names in `rope_scaling`."""
ENDS = ("eos", "eot", "eom")
END_TEXTS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>")
"""Tokens that end a reply where a file names no end of a turn, as llama.cpp takes them."""
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"} | {
    "penalty_repeat": "repetition_penalty"
}


class GgufFacts:
    """Values of one file, by what stands behind its architecture's name."""

    def __init__(self, gguf: Gguf) -> None:
        self.gguf, self.name = gguf, architecture_of(gguf)
        self._read: set[str] = set()

    def get(self, key: str) -> Any:
        """Return a value; of numbers for each layer the one that they share. None: it is not there.

        Raises:
            ModelError: Layers have different ones, or it is a text or a fraction where a whole number belongs.
        """
        self._read.add(key)
        value = self.gguf.metadata.get(f"{self.name}.{key}")
        if isinstance(value, str) and key != "rope.scaling.type":
            raise ModelError(f"{self.gguf.files[0]}: {self.name}.{key} is {value!r} instead of a number")
        if not isinstance(value, LazyArray):
            return self._whole(key, value)
        values = {self._whole(key, each) for each in value.decode()}
        if len(values) != 1:
            raise ModelError(
                f"{self.gguf.files[0]}: {self.name}.{key} differs between layers ({sorted(values)[:8]}), which is not "
                "supported for this architecture"
            )
        return next(iter(values))

    def _whole(self, key: str, value: Any) -> Any:
        if value is None or key.startswith(FRACTIONS) or type(value) is int:
            return value
        raise ModelError(f"{self.gguf.files[0]}: {self.name}.{key} is {value!r} instead of a whole number")

    def unheeded(self) -> list[str]:
        """Return the architecture's keys that nobody asked for."""
        start = f"{self.name}."
        others = {key.removeprefix(start) for key in self.gguf.metadata if key.startswith(start)}
        return sorted(start + key for key in others - self._read - {*IMPLIED})

    def need(self, key: str) -> Any:
        """Return a value.

        Raises:
            ModelError: It is not there.
        """
        if (value := self.get(key)) is None:
            raise ModelError(f"{self.gguf.files[0]}: the key {self.name}.{key} is missing")
        return value

    def raw(self, key: str, default: Any) -> Any:
        """Return a value as it is, which may be a `LazyArray`."""
        self._read.add(key)
        return self.gguf.metadata.get(f"{self.name}.{key}", default)

    def has(self, tensor: str) -> bool:
        """Whether the first layer has a tensor."""
        return f"blk.0.{tensor}" in self.gguf.tensors

    def query_scalar(self, largest: int) -> int:
        """Return what Gemma divides scores by the root of: a head's width, in the largest model another number."""
        if self.need("block_count") == largest:
            return int(self.need("embedding_length") // self.need("attention.head_count"))
        return int(self.need("attention.key_length"))


def _llama(facts: GgufFacts) -> dict[str, Any]:
    config: dict[str, Any] = {"attention_bias": facts.has("attn_q.bias"), "mlp_bias": facts.has("ffn_up.bias")}
    if facts.get("expert_count"):
        experts = {
            "num_local_experts": facts.need("expert_count"),
            "num_experts_per_tok": facts.need("expert_used_count"),
        }
        return config | experts | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    return config


def _windowed(facts: GgufFacts) -> dict[str, Any]:
    return {"sliding_window": facts.get("attention.sliding_window")}


def _qwen3moe(facts: GgufFacts) -> dict[str, Any]:
    return {
        "num_experts": facts.need("expert_count"),
        "num_experts_per_tok": facts.need("expert_used_count"),
        "moe_intermediate_size": facts.need("expert_feed_forward_length"),
        "intermediate_size": facts.get("feed_forward_length") or facts.need("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp computes it so, whatever a file says
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma2(facts: GgufFacts) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": facts.query_scalar(46),
        "attn_logit_softcapping": facts.get("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": facts.get("final_logit_softcapping") or 30.0,
        "sliding_window": facts.get("attention.sliding_window") or 4096,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": facts.need("attention.key_length"),
    }


def _gemma3(facts: GgufFacts) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": facts.query_scalar(62),
        "sliding_window": facts.need("attention.sliding_window"),
        "sliding_window_pattern": _pattern(facts),
        "rope_local_base_freq": facts.get("rope.freq_base_swa") or 10000.0,
        "rope_theta": facts.get("rope.freq_base") or 1e6,
        "final_logit_softcapping": facts.get("final_logit_softcapping"),
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": facts.need("attention.key_length"),
    }


def _pattern(facts: GgufFacts) -> int:
    given = facts.raw("attention.sliding_window_pattern", 6)
    if not isinstance(given, LazyArray):
        return int(given)
    windows = [bool(value) for value in given.decode()]
    step = windows.index(False) + 1 if False in windows else len(windows) + 1
    if windows != [(index + 1) % step != 0 for index in range(len(windows))]:
        raise ModelError(f"{facts.gguf.files[0]}: {facts.name}.attention.sliding_window_pattern is no regular one")
    return step


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of llama.cpp's architectures.

    Attributes:
        served: The architecture of transformers.
        model_type: Its name there.
        extra: What its `config.json` has beside the common keys.
        is_turned: Rows of queries and keys stand as pairs of neighbours, as Meta published them.
        norm_offset: What its norms were given when they were written.
        is_sandwich: It has norms behind attention and MLP, too.
    """

    served: str
    model_type: str
    extra: Callable[[GgufFacts], dict[str, Any]] = lambda facts: {}
    is_turned: bool = False
    norm_offset: float = 0.0
    is_sandwich: bool = False


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", _llama, is_turned=True),
    "mistral": Architecture("MistralForCausalLM", "mistral", _windowed, is_turned=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3moe),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", _gemma2, norm_offset=1.0, is_sandwich=True),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", _gemma3, norm_offset=1.0, is_sandwich=True),
}


def architecture_of(gguf: Gguf) -> str:
    """Return `general.architecture`.

    Raises:
        ModelError: It is missing, or not one that is served.
    """
    name = gguf.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{gguf.files[0]}: general.architecture is {name!r}; GGUF files are served of {', '.join(ARCHITECTURES)}"
        )
    return str(name)


def model_config(gguf: Gguf) -> dict[str, Any]:
    """Return a file's `config.json`.

    Raises:
        ModelError: A key is missing, or what it says cannot be served; named.
    """
    facts = GgufFacts(gguf)
    kind = ARCHITECTURES[facts.name]
    for key in NEEDED:
        facts.need(key)
    _refuse_others(facts)
    config = {name: facts.get(key) for key, name in KEYS.items() if facts.get(key) is not None}
    config |= {"architectures": [kind.served], "model_type": kind.model_type}
    config |= {"vocab_size": _vocab_size(gguf), "tie_word_embeddings": "output.weight" not in gguf.tensors}
    config |= {"dtype": _dtype(gguf, facts.name), "eos_token_id": list(end_ids(gguf))} | _rope(facts)
    config |= kind.extra(facts)
    if "intermediate_size" not in config:
        facts.need("feed_forward_length")
    return config | {"quantization_config": _stored(gguf) | {"unheeded": facts.unheeded()}}


def _refuse_others(facts: GgufFacts) -> None:
    """Refuse what these architectures may say and their models do not compute.

    Raises:
        ModelError: A part of a head is rotated, scores have another scale, or a token sees those behind it.
    """
    width = head_width(facts)
    usual = {
        "rope.dimension_count": width,
        "rope.dimension_count_swa": width,
        "attention.scale": max(width, 1) ** -0.5,
        "attention.causal": True,
        "rope.scaling.attn_factor": 1.0,
    }
    for key, value in usual.items():
        given = facts.raw(key, None)
        if given is not None and not (isinstance(given, int | float) and math.isclose(given, value, rel_tol=1e-4)):
            raise ModelError(f"{facts.gguf.files[0]}: {facts.name}.{key} is {given!r}; possible: {value!r}")


def head_width(facts: GgufFacts) -> int:
    """Return the numbers of a query or key head.

    Raises:
        ModelError: They are not said.
    """
    given = facts.get("attention.key_length")
    return int(given or facts.need("embedding_length") // (facts.need("attention.head_count") or 1))


def generation_config(gguf: Gguf) -> dict[str, Any]:
    """Return a file's `generation_config.json`: what ends a reply, and how it is to be sampled."""
    given = {name: gguf.metadata.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    return {"eos_token_id": list(end_ids(gguf))} | {name: value for name, value in given.items() if value is not None}


def end_ids(gguf: Gguf) -> tuple[int, ...]:
    """Return the ids that end a reply."""
    named = [gguf.token_id(name) for name in ENDS]
    found = [token_id for token_id in named if token_id is not None]
    if named[1] is None:  # no end of a turn: llama.cpp goes by the texts of control tokens
        tokens, types = gguf.texts("tokenizer.ggml.tokens") or [], gguf.numbers("tokenizer.ggml.token_type") or []
        found += [
            index
            for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind in (3, 4) and token in END_TEXTS
        ]
    return tuple(dict.fromkeys(found))


def _vocab_size(gguf: Gguf) -> int:
    """Rows of the embedding: more than tokens where rows were padded."""
    table = gguf.tensors.get("token_embd.weight")
    if table is None:
        raise ModelError(f"{gguf.files[0]}: the tensor token_embd.weight is missing; is it a vocabulary alone?")
    return table.shape[0]


def _stored(gguf: Gguf) -> dict[str, Any]:
    kinds = sorted({tensor.kind for tensor in gguf.tensors.values()})
    return {"quant_method": METHOD, "types": kinds}


def _dtype(gguf: Gguf, architecture: str) -> str:
    """Return the dtype to compute in: that of plain matrices; bfloat16, which has the range, where they are blocks.

    Gemma's activations are beyond what float16 holds.
    """
    kinds = {tensor.kind for tensor in gguf.tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    plain = kinds & PLAIN - {"F32"}
    return "float16" if kinds <= PLAIN and plain == {"F16"} and not architecture.startswith("gemma") else "bfloat16"


def _rope(facts: GgufFacts) -> dict[str, Any]:
    """Return the scaling of rotary positions: Llama 3's as factors of each frequency, others by their numbers."""
    factors = facts.gguf.tensors.get("rope_freqs.weight")
    if factors is not None:
        if factors.kind != "F32":
            raise ModelError(f"{factors.file}: rope_freqs.weight is {factors.kind} instead of F32")
        if factors.num_bytes > 2 * (width := head_width(facts)):  # four bytes for each pair of a head's numbers
            raise ModelError(
                f"{factors.file}: rope_freqs.weight has {list(factors.shape)} for heads of {width} numbers"
            )
        with factors.file.open("rb") as file:
            file.seek(factors.offset)
            values = list(struct.unpack(f"<{factors.num_bytes // 4}f", file.read(factors.num_bytes)))
        given = {"rope_type": "longrope", "short_factor": values, "long_factor": values, "attention_factor": 1.0}
        return {"rope_scaling": given | {"original_max_position_embeddings": facts.need("context_length")}}
    kind = facts.get("rope.scaling.type") or "none"
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"{facts.gguf.files[0]}: rope.scaling.type is {kind!r}; possible: none, linear, yarn, and rope_freqs.weight"
        )
    numbers: Mapping[str, Any] = {name: facts.get(f"rope.scaling.{key}") for key, name in ROPE.items()}
    return {"rope_scaling": {"rope_type": kind} | {name: value for name, value in numbers.items() if value is not None}}
