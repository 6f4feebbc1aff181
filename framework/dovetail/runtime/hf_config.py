"""Reads a model folder's configs as transformers 4 and 5 write them. Does not import torch."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dovetail.contracts.cache import Window
from dovetail.contracts.config import LayerSpec, ModelConfig, RopeConfig, dense_layers
from dovetail.errors import ModelError
from dovetail.gguf.config import model_config
from dovetail.gguf.reader import gguf_of
from dovetail.model_files import is_there, object_if_there, read_json, read_object
from dovetail.runtime.rope_config import rope_config, ropes_by_layer, whole_heads

BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where Model Optimizer, early AutoGPTQ and AutoAWQ say how weights are stored, if `config.json` does not: the method
that a file which names none has."""
ADAPTER = "adapter_config.json"
"""What peft writes beside the weights of an adapter."""
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number, by the dtypes that models compute in."""


def read_config(folder: Path) -> dict[str, Any]:
    """Parse `config.json` of a model folder; what stands beside it of quantisation becomes a key of it.

    A GGUF file, or a folder with one, gives what the file says, in the same words.

    Raises:
        ModelError: No such folder, no `config.json`, or it is not a JSON object; with the way out.
    """
    if (gguf := gguf_of(folder)) is not None:
        try:
            return model_config(gguf)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ModelError(f"{folder}: a value of its head cannot be read ({error}); get the file again") from None
    where = f"model path {str(folder)!r}"
    if not folder.is_dir():
        if folder.is_file():
            raise ModelError(f"{where}: is a file, and no GGUF; give the folder with config.json and *.safetensors")
        hint = "give a folder with config.json, *.safetensors and tokenizer.json"
        raise ModelError(f"{where}: no such folder; {hint}")
    path = folder / "config.json"
    if not is_there(path):
        if (adapter := object_if_there(folder / ADAPTER)) or is_there(folder / ADAPTER):
            raise ModelError(adapter_alone(folder, adapter))
        raise ModelError(f"{where}: no config.json; give the folder that holds it")
    config = read_object(path)
    _lift_quantization(config)
    given = next((folder / name for name in BESIDE if (folder / name).is_file()), None)
    if given is not None and not any(config.get(key) for key in CONFIG_KEYS):
        config[CONFIG_KEYS[0]] = {"quant_method": BESIDE[given.name], **read_object(given)}
    if not quantization_config(config):
        for key in CONFIG_KEYS:
            config.pop(key, None)  # a method `none`: nobody reads it, and it changes nothing
    return config


def adapter_alone(folder: Path, adapter: Mapping[str, Any]) -> str:
    """Return why a folder of a LoRA adapter is not served, with the fix.

    Args:
        folder: The adapter's.
        adapter: Its parsed `adapter_config.json`.
    """
    base = adapter.get("base_model_name_or_path")
    return (
        f"model path {str(folder)!r}: is an adapter (LoRA) of {base or 'another model'}, not a model; serve its base, "
        "or merge it with peft: AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload().save_pretrained("
        "NEW_DIR), and copy the tokenizer to NEW_DIR"
    )


def _lift_quantization(config: dict[str, Any]) -> None:
    """Move what the text part of a model says of quantisation to where other models say it; twice the same is once."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return
    for key in CONFIG_KEYS:
        given = [found for each in CONFIG_KEYS if (found := config.get(each))]
        if text.get(key) and given in ([], [text[key]]):
            config[key] = text.pop(key)


def architecture(hf: Mapping[str, Any], folder: Path) -> str:
    """Name the model class of a config.

    Raises:
        ModelError: `architectures` is missing or empty.
    """
    names = hf.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(
            f'{folder / "config.json"}: names no architecture; add for example "architectures": ["Qwen3ForCausalLM"]'
        )
    return names[0]


def inside(folder: Path, name: object) -> Path:
    """Return the place of a file that another file of a model folder names.

    Raises:
        ModelError: It is no name, or lies outside of the folder.
    """
    if not isinstance(name, str) or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ModelError(f"{folder}: a file of it names {name!r}; only files in the folder are read")
    return folder / name


def modules_of(folder: Path) -> list[tuple[str, Path]]:
    """Return kind and folder of each module of sentence-transformers, as `modules.json` lists them; else none.

    Raises:
        ModelError: It is no list of modules, or one lies outside of the folder.
    """
    path = folder / "modules.json"
    found = read_json(path) if path.is_file() else []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ModelError(f"{path}: not a list of modules, as sentence-transformers writes it")
    return [(str(each.get("type")).rpartition(".")[2], inside(folder, each.get("path"))) for each in found]


