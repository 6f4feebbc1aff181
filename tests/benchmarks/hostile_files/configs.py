"""Folders whose `config.json` or other JSON files lie, with weights that tell the truth, or whose headers lie, too."""

from __future__ import annotations

import json
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hostile_files.claims import checkpoint, packed, value, words
from hostile_files.claims import read as read
from hostile_files.claims import start as start

FAMILIES = words("""
    llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe gemma2 gemma3_text gemma4_text deepseek_v2 deepseek_v3
    gpt_oss glm4_moe minimax_m2 llama4_text phi3 olmo3 olmoe smollm3 exaone4 ernie4_5_moe cohere2 stablelm
    starcoder2
""")
MORE = words("""
    sliding_window attention_chunk_size num_experts num_local_experts n_routed_experts n_shared_experts n_group
    topk_group num_experts_per_tok kv_lora_rank q_lora_rank rope_scaling rope_parameters layer_types rope_theta
    partial_rotary_factor max_window_layers text_config vision_config quantization_config compression_config
    num_labels id2label eos_token_id matryoshka_dimensions dtype torch_dtype moe_layers mlp_only_layers
    decoder_sparse_step first_k_dense_replace no_rope_layers no_rope_layer_interval sliding_window_pattern
    num_kv_shared_layers hidden_size_per_layer_input global_head_dim query_pre_attn_scalar attention_multiplier
""")
ROPES = ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "x"]
ROPE_KEYS = words("""
    factor low_freq_factor high_freq_factor original_max_position_embeddings attention_factor beta_fast
    beta_slow mscale mscale_all_dim short_factor long_factor rope_theta partial_rotary_factor truncate
""")
Change = Callable[[random.Random, dict[str, Any], Path], None]


