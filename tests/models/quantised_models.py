"""Checkpoints of whole models, packed by a method, and beside them the same with what that stands for written out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from families import make_checkpoint
from packers import METHODS, Method, four_bits
from safetensors.torch import load_file, save_file
from torch import Tensor

from dovetail.contracts.layers import BuildContext
from dovetail.contracts.quantization import Conversion, FileTensor, Quantization, Target
from dovetail.plugins import Registry
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.quantization import converted, factory_of
from dovetail.runtime.checkpoint.weights import load_weights
from dovetail.runtime.hf_config import CONFIG_KEYS, architecture, read_config
from dovetail_testing.conformance.model_runtime import TinyEngine
from dovetail_testing.targets import target_for

TARGET = target_for("float32")


def plugin_of(kind: str, name: str) -> Any:
    """Import a built-in."""
    return import_planned(as_planned(Registry.scan().resolve(kind, name)))


def matrices(folder: Path) -> dict[str, FileTensor]:
    """Return the plain tensors of a checkpoint that are matrices, or parts of them."""
    found: dict[str, FileTensor] = {}

    class Looks(Quantization):
        @classmethod
        def why_not(cls, config: Mapping[str, Any]) -> str | None:
            return None

        @classmethod
        def conversions(
            cls, config: Mapping[str, Any], tensors: Mapping[str, FileTensor], target: Target
        ) -> Iterable[Conversion]:
            found.update({name: tensor for name, tensor in tensors.items() if tensor.path})
            return ()

        def factory(self, plain: Any) -> Any:
            return plain

    read = ModelFolder(folder)
    model = plugin_of("model", read.architecture)
    config = read.model_config(model.config_from_hf, served=CONFIG_KEYS)
    converted(Looks, read, model, config, TARGET)
    return {name: tensor for name, tensor in found.items() if name.endswith(".weight") and len(tensor.shape) == 2}


def pack_model(plain: Path, packed: Path, method: Method, only: str = "") -> int:
    """Pack what the method can of a plain checkpoint, which gets those numbers itself; returns how many matrices.

    Args:
        plain: The checkpoint.
        packed: A folder that is not there yet.
        method: Packs a matrix.
        only: Part of the names of those that are packed.
    """
    shutil.copytree(plain, packed)
    of_file = {file.name: load_file(file) for file in plain.glob("*.safetensors")}
    wanted, num = matrices(plain), 0
    for file, tensors in of_file.items():
        made: dict[str, Tensor] = {}
        for name, tensor in list(tensors.items()):
            fits = (
                name in wanted
                and only in name
                and all(size % unit == 0 for size, unit in zip(tensor.shape, (8, 32), strict=False))
            )
            if not fits:
                made[name] = tensor
                continue
            num += 1
            parts = method.pack(tensor)
            made |= {name.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in parts.items()}
            tensors[name] = method.unpack(parts).contiguous()
        save_file(made, packed / file)
        save_file(tensors, plain / file)
    for index in packed.glob("*.index.json"):
        index.unlink()
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": dict(method.config)}))
    return num


def loaded(folder: Path, name: str) -> tuple[Any, Any]:
    """Build and load a model as the runner does, in float32, with a quantisation; returns it and its checkpoint."""
    packed, quantisation = ModelFolder(folder), plugin_of("quantization", name)
    model = plugin_of("model", packed.architecture)
    config = packed.model_config(model.config_from_hf, served=CONFIG_KEYS)
    read, rules = converted(quantisation, packed, model, config, TARGET), model.weight_map(config)
    factory = factory_of(quantisation, packed.config, rules, read.headers)
    with torch.inference_mode():
        made = model.build(config, BuildContext(device=torch.device("cpu"), dtype=torch.float32, factory=factory))
        load_weights(made, rules, read)
    return made, read


PROMPTS = [[5, 7, 11, 13, 17, 19, 23, 29], [3, 4]]


def logits(folder: Path, name: str = "") -> list[Tensor]:
    """Return a checkpoint's logits; with a quantisation, as that reads them."""
    hf = read_config(folder)
    plain = folder.with_name("plain") if name else folder
    engine = TinyEngine(plugin_of("model", architecture(hf, folder)), plain)
    if name:
        engine.model, _ = loaded(folder, name)
    return list(engine.prefill_logits(PROMPTS))


def same(mine: list[Tensor], right: list[Tensor]) -> None:
    """Compare logits."""
    for got, want in zip(mine, right, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4 * float(want.abs().max()))


def make(root: Path, way: str, family: str = "qwen3", **changes: Any) -> Path:
    """Write a family's checkpoint packed in one way, and what it stands for beside it; returns the folder."""
    make_checkpoint(root / "plain", family, **changes)
    pack_model(root / "plain", root / "packed", METHODS[way])
    return root / "packed"


def pack_stacked(plain: Path, packed: Path, method: Method) -> None:
    """Pack the tensors of a plain checkpoint that hold all experts, which get those numbers themselves."""
    file = plain / "model.safetensors"
    tensors, made = load_file(file), {}
    for name, tensor in list(tensors.items()):
        if tensor.dim() < 3:
            made[name] = tensor
            continue
        pairs = [method.make(expert) for expert in tensor]
        for suffix in pairs[0][0]:
            made[name + suffix.removeprefix(".weight")] = torch.stack([pair[0][suffix] for pair in pairs])
        tensors[name] = torch.stack([pair[1] for pair in pairs])
    assert len(made) > len(tensors)
    save_file(tensors, file)
    config = json.loads((plain / "config.json").read_text())
    packed.mkdir()
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": dict(method.config)}))
    save_file(made, packed / "model.safetensors")


def make_gpt_oss(root: Path, hidden_size: int = 64, intermediate_size: int = 96, **changes: Any) -> Path:
    """Write gpt-oss as published, its experts in mxfp4 in one tensor each, and the same plain beside it."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    make_checkpoint(root / "plain", "gpt_oss", **sizes, **changes)
    file = root / "plain/model.safetensors"
    tensors, packed = load_file(file), {}
    for name, tensor in list(tensors.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = tensor
            continue
        rows = tensor.transpose(1, 2).contiguous()  # [E, N, K]
        powers = (rows.view(*rows.shape[:2], -1, 32).abs().amax(-1) / 6).clamp_min(2.0**-60).log2().ceil()
        each = [four_bits(row, power.exp2(), 32) for row, power in zip(rows, powers, strict=True)]
        packed[f"{name}_blocks"] = torch.stack([pair[0].view(rows.shape[1], -1, 16) for pair in each])
        packed[f"{name}_scales"] = (powers + 127).to(torch.uint8)
        tensors[name] = torch.stack([pair[1] for pair in each]).transpose(1, 2).contiguous()
    save_file(tensors, file)
    config = json.loads((root / "plain/config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (root / "packed").mkdir()
    (root / "packed/config.json").write_text(json.dumps(config))
    save_file(packed, root / "packed/model.safetensors")
    return root / "packed"


def edit(folder: Path, **config: Any) -> None:
    """Change keys of `quantization_config`."""
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    whole["quantization_config"] |= config
    path.write_text(json.dumps(whole))


def change(folder: Path, ending: str, what: Any) -> str:
    """Replace the first tensor whose name ends so by what a function makes of it (None: it is gone)."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.endswith(ending))
    made = what(tensors.pop(name))
    save_file(tensors if made is None else {**tensors, name: made.contiguous()}, file)
    return name
