"""Writes what `loading.py` measures, one model in every packing.

    python tests/benchmarks/loading_files.py DIR [KIND …]

Numbers are random, for nothing depends on them. Sizes are those of a Llama of 603 million weights, of which the 131
million of embeddings and head stay in bfloat16 as tools leave them (in GGUF files they are packed, too), and of one
layer of gpt-oss-20b with half of its experts. A kind that is there already is left as it is. N outputs, K inputs.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD, VOCAB = 2048, 5632, 10, 16, 8, 128, 32000
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": VOCAB,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 1,
    "layer_types": ["sliding_attention"],
    "sliding_window": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
    "initial_context_length": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "torch_dtype": "bfloat16",
}
GROUP = 128
GGUF_KINDS = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
Make = Callable[[int, int], dict[str, Tensor]]
"""Makes the tensors of a matrix `[N, K]` by suffix."""


def words(*shape: int) -> Tensor:
    """Return random words."""
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def numbers(*shape: int) -> Tensor:
    """Return random bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def plain(*shape: int) -> Tensor:
    """Return small random weights."""
    return torch.randn(shape, dtype=torch.bfloat16) * 0.02


def float8(*shape: int) -> Tensor:
    """Return random e4m3."""
    return torch.randn(shape).to(torch.float8_e4m3fn)


def scales(*shape: int) -> Tensor:
    """Return small random scales in float32."""
    return torch.rand(shape) * 1e-2 + 1e-4


