"""Writes GGUF files of tiny models with the format's own package, under the names and changes of llama.cpp's converter.

Nothing here is code of the reader: names come from gguf-py's table, blocks from its quantisation, and of the K types
and IQ4, which it only reads, random bytes with small scales.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
"""Sizes of which rows are whole blocks of the K types."""
Kinds = Callable[[str], str]
SCALES = {"Q2_K": (80, 2), "Q3_K": (108, 1), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208, 1)}
SCALES |= {"IQ4_NL": (0, 1), "IQ4_XS": (0, 1)}
"""Where the float16 numbers of a super-block stand, and how many."""


def write_gguf(
    folder: Path,
    out: Path,
    kinds: Kinds = lambda name: "F32",
    *,
    vocab: Mapping[str, Any] | None = None,
    extra: Callable[[Any], None] = lambda writer: None,
    **split: Any,
) -> None:
    """Write the checkpoint of a folder as a GGUF file.

    Args:
        folder: With `config.json` and safetensors.
        out: The file.
        kinds: The type of each matrix by its name in the file; vectors are F32.
        vocab: Of the tokenizer, see `byte_vocab`; by default one without a tokenizer's use.
        extra: Adds or changes what it likes.
        split: Of `GGUFWriter`.
    """
    hf = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[hf["model_type"]]
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[arch], **split)
    describe(writer, hf)
    add_vocab(writer, vocab or plain_vocab(hf["vocab_size"]))
    extra(writer)
    tensors = {name: t.float().numpy() for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    for name, data in renamed(tensors, hf, arch).items():
        add_tensor(writer, name, data, kinds(name) if data.ndim > 1 else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_out(folder: Path, packed: Path, out: Path) -> None:
    """Write what the blocks of a file stand for, in F32, as the format's own package reads them.

    Args:
        folder: The checkpoint that the file was written from, for its `config.json`.
        packed: The file.
        out: The other one.
    """
    hf = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[hf["model_type"]]])
    describe(writer, hf)
    add_vocab(writer, plain_vocab(hf["vocab_size"]))
    for tensor in gguf.GGUFReader(packed).tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: Any, hf: Mapping[str, Any]) -> None:
    """Write the keys of a model's shape, as llama.cpp's converter does."""
    rope = hf.get("rope_parameters") or {}
    nested = rope.get("full_attention", rope)
    writer.add_name("tiny")
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_rope_freq_base(nested.get("rope_theta", 10000.0))
    if hf.get("head_dim"):
        writer.add_key_length(hf["head_dim"])
        writer.add_value_length(hf["head_dim"])
    for key, add in (
        ("sliding_window", writer.add_sliding_window),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
    ):
        if hf.get(key) is not None:
            add(hf[key])
    if experts := hf.get("num_experts") or hf.get("num_local_experts"):
        writer.add_expert_count(experts)


def renamed(tensors: Mapping[str, Any], hf: Mapping[str, Any], arch: Any) -> dict[str, Any]:
    """Return tensors under gguf's names, changed as its converter changes them."""
    names = gguf.get_tensor_name_map(arch, hf["num_hidden_layers"])
    heads = {"q_proj": hf["num_attention_heads"], "k_proj": hf["num_key_value_heads"]}
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    for name, data in tensors.items():
        before, _, rest = name.partition(".experts.")
        if rest:  # one by one: together
            number, _, matrix = rest.partition(".")
            experts.setdefault(f"{before}.experts.{matrix}", {})[int(number)] = data
            continue
        module = name.split(".")[-2]
        if arch == gguf.MODEL_ARCH.LLAMA and module in heads:
            data = data.reshape(heads[module], 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        if "gemma" in hf["model_type"] and name.endswith("norm.weight"):
            data = data + 1
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = data
    for name, parts in experts.items():
        data = np.stack([parts[index] for index in range(len(parts))])
        found[names.get_name(name, try_suffixes=(".weight",))] = data
    assert None not in found
    return found


def add_tensor(writer: Any, name: str, data: Any, kind: str) -> None:
    """Write a tensor in blocks of a type."""
    number = gguf.GGMLQuantizationType[kind]
    if kind in SCALES:
        writer.add_tensor(name, random_blocks(kind, data.shape), raw_dtype=number)
    elif kind in ("F32", "F16"):
        writer.add_tensor(name, data.astype(np.float32 if kind == "F32" else np.float16))
    else:
        writer.add_tensor(name, gguf.quantize(data.astype(np.float32), number), raw_dtype=number)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Return random rows of a K type whose numbers are small."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, num_bytes), dtype=np.uint8)
    at, num = SCALES[kind]
    scales = (rng.random((*blocks.shape[:-1], num)) * 2e-4).astype(np.float16)
    blocks[..., at : at + 2 * num] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def add_vocab(writer: Any, vocab: Mapping[str, Any]) -> None:
    """Write a tokenizer's keys: lists by the names of the writer's methods, other values under `tokenizer.ggml`."""
    writer.add_tokenizer_model(vocab["model"])
    if "pre" in vocab:
        writer.add_tokenizer_pre(vocab["pre"])
    writer.add_token_list(vocab["tokens"])
    for key, add in (
        ("scores", writer.add_token_scores),
        ("types", writer.add_token_types),
        ("merges", writer.add_token_merges),
        ("template", writer.add_chat_template),
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("eot", writer.add_eot_token_id),
        ("unk", writer.add_unk_token_id),
        ("add_bos", writer.add_add_bos_token),
        ("add_eos", writer.add_add_eos_token),
        ("add_space_prefix", writer.add_add_space_prefix),
    ):
        if key in vocab:
            add(vocab[key])


def plain_vocab(num: int) -> dict[str, Any]:
    """Return tokens that nobody will tokenize with."""
    tokens = [f"<{index}>" for index in range(num)]
    return {"model": "llama", "tokens": tokens, "scores": [0.0] * num, "types": [1] * num, "bos": 1, "eos": 2, "unk": 0}


def folder_vocab(folder: Path, pre: str = "qwen2") -> dict[str, Any]:
    """Return the vocabulary of a folder's byte-level `tokenizer.json`."""
    made = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token for token in made["added_tokens"]}
    by_id = {index: token for token, index in made["model"]["vocab"].items()}
    by_id |= {index: token["content"] for index, token in added.items()}
    types = [4 if index in added and not added[index]["special"] else 3 if index in added else 1 for index in by_id]
    order = sorted(by_id)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [by_id[index] for index in order],
        "types": [types[list(by_id).index(index)] for index in order],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in made["model"]["merges"]],
    }
