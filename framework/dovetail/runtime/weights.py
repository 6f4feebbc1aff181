"""Fills a model from safetensors: one tensor at a time, fused in place, with a progress bar and a full account."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from dovetail.contracts.model import WeightRule
from dovetail.errors import ModelError
from dovetail.layers.base import Layer
from dovetail.runtime.hf_config import checkpoint_files, some

Part = tuple[str, str | None]
"""Parameter name in the model, and slot of a fused parameter."""


def load_weights(model: nn.Module, rules: Sequence[WeightRule], folder: Path) -> int:
    """Load every tensor of the folder's checkpoint into `model` and finalise its layers.

    Returns:
        Bytes read.

    Raises:
        ModelError: No safetensors, a broken file, a wrong shape, or missing or unexpected weights; all are named.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Layer)}
    wanted = {(f"{name}.{param}", slot) for name, layer in layers.items() for param, slot in layer.expected()}
    loaded: set[Part] = set()
    unexpected: list[str] = []
    total = 0
    compiled = [(re.compile(rule.pattern), rule) for rule in rules]
    for name, tensor in _tensors(checkpoint_files(folder)):
        total += tensor.numel() * tensor.element_size()
        part = _place(name, compiled)
        if part is None or (part[0] and part not in wanted):
            unexpected.append(name)
        elif part[0]:
            _load_one(layers, part, name, tensor)
            loaded.add(part)
    _check(wanted - loaded, unexpected, folder)
    finalize(model)
    return total


def fill_dummy(model: nn.Module, seed: int = 0) -> None:
    """Fill with small random numbers and finalise: for benchmarks without a checkpoint."""
    params = list(model.parameters())
    device = params[0].device
    generator = torch.Generator(device=device).manual_seed(seed)
    for param in tqdm(params, desc="Filling dummy weights", unit="tensor", leave=False):
        if param.dim() == 1:
            param.fill_(1.0)
        else:
            param.normal_(0.0, 0.02, generator=generator)
    finalize(model)


def finalize(model: nn.Module) -> None:
    """Let every layer repack its weights."""
    for module in list(model.modules()):
        if isinstance(module, Layer):
            module.finalize()


def _tensors(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    files = list(files)
    size = sum(path.stat().st_size for path in files)
    with tqdm(total=size, desc="Loading weights", unit="B", unit_scale=True, unit_divisor=1024) as bar:
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a dict
                        tensor = file.get_tensor(name)
                        yield name, tensor
                        bar.update(tensor.numel() * tensor.element_size())
            except SafetensorError as error:
                raise ModelError(f"{path}: broken safetensors file ({error}); download it again") from None


def _place(name: str, rules: Sequence[tuple[re.Pattern[str], WeightRule]]) -> Part | None:
    """Where a checkpoint name goes: None if no rule knows it, an empty target if it is not needed."""
    for pattern, rule in rules:
        if match := pattern.fullmatch(name):
            return match.expand(rule.target), match.expand(rule.slot) if rule.slot else None
    return None


def _load_one(layers: dict[str, Layer], part: Part, name: str, tensor: Tensor) -> None:
    path, _, param = part[0].rpartition(".")
    try:
        layers[path].load_weight(param, part[1], tensor)
    except ValueError as error:
        raise ModelError(f"weight {name!r}: {error}; does config.json belong to this checkpoint?") from None


def _check(missing: set[Part], unexpected: list[str], folder: Path) -> None:
    if not missing and not unexpected:
        return
    parts = []
    if missing:
        names = sorted(name if slot is None else f"{name}[{slot}]" for name, slot in missing)
        parts.append(f"missing: {some(names)}")
    if unexpected:
        parts.append(f"unexpected: {some(unexpected)}")
    raise ModelError(f"{folder}: the weights do not fit the model; {'; '.join(parts)}")
