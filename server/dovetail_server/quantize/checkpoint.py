"""Writes a checkpoint in 8 or 4 bits, as compressed-tensors has it: transformers, vLLM and SGLang read it too.

Every matrix of the model is quantised by itself and without samples of text: fp8 and int8 with a scale for each row,
int4 with one for a group of inputs. Norms, embeddings, routers and the output head stay as they are. One shard at a
time is in memory. N outputs, K inputs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import ModelPlugin
from dovetail.contracts.quantization import FileTensor
from dovetail.runtime.checkpoint.files import Checkpoint
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.quantization import file_tensors, widths_of
from dovetail.runtime.checkpoint.weight_files import INDEX, PICKLED
from dovetail.runtime.checkpoint.weight_size import PLAIN_DTYPES
from dovetail.runtime.checkpoint.weights import MAX_THREADS, side_by_side
from dovetail.sdk.checkpoint import is_finite
from dovetail.sdk.config import some
from dovetail.sdk.quantization.forms import Int4, Scaled, in_groups
from dovetail.sdk.quantization.words import nibbles_of
from dovetail_server.quantize.partial import check_new, whole_folder

FORMATS = {"fp8": "float-quantized", "int8": "pack-quantized", "int4": "pack-quantized"}
"""What compressed-tensors calls each method. Its int-quantized is for models whose activations are rounded, too:
without that, others do not read it."""
GROUPS = (128, 64, 32)
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.gguf", "*.h5", "*.msgpack", *PICKLED)
"""Files that are not copied."""
MODULES = "[0-9]*_*"
"""Folders that are: what sentence-transformers puts behind a model, such as `1_Pooling`."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: matrices quantised, and those that are not; bytes before and after."""

    num: int
    plain: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def quantize(source: ModelFolder, out: Path, method: str, plugin: type[ModelPlugin], config: ModelConfig) -> Written:
    """Write the checkpoint of `source` to the new folder `out`; nothing is left there if it fails.

    Args:
        source: What a folder with a plain checkpoint says.
        out: Must not exist, or be empty.
        method: A key of `FORMATS`.
        plugin: The model's.
        config: Its facts.

    Raises:
        ModelError: The folder cannot be written to, or the checkpoint holds nothing to quantise or numbers that are not
            finite.
    """
    check_new(out)
    plain, rules = Checkpoint.of_folder(source), plugin.weight_map(config)
    if not rules:
        raise ModelError(
            f"{config.architecture} is read by another library; only models with a plugin can be quantised"
        )
    tensors = file_tensors(plain, rules, widths_of(plugin, config))
    packer = Packer.of(method, tensors)
    beside = sorted(source.path.iterdir())  # before a part of `out` stands there, too
    try:
        with whole_folder(out) as part:
            before, after = _write(plain, packer, part)
            for path in beside:
                if path.is_file() and not any(path.match(pattern) for pattern in WEIGHTS):
                    shutil.copy(path, part / path.name)
                elif path.is_dir() and path.match(MODULES):
                    shutil.copytree(path, part / path.name)
            ignore = packer.ignored(tensors)
            whole = {**source.config, "quantization_config": packer.config(ignore)}
            (part / "config.json").write_text(json.dumps(whole, indent=2), encoding="utf-8")
    except (OSError, SafetensorError) as error:  # a full disk is the second
        raise ModelError(f"{out}: cannot be written: {error}") from None
    return Written(len(packer.names), tuple(ignore), before, after)


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs some of a checkpoint's matrices.

    Attributes:
        method: A key of `FORMATS`.
        group: Inputs that share a scale; None: a row's.
        names: Tensors that are packed.
    """

    method: str
    group: int | None
    names: frozenset[str]

    @classmethod
    def of(cls, method: str, tensors: Mapping[str, FileTensor]) -> Packer:
        """Choose what is packed, and the size of groups: the largest that divides the most matrices.

        Raises:
            ModelError: There is no matrix to pack.
        """
        found = {
            name: tensor.shape[1]
            for name, tensor in tensors.items()
            if tensor.path and name.endswith(".weight") and len(tensor.shape) == 2 and tensor.dtype in PLAIN_DTYPES
        }
        group = None
        if method == "int4":
            group = max(GROUPS, key=lambda size: (sum(width % size == 0 for width in found.values()), size))
            found = {name: width for name, width in found.items() if width % group == 0}
        if not found:
            raise ModelError(f"--method {method}: the checkpoint has no matrix that can be quantised")
        return cls(method, group, frozenset(found))

    def pack(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a matrix; scales have its dtype, and numbers are made for the rounded scale."""
        if self.group is not None:
            made = Int4(self.group, weight.dtype).quantise(weight)
            words, scale = in_plain_order(made["weight_packed"]), made["weight_scale"]
        else:
            form = Scaled(torch.float8_e4m3fn if self.method == "fp8" else torch.int8)
            scale = form.quantise(weight)["weight_scale"].to(weight.dtype)
            numbers = form.numbers(weight, scale)
            if self.method == "fp8":
                return {name: numbers, f"{name}_scale": scale}
            bytes_ = F.pad(numbers.view(torch.uint8) ^ 128, (0, -numbers.shape[1] % 4))
            words = bytes_.view(torch.int32)
        return {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": torch.tensor(weight.shape)}

    def config(self, ignore: list[str]) -> dict[str, Any]:
        """Return the `quantization_config`."""
        weights: dict[str, Any] = {
            "num_bits": 4 if self.method == "int4" else 8,
            "type": "float" if self.method == "fp8" else "int",
            "symmetric": True,
            "strategy": "channel" if self.group is None else "group",
            "group_size": self.group,
            "dynamic": False,
            "actorder": None,
            "block_structure": None,
            "observer": "minmax",
            "observer_kwargs": {},
        }
        scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": FORMATS[self.method],
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": ignore,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def ignored(self, tensors: Mapping[str, FileTensor]) -> list[str]:
        """Return the modules with a matrix that is not packed; the output head, even if the file has none."""
        plain = [name.removesuffix(".weight") for name, each in tensors.items() if len(each.shape) == 2]
        packed = {name.removesuffix(".weight") for name in self.names}
        return sorted({name for name in plain if name not in packed and "embed" not in name} | {"lm_head"})


def in_plain_order(words: Tensor) -> Tensor:
    """Return words `[N, K / 8]` that hold the first of eight in the lowest bits, of words in `ORDER`."""
    eight = in_groups(nibbles_of(words), 8)
    made = torch.zeros_like(words)
    for place in range(8):
        made |= eight[..., place].to(torch.int32) << (4 * place)
    return made


def _write(plain: Checkpoint, packer: Packer, out: Path) -> tuple[int, int]:
    """Write file by file; returns the bytes of tensors before and after."""
    files = list(dict.fromkeys(header.file for header in plain.headers))
    where: dict[str, str] = {}
    before, after = sum(header.num_bytes for header in plain.headers), 0
    with plain, tqdm(total=before, desc="Quantizing", unit="B", unit_scale=True, unit_divisor=1024) as bar:
        for file in files:
            made = _made(plain, packer, file, bar)
            save_file(made, out / file.name, metadata={"format": "pt"})
            where |= dict.fromkeys(made, file.name)
            after += sum(tensor.numel() * tensor.element_size() for tensor in made.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": after}, "weight_map": dict(sorted(where.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return before, after


def _made(plain: Checkpoint, packer: Packer, file: Path, bar: Any) -> dict[str, Tensor]:
    """Return the tensors of one of the new files, made side by side.

    Raises:
        ModelError: Numbers of the old file are not finite.
    """
    headers = [header for header in plain.headers if header.file == file]
    made: dict[str, Tensor] = {}
    poisoned = []

    def make(name: str) -> int:
        tensor = plain.read(name)
        if not is_finite(tensor):
            poisoned.append(name)
        elif name in packer.names:
            made.update((each, part.contiguous()) for each, part in packer.pack(name, tensor).items())
        else:
            made[name] = tensor.contiguous()
        return tensor.numel() * tensor.element_size()

    for num_bytes in side_by_side(make, [header.name for header in headers], MAX_THREADS):
        bar.update(num_bytes)
    if poisoned:
        raise ModelError(
            f"{file}: weights that are not finite: {some(sorted(poisoned))}; download the checkpoint again"
        )
    return made
