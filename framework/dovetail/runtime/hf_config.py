"""Reads a model folder's configs as transformers 4 and 5 write them. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.base.model_files import is_there, object_if_there, read_json, read_object
from dovetail.checkpoint.formats import Formats, StoredFormat
from dovetail.contracts.errors import ModelError

BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where Model Optimizer, early AutoGPTQ and AutoAWQ say how weights are stored, if `config.json` does not: the method
that a file which names none has."""
ADAPTER = "adapter_config.json"
"""What peft writes beside the weights of an adapter."""


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration of what stands at a path, whichever installed format reads it; see `config_of`."""
    return config_of(path, Formats.installed().at(path))


def config_of(path: Path, stored: StoredFormat | None) -> dict[str, Any]:
    """Parse `config.json` of a model folder; what stands beside it of quantisation becomes a key of it.

    Args:
        path: The folder.
        stored: What is read by a format of the plugin kind, which may say the same in the same words.

    Raises:
        ModelError: No such folder, no `config.json`, or it is not a JSON object; with the way out.
    """
    if stored is not None:
        if (given := stored.ask("config")) is not None:
            return dict(given)
        path = stored.folder
    folder, where = path, f"model path {str(path)!r}"
    if not folder.is_dir():
        if folder.is_file():
            raise ModelError(
                f"{where}: is a file that no installed format reads; give the folder with config.json and "
                "*.safetensors, or install the plugin of its format"
            )
        hint = "give a folder with config.json, *.safetensors and tokenizer.json"
        raise ModelError(f"{where}: no such folder; {hint}")
    path = folder / "config.json"
    if not is_there(path):
        if (adapter := object_if_there(folder / ADAPTER)) or is_there(folder / ADAPTER):
            raise ModelError(adapter_alone(folder, adapter))
        raise ModelError(f"{where}: no config.json; give {_that_holds_it(folder)}")
    config = read_object(path)
    _lift_quantization(config)
    given = next((folder / name for name in BESIDE if (folder / name).is_file()), None)
    if given is not None and not any(config.get(key) for key in CONFIG_KEYS):
        config[CONFIG_KEYS[0]] = {"quant_method": BESIDE[given.name], **read_object(given)}
    if not quantization_config(config):
        for key in CONFIG_KEYS:
            config.pop(key, None)  # a method `none`: nobody reads it, and it changes nothing
    return config


def _that_holds_it(folder: Path) -> str:
    """Name the folder below one that is a model's: a hub's cache has snapshots, an archive a folder of its own."""
    patterns = ("*/config.json", "snapshots/*/config.json")
    below = sorted(path.parent for pattern in patterns for path in folder.glob(pattern))
    if not below:
        return "the folder that holds it"
    more = f", or another of {len(below)} in it" if len(below) > 1 else ""
    return f"{str(below[-1])!r}, which holds one{more}"


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
    names, where = hf.get("architectures"), folder / "config.json"
    if isinstance(names, str):
        raise ModelError(f'{where}: architectures is {names!r}; write a list: "architectures": ["{names}"]')
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f'{where}: names no architecture; add for example "architectures": ["Qwen3ForCausalLM"]')
    if not names[0].isidentifier():
        raise ModelError(f"{where}: architectures names {names[0]!r}, which is no class's name; correct the file")
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


CONFIG_KEYS = ("quantization_config", "compression_config")
"""Where `config.json` says how its weights are stored; the second is the first's older name."""


def quantization_config(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what `config.json` says of quantisation; empty for nothing, which some files say with a method `none`."""
    found: Any = next((hf[key] for key in CONFIG_KEYS if hf.get(key)), {})
    found = found if isinstance(found, Mapping) else {"quant_method": found}
    return {} if str(found.get("quant_method", "unnamed")).lower() in ("none", "") else found


def vision_type(hf: Mapping[str, Any]) -> str:
    """Return the fact that `auto` goes by where models of one class have several towers: `pixtral`; "" if unknown."""
    vision = hf.get("vision_config")
    return str(vision.get("model_type") or "") if isinstance(vision, Mapping) else ""


def quant_method(hf: Mapping[str, Any]) -> str:
    """Return the fact that `auto` goes by: `compressed-tensors`, `awq`; "" for a plain checkpoint."""
    config = quantization_config(hf)
    return str(config.get("quant_method", "unnamed")) if config else ""