def gptq(bits: int, *, order: bool = False) -> Make:
    """Return what makes GPTQ's tensors."""

    def make(n: int, k: int) -> dict[str, Tensor]:
        groups = (torch.arange(k) // GROUP).to(torch.int32)
        groups = groups[torch.randperm(k)] if order else groups
        made = {".qweight": words(k * bits // 32, n), ".qzeros": words(k // GROUP, n * bits // 32)}
        return {**made, ".scales": scales(k // GROUP, n).half(), ".g_idx": groups}

    return make


def awq(n: int, k: int) -> dict[str, Tensor]:
    """Make AWQ's tensors."""
    made = {".qweight": words(k, n // 8), ".qzeros": words(k // GROUP, n // 8)}
    return {**made, ".scales": scales(k // GROUP, n).half()}


def nf4(n: int, k: int) -> dict[str, Tensor]:
    """Make bitsandbytes' tensors, with double quantisation."""
    blocks = n * k // 64
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [n, k], "dtype": "bfloat16"}
    state |= {"nested_blocksize": 256, "nested_offset": 0.01, "nested_dtype": "float32"}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {
        ".weight": numbers(n * k // 2, 1),
        ".weight.absmax": numbers(blocks),
        ".weight.quant_map": torch.linspace(-1, 1, 16),
        ".weight.nested_absmax": scales(-(-blocks // 256)),
        ".weight.nested_quant_map": torch.linspace(-1, 1, 256),
        ".weight.quant_state.bitsandbytes__nf4": text,
    }


def nvfp4(n: int, k: int) -> dict[str, Tensor]:
    """Make Model Optimizer's tensors."""
    made = {".weight": numbers(n, k // 2), ".weight_scale": torch.rand(n, k // 16).to(torch.float8_e4m3fn)}
    return {**made, ".weight_scale_2": torch.tensor(1e-3)}


def fp8_blocks(n: int, k: int) -> dict[str, Tensor]:
    """Make fp8 in blocks of 128 x 128."""
    return {".weight": float8(n, k), ".weight_scale_inv": scales(-(-n // GROUP), -(-k // GROUP))}


def fp8_rows(n: int, k: int) -> dict[str, Tensor]:
    """Make fp8 with a scale for each row."""
    return {".weight": float8(n, k), ".weight_scale": scales(n, 1)}


def ct_int8(n: int, k: int) -> dict[str, Tensor]:
    """Make compressed-tensors' int8 with a scale for each row."""
    return {".weight": numbers(n, k).view(torch.int8), ".weight_scale": scales(n, 1)}


def ct_int4(n: int, k: int) -> dict[str, Tensor]:
    """Make compressed-tensors' words."""
    made = {".weight_packed": words(n, k // 8), ".weight_scale": scales(n, k // GROUP).bfloat16()}
    return {**made, ".weight_shape": torch.tensor([n, k])}


def scheme(kind: str, bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    """Return a configuration of compressed-tensors."""
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, **others}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "sym": False, "desc_act": False}
KINDS: dict[str, tuple[dict[str, Any], Make]] = {
    "plain": ({}, lambda n, k: {".weight": plain(n, k)}),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, fp8_blocks),
    "ct-fp8": (scheme("float", 8, "channel"), fp8_rows),
    "ct-int8": (scheme("int", 8, "channel"), ct_int8),
    "ct-int4": (scheme("int", 4, "group", group_size=GROUP), ct_int4),
    "gptq-4": ({**GPTQ, "bits": 4}, gptq(4)),
    "gptq-8": ({**GPTQ, "bits": 8}, gptq(8)),
    "gptq-desc-act": ({**GPTQ, "bits": 4, "desc_act": True}, gptq(4, order=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4),
}
"""`quantization_config`, and what makes a matrix."""


def llama(make: Make) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of the model, layer by layer."""
    yield {"model.embed_tokens.weight": plain(VOCAB, HIDDEN)}
    sizes = {"self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD)}
    sizes |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (KV_HEADS * HEAD, HIDDEN))
    sizes |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        norms = {f"{at}{norm}.weight": plain(HIDDEN) for norm in ("input_layernorm", "post_attention_layernorm")}
        yield norms | {at + name + end: t for name, size in sizes.items() for end, t in make(*size).items()}
    yield {"model.norm.weight": plain(HIDDEN), "lm_head.weight": plain(VOCAB, HIDDEN)}


def gpt_oss() -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of gpt-oss, its experts in mxfp4 as published."""
    width, experts, inner = GPT_OSS["hidden_size"], GPT_OSS["num_local_experts"], GPT_OSS["intermediate_size"]
    q, kv = GPT_OSS["num_attention_heads"] * 64, GPT_OSS["num_key_value_heads"] * 64
    yield {"model.embed_tokens.weight": plain(VOCAB, width)}
    made: dict[str, Tensor] = {}
    for name, (n, k) in {"q": (q, width), "k": (kv, width), "v": (kv, width), "o": (width, q)}.items():
        at = f"model.layers.0.self_attn.{name}_proj"
        made |= {f"{at}.weight": plain(n, k), f"{at}.bias": plain(n)}
    made["model.layers.0.self_attn.sinks"] = plain(GPT_OSS["num_attention_heads"])
    made |= {f"model.layers.0.mlp.router.{end}": plain(*size) for end, size in
             {"weight": (experts, width), "bias": (experts,)}.items()}  # fmt: skip
    for norm in ("input_layernorm", "post_attention_layernorm"):
        made[f"model.layers.0.{norm}.weight"] = plain(width)
    for name, (n, k) in {"gate_up_proj": (2 * inner, width), "down_proj": (width, inner)}.items():
        at = f"model.layers.0.mlp.experts.{name}"
        made |= {f"{at}_blocks": numbers(experts, n, k // 32, 16), f"{at}_bias": plain(experts, n)}
        made[f"{at}_scales"] = torch.randint(110, 122, (experts, n, k // 32), dtype=torch.uint8)
    yield made
    yield {"model.norm.weight": plain(width), "lm_head.weight": plain(VOCAB, width)}


def write(folder: Path, config: dict[str, Any], shards: Iterator[dict[str, Tensor]]) -> None:
    """Write a checkpoint, in a shard for each of some dictionaries."""
    part = folder.with_name(f".{folder.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    where: dict[str, str] = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number:05}.safetensors"
        save_file({each: tensor.contiguous() for each, tensor in tensors.items()}, part / name)
        where |= dict.fromkeys(tensors, name)
    (part / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (part / "config.json").write_text(json.dumps(config))
    part.rename(folder)


def write_blocks(root: Path, kind: str) -> None:
    """Write a GGUF file whose matrices are all of one type, random bytes with small scales."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
    import gguf
    import gguf_files

    gguf_files.SCALES |= {"Q4_0": (0, 1), "Q8_0": (0, 1)}
    config = {**LLAMA, "rope_parameters": {"rope_theta": 10000.0}}
    writer = gguf.GGUFWriter(root / f".{kind}.gguf", "llama")
    gguf_files.describe(writer, config)
    gguf_files.add_vocab(writer, gguf_files.plain_vocab(VOCAB))
    sizes = {"attn_q": (HEADS * HEAD, HIDDEN), "attn_k": (KV_HEADS * HEAD, HIDDEN), "attn_v": (KV_HEADS * HEAD, HIDDEN)}
    sizes |= {"attn_output": (HIDDEN, HEADS * HEAD), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
    sizes |= {"ffn_down": (HIDDEN, INNER)}
    names = {f"blk.{layer}.{name}.weight": size for layer in range(LAYERS) for name, size in sizes.items()}
    for name, size in {"token_embd.weight": (VOCAB, HIDDEN), "output.weight": (VOCAB, HIDDEN), **names}.items():
        blocks = gguf_files.random_blocks(kind, size, seed=len(name))
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    norms = ["output_norm.weight"]
    norms += [f"blk.{layer}.{norm}.weight" for layer in range(LAYERS) for norm in ("attn_norm", "ffn_norm")]
    for name in norms:
        writer.add_tensor(name, torch.ones(HIDDEN).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (root / f".{kind}.gguf").rename(root / f"{kind}.gguf")


def main() -> None:
    """Write what is asked for, everything by default."""
    root, kinds = Path(sys.argv[1]), sys.argv[2:] or [*KINDS, "mxfp4", *GGUF_KINDS]
    torch.manual_seed(0)
    root.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        if (root / kind).exists() or (root / f"{kind}.gguf").exists():
            continue
        if kind in GGUF_KINDS:
            write_blocks(root, kind)
        elif kind == "mxfp4":
            write(root / kind, {**GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}}, gpt_oss())
        else:
            quantised, make = KINDS[kind]
            write(root / kind, LLAMA | ({"quantization_config": quantised} if quantised else {}), llama(make))
        print(kind, flush=True)


if __name__ == "__main__":
    main()