def sizes(rng: random.Random, config: dict[str, Any], folder: Path) -> None:
    """Change values of keys that are there, and add others."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        numbers = [key for key, given in config.items() if type(given) in (int, float)]
        config[rng.choice([*numbers, *numbers, *config, *MORE])] = value(rng)


def lists(rng: random.Random, config: dict[str, Any], folder: Path) -> None:
    """Put lists in the place of numbers, and lists of another length."""
    key = rng.choice([*config, "layer_types", "no_rope_layers", "mlp_only_layers", "moe_layers"])
    given = config.get(key)
    items = given if isinstance(given, list) else [given]
    config[key] = rng.choice([items * rng.choice((0, 2, 3, 1000)), [value(rng) for _ in range(5)], items[:1]])


def ropes(rng: random.Random, config: dict[str, Any], folder: Path) -> None:
    """Change the rotary embedding."""
    rope: dict[str, Any] = {"rope_type": rng.choice(ROPES)}
    for key in rng.sample(ROPE_KEYS, rng.randrange(1, 8)):
        rope[key] = rng.choice([value(rng), 2.0, 8.0, [1.0] * 8, 64])
    nested = {"full_attention": rope, "sliding_attention": rng.choice([rope, value(rng)])}
    config[rng.choice(("rope_scaling", "rope_parameters"))] = rng.choice([rope, nested])


def parts(rng: random.Random, config: dict[str, Any], folder: Path) -> None:
    """Put the keys, changed, into a part of their own, or deeper."""
    inner = {key: config[key] for key in rng.sample(sorted(config), rng.randrange(1, len(config)))}
    sizes(rng, inner, folder)
    for _ in range(rng.choice((0, 0, 1, 40, 900))):
        inner = {"text_config": inner}
    config[rng.choice(("text_config", "vision_config", "llm_config"))] = inner
    if rng.random() < 0.3:
        config["architectures"] = [rng.choice(("Gemma3ForConditionalGeneration", "Qwen3VLForConditionalGeneration"))]


def storage(rng: random.Random, config: dict[str, Any], folder: Path) -> None:
    """Say something else of how weights are quantised."""
    given = config.get("quantization_config")
    if given is None or rng.random() < 0.3:
        method = rng.choice(["gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes", "mxfp4", "gguf", value(rng)])
        keys = ("bits", "group_size", "desc_act", "weight_block_size", "config_groups", "ignore", "format", "sym")
        config["quantization_config"] = {"quant_method": method, **{key: value(rng) for key in rng.sample(keys, 4)}}
        return
    places = [given, group := given["config_groups"]["group_0"], group["weights"], group["weights"], group["weights"]]
    for _ in range(rng.choice((1, 1, 2))):
        place = rng.choice(places)
        place[rng.choice(sorted(place))] = rng.choice([value(rng), value(rng), 8, 32, "group", "channel", "int"])


def beside(rng: random.Random, config: dict[str, Any], folder: Path) -> None:
    """Write files that stand beside it."""
    names = {"generation_config.json": ("eos_token_id", "temperature", "top_k", "max_new_tokens")}
    names |= {"sentence_bert_config.json": ("max_seq_length", "do_lower_case")}
    names |= {"config_sentence_transformers.json": ("prompts", "default_prompt_name")}
    names |= {"1_Pooling/config.json": ("pooling_mode_mean_tokens", "word_embedding_dimension", "pooling_mode")}
    names |= {"2_Dense/config.json": ("out_features", "in_features", "activation_function")}
    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"))
    modules = [{"type": f"x.{kind}", "path": rng.choice([path, value(rng), "../x"])} for kind, path in kinds]
    written = {name: {key: value(rng) for key in keys} for name, keys in names.items() if rng.random() < 0.6}
    written["modules.json"] = rng.choice([modules, modules, value(rng)])
    for name, content in written.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)  # a link to the base's
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    dense = folder / "2_Dense"
    if dense.is_dir():
        shutil.copy(folder / "model.safetensors", dense)


def headers(rng: random.Random, config: dict[str, Any], folder: Path) -> None:
    """Change the header of the weights, or the index."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.unlink()  # it is a link to the base's
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]
    for name in rng.sample(names, min(len(names), rng.choice((1, 1, 3)))):
        key = rng.choice(("shape", "dtype", "data_offsets", None))
        if key is None:
            header[rng.choice([name.replace("layers.", "layers.9"), "x", "", "../x"])] = header.pop(name)
        elif rng.random() < 0.5 and key != "dtype":
            header[name][key][0] = value(rng)
        else:
            header[name][key] = rng.choice([value(rng), "F64", "I4", "F8_E4M3", [1 << 62, 4], [0, 0]])
    text = json.dumps(header).encode()
    claimed = rng.choice([len(text)] * 5 + [0, 1 << 40, (1 << 64) - 1, len(data) * 2])
    file.write_bytes(struct.pack("<Q", claimed) + text + data[8 + size :])
    if rng.random() < 0.4:
        where = {name: rng.choice(["model.safetensors", "a/b", "../x", value(rng)]) for name in names}
        index = {"weight_map": rng.choice([where, value(rng)])}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def bytes_of_it(rng: random.Random, config: dict[str, Any], folder: Path) -> None:
    """Write a file that is no JSON, or hardly."""
    text = json.dumps(config)
    cut = rng.randrange(len(text))
    depth = rng.choice((10, 900, 200_000))
    (folder / "config.json").write_bytes(
        rng.choice([
            text[:cut].encode(), text.encode("utf-16"), b"\xef\xbb\xbf" + text.encode(), b"\xff" * 99, b"",
            (text[:-1] + ', "a": ' + "[" * depth + "]" * depth + "}").encode(),
            (text[:-1] + ', "a": ' + '{"a":' * depth + "1" + "}" * depth + "}").encode(),
            (text[:-1] + ', "num_hidden_layers": ' + "9" * rng.choice((20, 5000)) + "}").encode(),
            text[:cut].encode() + bytes([rng.randrange(256)]) + text[cut:].encode(), b"[" + text.encode() + b"]",
        ])
    )  # fmt: skip


CHANGES: tuple[Change, ...] = (sizes, sizes, sizes, lists, ropes, ropes, parts, storage, beside, headers, bytes_of_it)


def files(rng: random.Random, count: int) -> Iterator[tuple[str, Path]]:
    """Yield folders."""
    for _ in range(count):
        change, folder = rng.choice(CHANGES), Path(tempfile.mkdtemp())
        is_packed = change is storage and rng.random() < 0.8
        base = packed(rng.choice(("fp8", "int8", "int4"))) if is_packed else checkpoint(rng.choice(FAMILIES))
        for file in base.iterdir():
            if file.name != "config.json":
                (folder / file.name).symlink_to(file)
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
        if change is bytes_of_it:
            change(rng, config, folder)
        else:
            change(rng, config, folder)
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield f"config: {change.__name__}", folder