def some(names: Sequence[str], most: int = 8) -> str:
    """Join the first few names, with a count of the rest."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def dense_config(
    hf: Mapping[str, Any],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    has_windows: bool | None = None,
    norm_eps: str = "rms_norm_eps",
    rotates_parts: bool = False,
    **extra: Any,
) -> ModelConfig:
    """Translate the config of a dense decoder (Llama and its relatives).

    Args:
        hf: Parsed `config.json`.
        scale: Factor of attention scores; None: one over the square root of the head dim.
        soft_cap: Of attention scores.
        sinks: Whether attention has sinks.
        has_windows: Whether `sliding_window` means anything; None: it does unless `use_sliding_window` says otherwise.
        norm_eps: The key of the norms' epsilon.
        rotates_parts: Whether `partial_rotary_factor` means anything: most architectures ignore it.
        extra: What the architecture's layers need to know beyond the common fields.

    Raises:
        ModelError: A needed key is missing or a value is not supported.
    """
    try:
        heads = int(hf["num_attention_heads"])
        hidden, num = int(hf["hidden_size"]), int(hf["num_hidden_layers"])
        kv_heads, dim = int(hf.get("num_key_value_heads") or heads), int(hf.get("head_dim") or hidden // heads)
        specs = dense_layers(num, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=scale)
        plain = [replace(spec, soft_cap=soft_cap, sinks=sinks) for spec in specs]
        windows = layer_windows(hf, has_windows)
        layer_ropes = ropes_by_layer(hf)
        config = ModelConfig(
            architecture=str(hf["architectures"][0]),
            vocab_size=int(hf["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(hf["intermediate_size"]),
            num_layers=num,
            layers=tuple(_reaching(spec, window) for spec, window in zip(plain, windows, strict=True)),
            norm_eps=float(hf.get(norm_eps, 1e-5 if norm_eps != "rms_norm_eps" else 1e-6)),
            hidden_act=either(hf, "hidden_act", "hidden_activation", "silu"),
            max_position_embeddings=int(hf["max_position_embeddings"]),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            rope=layer_ropes[0] if layer_ropes else rope_config(hf),
            dtype=checkpoint_dtype(hf),
            layer_ropes=layer_ropes,
            extra=extra,
        )
        return config if rotates_parts else whole_heads(config)
    except KeyError as missing:
        raise ModelError(f"config.json: the key {missing} is missing") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"config.json: a value is not of the type that it must be ({error})") from None


def without_rope(config: ModelConfig, layers: Sequence[bool]) -> ModelConfig:
    """Return the config with no rotation in the layers for which `layers` is true."""
    ropes = [config.rope_of(index) for index in range(config.num_layers)]
    plain = tuple(RopeConfig(kind="none") if is_plain else rope for is_plain, rope in zip(layers, ropes, strict=True))
    return replace(config, layer_ropes=plain)


def alternating(num: int, every: int) -> list[str]:
    """Types of layers of which each `every`-th sees everything and the others a window."""
    return ["full_attention" if (index + 1) % every == 0 else "sliding_attention" for index in range(num)]


def with_missing(hf: Mapping[str, Any], **values: Any) -> Mapping[str, Any]:
    """Return a config with values for keys that it does not have, or has as null; which keys are read is still told."""
    missing = {key: value for key, value in values.items() if hf.get(key) is None}
    return ChainMap(missing, cast("MutableMapping[str, Any]", hf)) if missing else hf


def _reaching(spec: LayerSpec, window: int | None) -> LayerSpec:
    return spec if window is None else replace(spec, reach=Window(window))


def either(hf: Mapping[str, Any], name: str, other: str, default: Any) -> Any:
    """Return a value that is spelled in one of two ways.

    Raises:
        ModelError: Both are there, and they differ.
    """
    given = {key: hf[key] for key in (name, other) if hf.get(key) is not None}
    if len(given) == 2 and given[name] != given[other]:
        raise ModelError(f"config.json: {name} is {given[name]!r} and {other} is {given[other]!r}; keep one of them")
    return next(iter(given.values()), default)


def layer_types(hf: Mapping[str, Any]) -> list[str] | None:
    """Return the type of each layer, None if the config does not say.

    Raises:
        ModelError: They are not as many as layers, or one is not attention.
    """
    types = hf.get("layer_types")
    if types is None:
        return None
    num = int(hf["num_hidden_layers"])
    if len(types) != num:
        raise ModelError(f"config.json: layer_types has {len(types)} entries for {num} layers")
    others = sorted(set(types) - {"full_attention", "sliding_attention"})
    if others:
        raise ModelError(f"config.json: layers of type {', '.join(others)} are not supported for this architecture")
    return list(types)


def layer_windows(hf: Mapping[str, Any], has_windows: bool | None = None) -> tuple[int | None, ...]:
    """Sliding window of each layer, None for full attention.

    If `has_windows` does not say whether there are any, `use_sliding_window` does, and without it `sliding_window`.
    Windowed are the layers that `layer_types` says, else those from `max_window_layers` on, else all.
    """
    num, types, window = int(hf["num_hidden_layers"]), layer_types(hf), hf.get("sliding_window")
    if has_windows is None:
        switch = hf.get("use_sliding_window")
        has_windows = window is not None if switch is None else bool(switch)
    if not has_windows:
        return (None,) * num
    if types is None:
        first = int(hf.get("max_window_layers") or 0)
        types = ["sliding_attention" if index >= first else "full_attention" for index in range(num)]
    if window is None and "sliding_attention" in types:
        raise ModelError("config.json: layers have a sliding window, and sliding_window says no size")
    return tuple(int(window) if kind == "sliding_attention" and window is not None else None for kind in types)


def checkpoint_dtype(hf: Mapping[str, Any]) -> str:
    """The checkpoint's dtype name from `dtype` or `torch_dtype`; float32 if neither is there, as in transformers."""
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ModelError(f"config.json: dtype {name!r} is not supported; possible: {', '.join(ITEM_BYTES)}")
    return name


CONFIG_KEYS = ("quantization_config", "compression_config")
"""Where `config.json` says how its weights are stored; the second is the first's older name."""


def quantization_config(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what `config.json` says of quantisation; empty for nothing, which some files say with a method `none`."""
    found: Any = next((hf[key] for key in CONFIG_KEYS if hf.get(key)), {})
    found = found if isinstance(found, Mapping) else {"quant_method": found}
    return {} if str(found.get("quant_method", "unnamed")).lower() in ("none", "") else found


def quant_method(hf: Mapping[str, Any]) -> str:
    """Return the fact that `auto` goes by: `compressed-tensors`, `awq`; "" for a plain checkpoint."""
    config = quantization_config(hf)
    return str(config.get("quant_method", "unnamed")) if config else ""
